"""Calls of modules, whole: inputs before the call, outputs after it, and the gradients of both, by position.

Torch's own backward hooks on modules make outputs and inputs that must not be changed in place, and refuse modules that
have older hooks. So gradients come from hooks on the tensors: an input is handed on as a view, whose gradient is this
call's share; an output is hooked as it is, and only where there are several is each handed on as a view, because then
one may be a step on the way to another. A call's gradients become rows in the order and at the moment in which torch's
hook would be called: when those of all inputs that the backward pass comes to are there, or, where no input needs one,
those of all outputs.

Within a call gradients are held as numbers. What is hooked lives as long as its graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trainmon.adapters.rows_parts.kinds import AddRow, Failed
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_parts.modules import is_repeated
from trainmon.adapters.torch_rows.meter import Meter
from trainmon.adapters.torch_rows.tensors import all_tensors, one_level
from trainmon.backend.statistics import Reading, of_zeros

if TYPE_CHECKING:
    from trainmon.adapters.torch_rows.passes import Passes

__all__ = ["CallHooks"]


OnGradient = Callable[[torch.Tensor], None]


@dataclass(slots=True)
class _Call:
    """What has come of one call's gradients. Holds neither tensors nor nodes of the graph."""

    named: Named
    arguments: dict[int, int]  # elements of each tensor that may have a gradient
    micro: int = 0
    number: int = 0  # among the module's calls in the micro-batch
    counts: bool = True  # whether what it is given and gives has rows
    inputs: dict[int, Reading] = field(default_factory=dict)
    outputs: dict[int, Reading] = field(default_factory=dict)
    expected: int | None = None  # gradients of inputs to come; None: not known yet


class _Reach:
    """Nodes of the graph by which a call learns what the backward pass will come to. Only hooks on outputs hold it."""

    __slots__ = ("__weakref__", "inputs", "outputs")

    def __init__(self, inputs: list[Any]) -> None:
        self.inputs = inputs
        self.outputs: list[Any] = []

    def clear(self) -> None:
        self.inputs.clear()
        self.outputs.clear()


