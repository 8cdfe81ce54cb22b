"""What flows through each module, and where it is called from: shapes and dtypes, no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from trainmon.adapters.rows_parts.call_sites import stack_of_call
from trainmon.adapters.rows_parts.kinds import Failed
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.rows_parts.structure import Structure, add_gradient, described
from trainmon.adapters.torch_rows.calls import CallHooks
from trainmon.adapters.torch_rows.meter import Meter
from trainmon.backend.statistics import Facts, Reading

__all__ = ["StackHooks", "StructureHooks"]


class StructureHooks:
    """Describes the first call of each module in the steps that are looked at.

    Attributes:
        found: by module and ``input``, ``output``, ``input_grad``, ``output_grad``; the container's kind under
            ``config``, and each element's size and dtype by position.
    """

    def __init__(self, modules: Sequence[Named], failed: Failed) -> None:
        self.found: Structure = {}
        self._modules, self._failed = modules, failed
        self._calls = CallHooks(modules, _Facts(), self._gradient, failed)
        self._handles: list[Any] = []

    @property
    def on(self) -> bool:
        return self._calls.on

    def install(self) -> None:
        self._calls.install()
        for named in self._modules:
            hook = self._hook(named.name)
            self._handles.append(named.thing.register_forward_hook(hook, with_kwargs=True))

    def watched(self) -> str:
        return self._calls.watched()

    def arm(self, on: bool) -> None:
        self._calls.arm(on)

    def remove(self) -> None:
        """Idempotent."""
        self._calls.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: Any, keywords: Mapping[str, Any], output: Any) -> None:
            if not self.on or torch.compiler.is_compiling() or "output" in self.found.get(name, {}):
                return
            try:
                own = self.found.setdefault(name, {})
                own["input"] = described(arguments, torch.Tensor)
                own["input"] |= {**described(keywords, torch.Tensor), "config": own["input"]["config"]}
                own["output"] = described(output, torch.Tensor)
            except Exception as error:
                self._failed(error)

        return hook

    def _gradient(
        self, name: str, scope: str, stage: int, micro: int, reading: Reading, call: int = 0
    ) -> None:
        if scope != "backward":
            return
        add_gradient(self.found, name, reading.facts)


class StackHooks:
    """Takes the stack of the first call of each module in the steps that are looked at.

    Attributes:
        found: by module.
    """

    def __init__(self, modules: Sequence[Named], failed: Failed) -> None:
        self.on = False
        self.found: dict[str, str] = {}
        self._modules, self._failed = modules, failed
        self._handles: list[Any] = []

    def install(self) -> None:
        self._handles = [one.thing.register_forward_pre_hook(self._hook(one.name)) for one in self._modules]

    def watched(self) -> str:
        return f"{len(self._modules)} modules"

    def arm(self, on: bool) -> None:
        self.on = on

    def remove(self) -> None:
        """Idempotent."""
        self.on = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _arguments: Any) -> None:
            if self.on and name not in self.found and not torch.compiler.is_compiling():
                try:
                    self.found[name] = stack_of_call(_INNER)
                except Exception as error:
                    self._failed(error)

        return hook


#: Files whose frames say nothing about the model.
_INNER = frozenset({__file__, str(torch_module.__file__)})


class _Facts(Meter):
    """Reads no element."""

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Reading]:
        return [Reading(_NO_RECORDS, 0, facts=Facts(tuple(one.shape), str(one.dtype))) for one in tensors]


_NO_RECORDS: Any = None
