"""A torch model and its optimizer, as rows want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainmon.adapters.rows_parts.kinds import AddCall, AddRow, Chosen, Failed, Row, Say
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_parts.modules import hookable
from trainmon.adapters.torch_parts.shards import local
from trainmon.adapters.torch_rows.calls import CallHooks
from trainmon.adapters.torch_rows.collectives import CollectiveHooks, is_distributed
from trainmon.adapters.torch_rows.gradients import GradientHooks, gradient_of
from trainmon.adapters.torch_rows.meter import Meter
from trainmon.adapters.torch_rows.more import More
from trainmon.adapters.torch_rows.names import (
    chunks_of,
    flattened,
    is_sharded,
    named_modules,
    named_parameters,
)
from trainmon.adapters.torch_rows.passes import Passes
from trainmon.adapters.torch_rows.state import state_of, states_of
from trainmon.adapters.torch_rows.steps import StepHooks
from trainmon.adapters.torch_rows.unsharded import UnshardedHooks
from trainmon.backend import Backend

__all__ = ["TorchRows"]

#: What msProbe reads of an optimizer's state.
_KEYS = ("exp_avg", "exp_avg_sq")
#: Counts, and copies of the weights in higher precision.
_NO_STATE = frozenset({"step", "mu_product", "master_param", "master_weight", "master"})


class TorchRows:
    """What can be seen of a model; nothing is hooked until somebody asks.

    Args:
        model: a module, or a list of chunks with None for those of other ranks.
        optimizer: one, a wrapper, a list, or None.
        failed, say: take what goes wrong in a hook, and what the user should know.
        as_msprobe: with msProbe's blind spots.
        extended: more than msProbe's rows.

    Raises:
        TypeError: ``model`` is neither.
    """

    communication = "torch.distributed"
    reasons: Mapping[str, str] = {}

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        failed: Failed,
        say: Say,
        *,
        as_msprobe: bool = False,
        extended: bool = False,
    ) -> None:
        self._model, self._optimizer, self._failed, self._say = model, optimizer, failed, say
        self._as_msprobe, self._extended = as_msprobe, extended
        self._meter = Meter(as_msprobe=as_msprobe, modulus=extended)
        self._parameters = named_parameters(model, optimizer)
        self._sharded = is_sharded(model)
        self._with_state: set[str] = set()
        self._passes = Passes(model, self._parameters, failed)

    def more(self) -> More:
        """What msProbe's older monitor shows beside rows."""
        return More(self._model, self._optimizer, self._parameters, self._meter, self._failed)

    @property
    def backend(self) -> Backend | None:
        """Where readings that are still on a device come from."""
        return self._meter.backend

    def calls(
        self, add: AddRow, wanted: Chosen, *, evaluation: bool = True, repeated: bool = True
    ) -> CallHooks:
        """Of modules.

        Args:
            evaluation, repeated: whether passes of evaluation, and those that checkpointing repeats, have rows.
        """
        chosen = [one for one in named_modules(self._model) if wanted(one.name)]
        inside = {id(one) for _, _, chunk in chunks_of(self._model) for one in hookable(chunk)[1].values()}
        compiled = [one.name for one in chosen if id(one.thing) in inside]
        if compiled:
            shown = ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")
            self._say(
                f"{len(compiled)} modules lie inside torch.compile or TorchScript, where no hook is called, and have no "
                f"rows: {shown}"
            )
            chosen = [one for one in chosen if id(one.thing) not in inside]
        return CallHooks(
            chosen,
            self._meter,
            add,
            self._failed,
            lossy=self._as_msprobe,
            passes=self._passes if self._extended else None,
            evaluation=evaluation,
            repeated=repeated,
        )

    def accumulated(
        self, add: AddRow, chosen: Chosen, *, count: int, each: bool, own: bool = False
    ) -> GradientHooks:
        """Gradients as micro-batches add to them; ``own``: what each adds. Extended, they are under FSDP this rank's
        before the reduction; summed up there are none, because FSDP keeps reduced sums alone."""
        parameters = [one for one in self._parameters if chosen(one.name)]
        given = parameters, self._meter, add, self._failed
        wanted: dict[str, Any] = {"count": count, "each": each, "say": self._say, "empty": not self._extended}
        if self._extended and self._sharded:
            if own or count == 1:
                return UnshardedHooks(list(named_modules(self._model)), *given, own=True, **wanted)
            self._say(
                "no 'unreduced' rows: FSDP reduces the gradients of each micro-batch before it adds them up; set "
                "grad_view to 'own' for each one's"
            )
            given = [], *given[1:]
        return GradientHooks(
            *given,
            sharded=self._sharded,
            models=flattened(self._model) if given[0] else [],
            own=own,
            on_nodes=self._as_msprobe,
            **wanted,
        )

    def collectives(
        self,
        rank: int,
        add: AddCall,
        *,
        before: bool,
        codelines: Sequence[str],
        say: Say | None,
    ) -> CollectiveHooks | None:
        """Calls of torch.distributed; None as long as there is no process group."""
        if not is_distributed():
            return None
        return CollectiveHooks(
            rank,
            self._meter,
            add,
            self._failed,
            before=before,
            codelines=codelines,
            say=say,
            as_msprobe=self._as_msprobe,
        )

    def discards(self, dropped: Callable[[], None]) -> Passes:
        """Steps whose gradients were thrown away: ``dropped`` is called when the next begins."""
        self._passes.dropped = dropped
        return self._passes

    def steps(self, before: Callable[[], None], after: Callable[[], None]) -> StepHooks:
        return StepHooks(self._optimizer, before, after)

    def parameters(self, chosen: Chosen) -> int:
        """How many there are."""
        return sum(chosen(one.name) for one in self._parameters)

    def gradients(self, chosen: Chosen) -> list[Row]:
        """Of all parameters that have one, now."""
        found = [(one, gradient_of(one.thing)) for one in self._parameters if chosen(one.name)]
        held = [(one, gradient) for one, gradient in found if gradient is not None]
        if self._extended:
            held = [(one, gradient) for one, gradient in held if local(gradient).numel()]
        rows = self._read(held)
        if self._sharded and not self._as_msprobe:
            return [
                (name.replace("_fsdp_wrapped_module.", ""), stage, reading) for name, stage, reading in rows
            ]
        return rows

    def weights(self, chosen: Chosen) -> list[Row]:
        """All parameters that have elements here, now."""
        parameters = [one for one in self._parameters if chosen(one.name)]
        return self._read([(one, one.thing) for one in parameters if local(one.thing.detach()).numel()])

    def moments(self, chosen: Chosen) -> list[tuple[str, list[Row]]]:
        """By key of the optimizer's state, looked up now; extended: all that there are."""
        states = list(states_of(self._optimizer))
        held = [(one, state_of(one.thing, states)) for one in self._parameters if chosen(one.name)]
        if self._as_msprobe:
            self.note_state()
            held = [(one, state) for one, state in held if one.name in self._with_state]
        found = []
        for key in _KEYS if not self._extended else dict.fromkeys([*_KEYS, *_more_keys(held)]):
            tensors = [(one, state.get(key)) for one, state in held]
            found.append((key, self._read([(one, t) for one, t in tensors if isinstance(t, torch.Tensor)])))
        return found

    def note_state(self) -> None:
        """A step has ended: who has state in the first in which there is any."""
        if not self._with_state:
            states = list(states_of(self._optimizer))
            self._with_state = {one.name for one in self._parameters if state_of(one.thing, states)}

    def _read(self, tensors: Sequence[tuple[Named, torch.Tensor]]) -> list[Row]:
        readings = self._meter.read([tensor for _, tensor in tensors])
        return [
            (named.name, named.stage, reading) for (named, _), reading in zip(tensors, readings, strict=True)
        ]


def _more_keys(held: Sequence[tuple[Named, Mapping[str, Any]]]) -> Iterator[str]:
    """What else an optimizer keeps of its parameters. Of a parameter of many elements a single number is no state of it:
    a count, a product of rates."""
    for named, state in held:
        for key, value in state.items():
            if key in _NO_STATE or not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point() and (value.numel() > 1 or named.thing.numel() == 1):
                yield key