class CallHooks:
    """Hooks on modules.

    Args:
        modules: which.
        add: takes rows.
        lossy: leave out what torch's backward hooks don't show: gradients of outputs in lists, and of calls whose inputs
            need a gradient and get none.
        passes: which pass the model is in. With it tensors are found in nested containers, too, there are no rows of
            zeros for arguments without a gradient, and a gradient has the index of the tensor that it belongs to.
        evaluation, repeated: whether passes of evaluation, and those that checkpointing repeats, have rows; asked only
            if there are ``passes``.

    Attributes:
        on: whether this step is looked at.
    """

    def __init__(
        self,
        modules: Sequence[Named],
        meter: Meter,
        add: AddRow,
        failed: Failed,
        *,
        lossy: bool = False,
        passes: Passes | None = None,
        evaluation: bool = True,
        repeated: bool = True,
    ) -> None:
        self.on = False
        self._modules, self._meter, self._add, self._failed = modules, meter, add, failed
        self._lossy, self._passes = lossy, passes
        self._evaluation, self._repeated = evaluation, repeated
        self._handles: list[Any] = []
        self._open: dict[int, list[tuple[int, _Call, _Reach]]] = {}  # calls under way, by module
        self._hooked: Any = WeakIdKeyDictionary()  # tensor: its version and who wants its gradient
        self._reaches: weakref.WeakSet[_Reach] = weakref.WeakSet()

    def install(self) -> None:
        for named in self._modules:
            self._handles.append(named.thing.register_forward_pre_hook(self._before(named), with_kwargs=True))
            self._handles.append(named.thing.register_forward_hook(self._after(named), with_kwargs=True))

    def watched(self) -> str:
        """What is hooked, in words."""
        return f"{len(self._modules)} modules"

    def arm(self, on: bool) -> None:
        """A step begins."""
        self.on = on
        self._open.clear()
        self._hooked.clear()
        for reach in self._reaches:
            reach.clear()
        self._reaches.clear()

    def remove(self) -> None:
        """Idempotent."""
        self.arm(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- forward ----------------------------------------------------------------------------------------------------

    def _before(self, named: Named) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if not self.on or torch.compiler.is_compiling():
                return None
            try:
                return self._enter(named, module, arguments, keywords)
            except Exception as error:
                self._failed(error)
                return None

        return hook

    def _after(self, named: Named) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> Any:
            if not self.on or torch.compiler.is_compiling():
                return None
            try:
                return self._leave(named, module, arguments, output)
            except Exception as error:
                self._failed(error)
                return None

        return hook

    def _enter(
        self, named: Named, module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        call = self._begun(named, module)
        if call is None:
            return None
        if self._passes is None:
            shown = [one for one in arguments if isinstance(one, torch.Tensor)]
            places: list[tuple[int, int | str]] = []
            for at, one in enumerate(arguments):
                if isinstance(one, torch.Tensor):
                    places.append((len(places), at))
            shown += [one for one in keywords.values() if isinstance(one, torch.Tensor)]
        else:
            shown, places = [], []
            named_arguments: list[tuple[int | str, Any]] = [*enumerate(arguments), *keywords.items()]
            for key, one in named_arguments:
                if isinstance(one, torch.Tensor):
                    places.append((len(shown), key))
                shown += all_tensors(one)
        if call.counts:
            self._rows(call, "input", shown)
        changed, named_too = list(arguments), dict(keywords)
        nodes = []
        for index, place in places if torch.is_grad_enabled() else ():
            tensor = shown[index]
            call.arguments[index] = tensor.numel()
            if tensor.requires_grad:
                view = _handed_on(tensor, module)
                if isinstance(place, int):
                    changed[place] = view
                else:
                    named_too[place] = view
                nodes.append(view.grad_fn)
                self._follow(view, self._input(call, index))
        result = tuple(changed)
        self._open.setdefault(id(module), []).append((id(result), call, _Reach(nodes)))
        return result, named_too

    def _begun(self, named: Named, module: nn.Module) -> _Call | None:
        """A call with its number; None if its pass is left out."""
        if self._passes is None:
            return _Call(named, {})
        if not self._evaluation and self._passes.is_evaluation(named.stage, module):
            return None
        again = is_repeated()
        micro, number = self._passes.count(named.stage, module, again and not self._repeated)
        return _Call(named, {}, micro, number, self._repeated or not again)

    def _leave(self, named: Named, module: nn.Module, arguments: Any, output: Any) -> Any:
        found = self._taken(module, arguments)
        if found is None:
            return None
        call, reach = found
        deep = self._passes is not None
        tensors = list(enumerate(all_tensors(output))) if deep else one_level(output)
        if call.counts:
            self._rows(call, "output", [one for _, one in tensors])
        if not torch.is_grad_enabled() or (isinstance(output, list) and self._lossy):
            return None  # torch looks into tuples only
        wanted = [(at, one) for at, one in tensors if one.requires_grad]
        if isinstance(output, torch.Tensor) and wanted:
            if output.grad_fn is None:  # a parameter handed out: its own gradient is not this call's
                output = output.view_as(output)
            self._follow(output, self._output(call, reach, 0, output.grad_fn))
            return output
        places = _places(output, deep) if isinstance(output, tuple) and len(wanted) > 1 else {}
        changed = list(output) if places else []
        for at, one in wanted:
            if at in places:
                changed[places[at]] = view = one.view_as(one)
                reach.outputs.append(view.grad_fn)
                self._follow(view, self._output(call, reach, at, view.grad_fn))
            else:
                self._follow(one, self._output(call, reach, at, one.grad_fn))
        if not reach.outputs:
            return None
        self._reaches.add(reach)
        return tuple(changed) if type(output) is tuple else type(output)(*changed)

    def _taken(self, module: nn.Module, arguments: Any) -> tuple[_Call, _Reach] | None:
        """The call that ends here; those begun after it ended with an exception."""
        begun = self._open.get(id(module))
        while begun:
            key, call, reach = begun.pop()
            if key == id(arguments) or not any(key == id(arguments) for key, _, _ in begun):
                return call, reach
        return None

    # -- backward ---------------------------------------------------------------------------------------------------

    def _follow(self, tensor: torch.Tensor, take: OnGradient) -> None:
        """Has a tensor's gradient taken. Of those who want the same one, who came last is first, as for torch's hooks: a
        module's output is taken before that of the child that made it."""
        known = self._hooked.get(tensor)
        if known is not None and known[0] == tensor._version:
            known[1].append(take)
            return
        takers = [take]

        def hook(gradient: torch.Tensor) -> None:
            if not self.on:
                return
            for one in reversed(takers):
                try:
                    one(gradient)
                except Exception as error:
                    self._failed(error)

        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        self._hooked[tensor] = tensor._version, takers

    def _input(self, call: _Call, at: int) -> OnGradient:
        def take(gradient: torch.Tensor) -> None:
            call.inputs[at] = self._meter.read([gradient])[0]
            if call.expected is not None and len(call.inputs) >= call.expected:
                self._emit(call)

        return take

    def _output(self, call: _Call, reach: _Reach, at: int, own: Any) -> OnGradient:
        # Of a module that hands its input on, the node is the input's: it would hold itself.
        itself = sum(node is own for node in reach.inputs)
        reach.inputs = [node for node in reach.inputs if node is not own]

        def take(gradient: torch.Tensor) -> None:
            call.outputs[at] = self._meter.read([gradient])[0]
            comes = torch._C._will_engine_execute_node
            needed = itself + len(reach.inputs)
            call.expected = itself + sum(comes(node) for node in reach.inputs if node is not None)
            if call.expected:
                if len(call.inputs) >= call.expected:
                    self._emit(call)
            elif needed and self._lossy:
                call.outputs.clear()
            elif len(call.outputs) >= sum(map(comes, reach.outputs)):
                self._emit(call)

        return take

    def _emit(self, call: _Call) -> None:
        inputs, outputs = call.inputs, call.outputs
        call.inputs, call.outputs, call.expected = {}, {}, None  # the graph may be gone through again
        for index, size in call.arguments.items():
            if index in inputs:
                self._row(call, "grad_input", index, inputs[index])
            elif inputs and self._passes is None:
                # Torch hands out zeros for what takes no part once anything else of the call does.
                self._row(call, "grad_input", index, of_zeros(size))
        for index, at in enumerate(sorted(outputs)):
            self._row(call, "grad_output", index if self._passes is None else at, outputs[at])

    def _rows(self, call: _Call, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        for index, reading in enumerate(self._meter.read(tensors)):
            self._row(call, kind, index, reading)

    def _row(self, call: _Call, kind: str, index: int, reading: Reading) -> None:
        scope = "backward" if kind.startswith("grad") else "forward"
        name, stage = call.named.name, call.named.stage
        self._add(f"{name}.{kind}.{index}", scope, stage, call.micro, reading, call.number)


def _places(output: tuple[Any, ...], deep: bool) -> dict[int, int]:
    """Where in the tuple itself a tensor is, by its index."""
    if not deep:
        return {at: at for at, _ in one_level(output)}
    places, index = {}, 0
    for at, one in enumerate(output):
        if isinstance(one, torch.Tensor):
            places[index] = at
        index += sum(1 for _ in all_tensors(one))
    return places


def _handed_on(tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The tensor for the module to work on. What it is told to change in place stays itself: the gradient of what it was
    before is asked of where it came from."""
    if getattr(module, "inplace", False) and not tensor.is_leaf:
        return tensor
    return tensor.view_as(tensor)
