"""Hooks on modules: what flows through them in training, and which modules can be hooked at all.

A hook looks at one flag and is done unless this step is looked at. It never keeps a tensor, never changes one, and
does nothing

- in evaluation mode (of the module itself) and while `evaluation()` of the loop is open,
- while torch traces the module for a compiled graph, where values don't exist yet,
- when checkpointing repeats a forward pass during backward: what was seen is counted once.

Gradients come from hooks on the tensors, put there when these pass forward, and so with the value that they have
there: torch's own backward hooks on modules make outputs that must not be changed in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainmon.adapters.base import plain_name
from trainmon.adapters.torch_parts.shards import detached
from trainmon.events import Flow, ModuleSeen
from trainmon.monitor import TrainMonitor

__all__ = ["ModuleHooks", "hookable", "is_repeated", "parts_of", "tensors_in", "within"]

_DEPTH = 8  # of containers within containers


def hookable(
    model: nn.Module, name_of: Callable[[str], str] | None = None
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Modules below the model by plain name, in its order, and those whose hooks would not be called because they lie
    inside a compiled module. Of a wrapper and what it wraps the wrapper is taken: a repeated forward
    pass goes by it."""
    found: dict[str, nn.Module] = {}
    compiled: dict[str, nn.Module] = {}
    known: set[int] = set()

    def walk(module: nn.Module, name: str, inside: bool) -> None:
        if id(module) in known:
            return
        known.add(id(module))
        scripted = isinstance(module, torch.jit.ScriptModule)
        inside = inside or scripted or getattr(module, "_compiled_call_impl", None) is not None
        plain = plain_name(name + ".").rstrip(".")
        plain = plain if name_of is None or not plain else name_of(plain)
        if plain and plain not in found:
            if not inside:
                found[plain] = module
            else:
                compiled.setdefault(plain, module)
        inside = inside or type(module).__name__ == "OptimizedModule"  # its own hooks run, those below don't
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, inside)

    walk(model, "", False)
    return found, compiled


def within(module: nn.Module) -> nn.Module:
    """What a wrapper (recomputation, DDP) holds in the end; of any other module itself."""
    while True:
        children = list(module.named_children())
        if len(children) != 1 or plain_name(f"{children[0][0]}."):
            return module
        module = children[0][1]


def is_repeated() -> bool:
    """Whether this forward pass runs within a backward pass: checkpointing repeats it."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses, to any sensible depth; each once, None and others passed
    over."""
    found: dict[int, torch.Tensor] = {}
    _collect(value, found, 0)
    return list(found.values())


def _collect(value: Any, found: dict[int, torch.Tensor], depth: int) -> None:
    # No inner function: one that calls itself is a cycle, and would keep the tensors until the next collection.
    if isinstance(value, torch.Tensor):
        found.setdefault(id(value), value)
    elif depth < _DEPTH:
        for item in parts_of(value):
            _collect(item, found, depth + 1)


def parts_of(value: Any) -> Iterator[Any]:
    """What a tuple, list, mapping or dataclass holds; nothing of anything else."""
    if isinstance(value, Mapping):  # also the outputs of transformers
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))


def _readable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Floats that are somewhere, as plain dense tensors without a graph."""
    found = []
    for tensor in tensors:
        tensor = detached(tensor)
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        if tensor.is_nested:
            tensor = tensor.values()
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        found.append(tensor)
    return found


class ModuleHooks:
    """Makes :class:`ModuleSeen` of the calls of some modules.

    Args:
        modules: by the name that the event carries.
        flows: what is looked at.
        micro: the number of the running micro-batch.

    Attributes:
        on: whether this step is looked at.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        flows: Sequence[Flow],
        monitor: TrainMonitor,
        micro: Callable[[], int],
    ) -> None:
        self.on = False
        self._modules, self._flows = modules, frozenset(flows)
        self._monitor, self._micro = monitor, micro
        self._handles: list[Any] = []
        self._gradient_handles: list[Any] = []

    @property
    def names(self) -> list[str]:
        return list(self._modules)

    def install(self) -> None:
        for name, module in self._modules.items():
            if self._flows & {"input", "grad_input"}:
                hook = self._before(name)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            if self._flows & {"output", "grad_output"}:
                self._handles.append(module.register_forward_hook(self._after(name)))

    def arm(self, on: bool) -> None:
        """A step begins."""
        self.on = on
        for (
            handle
        ) in self._gradient_handles:  # of tensors that no backward pass came to, a parameter among them
            handle.remove()
        self._gradient_handles.clear()

    def remove(self) -> None:
        """Idempotent."""
        self.arm(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if torch.compiler.is_compiling() or not self.on or not module.training:
                return
            self._pass(name, (arguments, keywords), "input", "grad_input")

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self.on or not module.training:
                return
            self._pass(name, output, "output", "grad_output")

        return hook

    def _pass(self, name: str, value: Any, forward: Flow, backward: Flow) -> None:
        micro = self._micro()
        if forward in self._flows and not is_repeated():
            self._monitor.offer(
                ModuleSeen, lambda: ModuleSeen(name, forward, _readable(tensors_in(value)), micro)
            )
        if backward in self._flows:
            # In a repetition too: either its graph is the one that runs backward, or the hooks are never called.
            self._monitor.guard(lambda: self._follow(name, tensors_in(value), backward, micro))

    def _follow(self, name: str, tensors: Sequence[torch.Tensor], flow: Flow, micro: int) -> None:
        def hook(gradient: torch.Tensor) -> None:
            if self.on and not torch.compiler.is_compiling():
                self._monitor.offer(ModuleSeen, lambda: ModuleSeen(name, flow, _readable([gradient]), micro))

        for tensor in tensors:
            if tensor.requires_grad:
                self._gradient_handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
