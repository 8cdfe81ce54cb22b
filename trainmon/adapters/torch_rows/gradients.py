"""Gradients of parameters each time one has been added to: before the ranks reduce them, where anything comes before.

Under FSDP gradients are reduced inside backward, and come all together when it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from trainmon.adapters.rows_parts.kinds import AddRow, Failed, Say
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_parts.shards import local
from trainmon.adapters.torch_rows.meter import Meter
from trainmon.adapters.torch_rows.tensors import all_tensors

__all__ = ["GradientHooks", "gradient_of"]

_WRAPPER = "_fsdp_wrapped_module."


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer will take: ``main_grad`` where gradients are summed in another place."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


class GradientHooks:
    """Hooks on parameters, which count micro-batches in every step and read in those that are looked at.

    Args:
        count: micro-batches of a step.
        each: a row for each of them, not for the last alone.
        sharded: gradients come all together when backward is over.
        models: whose parameters call no hooks because FSDP1 has put them together: what comes out of them does.
        say: is told once that a step has more micro-batches than that.
        own: what each micro-batch adds, not what has been summed up.
        on_nodes: hook the nodes that add gradients up, which live only as long as somebody holds them (msProbe).

        empty: gradients without elements have rows.

    Attributes:
        on: whether this step is looked at.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        meter: Meter,
        add: AddRow,
        failed: Failed,
        *,
        count: int,
        each: bool,
        say: Say,
        sharded: bool = False,
        models: Sequence[nn.Module] = (),
        own: bool = False,
        on_nodes: bool = False,
        empty: bool = True,
    ) -> None:
        self.on = False
        self._parameters, self._meter, self._add, self._failed = parameters, meter, add, failed
        self._count, self._each, self._sharded, self._on_nodes = count, each, sharded, on_nodes
        self._own, self._empty, self._models = own, empty, models
        self._say: Say | None = say
        self._seen: dict[str, int] = {}
        self._first, self._rounds = "", 0  # how often this step has added to one of the parameters
        self._last: TensorWeakRef | None = None  # its gradient then
        self._handles: dict[str, Any] = {}
        self._model_handles: list[Any] = []
        self._awaits_end = False
        self._installed = False

    def install(self) -> None:
        """On all that need a gradient and have no hook yet."""
        if not self._installed:
            self._model_handles = [one.register_forward_hook(self._on_output) for one in self._models]
        self._installed = True
        for named in self._parameters:
            parameter = named.thing
            if named.name in self._handles or not (parameter.requires_grad and parameter.is_leaf):
                continue
            if self._on_nodes and not self._sharded:
                with torch.enable_grad():
                    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                self._handles[named.name] = node.register_hook(self._on_node(named))
            elif self._own and not self._sharded:
                self._handles[named.name] = parameter.register_hook(self._on_own(named))
            else:
                self._handles[named.name] = parameter.register_post_accumulate_grad_hook(self._hook(named))

    def watched(self) -> str:
        """What is hooked, in words."""
        left = len(self._parameters) - len(self._handles)
        return f"{len(self._handles)} parameters" + (f" ({left} need no gradient)" if left else "")

    def arm(self, on: bool) -> None:
        """A step begins; what has been unfrozen since gets its hook."""
        self.on = on
        self._awaits_end = False
        if self._rounds > self._count and self._say is not None:
            self._say(
                f"a step has {self._rounds} micro-batches, but {self._count} of them are expected, so micro_step is "
                "wrong: set micro_batch_number, or pass it to start()"
            )
            self._say = None
        self._rounds = 0
        if self._installed and not self._on_nodes and len(self._handles) < len(self._parameters):
            self.install()

    def remove(self) -> None:
        """Idempotent."""
        self.on = self._installed = False
        for handle in (*self._handles.values(), *self._model_handles):
            handle.remove()
        self._handles, self._model_handles = {}, []

    def _on_node(self, named: Named) -> Any:
        hook = self._hook(named)
        return lambda *_gradients: hook(named.thing)

    def _on_own(self, named: Named) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            try:
                self._added(named, gradient)
            except Exception as error:
                self._failed(error)

        return hook

    def _hook(self, named: Named) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            try:
                if self._sharded:
                    self._wait_for_end()
                else:
                    self._added(named)
            except Exception as error:
                self._failed(error)

        return hook

    def _on_output(self, _model: nn.Module, _arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            for tensor in all_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self._wait_for_end())  # type: ignore[no-untyped-call]
        except Exception as error:
            self._failed(error)

    def _wait_for_end(self) -> None:
        if not self._awaits_end:
            self._awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._awaits_end = False
        try:
            for named in self._parameters:
                if gradient_of(named.thing) is not None:
                    self._added(named)
        except Exception as error:
            self._failed(error)

    def _count_round(self, gradient: torch.Tensor | None, not_added: bool) -> None:
        """A gradient that is not the one of the round before begins anew: the step before was thrown away."""
        if gradient is None if not_added else self._last is None or self._last() is not gradient:
            self._rounds = 0
        self._last = None if gradient is None else TensorWeakRef(gradient)
        self._rounds += 1

    def _added(self, named: Named, own: torch.Tensor | None = None) -> None:
        self._first = self._first or named.name
        if named.name == self._first:
            self._count_round(gradient_of(named.thing), own is not None)
        micro = self._seen.get(named.name, 0) + 1
        self._seen[named.name] = 0 if micro >= self._count else micro
        if not self.on or not (self._each or micro >= self._count):
            return
        gradient = gradient_of(named.thing) if own is None else own
        if gradient is not None and (self._empty or local(gradient).numel()):
            reading = self._meter.read([gradient])[0]
            name = named.name.replace(_WRAPPER, "") if self._sharded else named.name
            self._add(name, "unreduced", named.stage, micro if self._each else self._count, reading)
