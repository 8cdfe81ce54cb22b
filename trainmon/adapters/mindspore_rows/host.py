"""A MindSpore model and its optimizer, as rows want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore

from trainmon.adapters.mindspore_parts.parameters import optimizer_states
from trainmon.adapters.mindspore_rows.calls import CallHooks
from trainmon.adapters.mindspore_rows.collectives import CollectiveHooks, is_distributed
from trainmon.adapters.mindspore_rows.gradients import GradientHooks, gradient_of
from trainmon.adapters.mindspore_rows.meter import Meter
from trainmon.adapters.mindspore_rows.more import More
from trainmon.adapters.mindspore_rows.names import named_cells, named_parameters
from trainmon.adapters.mindspore_rows.steps import StepHooks, update_cell
from trainmon.adapters.rows_parts.kinds import AddCall, AddRow, Chosen, Failed, Row, Say
from trainmon.adapters.rows_parts.names import Named
from trainmon.backend import Backend

__all__ = ["MindSporeRows"]

#: State beside that of :func:`optimizer_states`, by what stands before the name of its parameter in its own.
_PREFIXES = {
    "exp_avg": "exp_avg",
    "adam_m": "exp_avg",
    "moment1": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "adam_v": "exp_avg_sq",
    "moment2": "exp_avg_sq",
}


class MindSporeRows:
    """What can be seen of a model; nothing is hooked until somebody asks.

    Args:
        model: a Cell, or a list of chunks with None for those of other ranks.
        optimizer: one, or what wraps it as ``.optimizer``, or None.
        failed, say: take what goes wrong in a hook, and what the user should know.
        as_msprobe: with msProbe's blind spots.
        extended: more than msProbe's rows.

    Raises:
        TypeError: ``model`` is neither, or there are several optimizers.
    """

    communication = "mindspore.communication"
    reasons: Mapping[str, str] = {
        "module": "no Cell that targets select was called, but by code that @jit compiles, of which nothing is seen",
        "weight_grad": "no gradient was seen: the backward pass or the optimizer is compiled by @jit, or not called",
        "param": "the optimizer was not called, but by code that @jit compiles, or the model has no parameters",
        "cc": "no function of mindspore.communication was called, or from no line of cc_codeline",
    }

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
        if isinstance(optimizer, list | tuple):
            if len(optimizer) != 1:
                raise TypeError("on MindSpore one optimizer can be watched, not a list of several")
            optimizer = optimizer[0]
        self._model, self._failed, self._say = model, failed, say
        self._optimizer = optimizer
        self._updates = update_cell(optimizer)
        self._as_msprobe, self._extended = as_msprobe, extended
        self._compiled = mindspore.get_context("mode") == mindspore.GRAPH_MODE
        self._meter = Meter(as_msprobe=as_msprobe, modulus=extended)
        self._parameters = named_parameters(model, self._updates)
        self._names = {id(one.thing): one for one in self._parameters}
        self._values: Sequence[Any] | None = None  # gradients, while an update begins

    @property
    def backend(self) -> Backend | None:
        """Where readings that are still on a device come from."""
        return self._meter.backend

    def calls(
        self, add: AddRow, chosen: Chosen, *, evaluation: bool = True, repeated: bool = True
    ) -> CallHooks | Nothing:
        """Of Cells; calls that recomputation repeats can't be told from others.

        Args:
            evaluation: whether passes of evaluation have rows.
        """
        if self._compiled:
            return self._unseen("module", "calls of Cells are compiled")
        cells = [one for one in named_cells(self._model) if chosen(one.name)]
        return CallHooks(
            cells, self._meter, add, self._failed, extended=self._extended, evaluation=evaluation
        )

    def accumulated(
        self, add: AddRow, chosen: Chosen, *, count: int, each: bool, own: bool = False
    ) -> GradientHooks | Nothing:
        """Gradients as micro-batches add to them; ``own``: what each adds."""
        if self._compiled:
            return self._unseen("weight_grad", "gradients never leave the compiled step")
        parameters = [one for one in self._parameters if chosen(one.name)]
        return GradientHooks(
            parameters, self._meter, add, self._failed, count=count, each=each, say=self._say, own=own
        )

    def collectives(
        self,
        rank: int,
        add: AddCall,
        *,
        before: bool,
        codelines: Sequence[str],
        say: Say | None,
    ) -> CollectiveHooks | Nothing | None:
        """Calls of MindSpore's communication functions; None as long as that is not initialised."""
        if not is_distributed():
            return None
        if self._compiled:
            return self._unseen("cc", "communication is compiled")
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

    def steps(self, before: Callable[[], None], after: Callable[[], None]) -> StepHooks:
        if self._compiled:
            self._say(
                "GRAPH mode: the update is compiled, so that nobody sees when it is made: call step() after each "
                "training step"
            )
        return StepHooks(
            self._optimizer,
            before,
            after,
            self._take_values,
            self._failed,
            compiled=self._compiled,
            say=self._say,
        )

    def discards(self, dropped: Callable[[], None]) -> Nothing:
        """Whether gradients were thrown away can't be told: nobody keeps them."""
        return Nothing()

    def parameters(self, chosen: Chosen) -> int:
        """How many there are."""
        return sum(chosen(one.name) for one in self._parameters)

    def _unseen(self, kind: str, why: str) -> Nothing:
        self._say(
            f"GRAPH mode: {kind} has no rows, because {why}; set mode=mindspore.PYNATIVE_MODE to see them"
        )
        return Nothing()

    def _take_values(self, values: Sequence[Any] | None) -> None:
        self._values = values

    def more(self) -> More:
        """What msProbe's older monitor shows beside rows."""
        return More(
            self._model,
            self._parameters,
            self._meter,
            self._failed,
            compiled=self._compiled,
            gradients=lambda: self._gradients(lambda name: True),
            momenta=lambda: [(named, state) for key, named, state in self._states() if key == "exp_avg"],
        )

    def gradients(self, chosen: Chosen) -> list[Row]:
        """Those that the optimizer is called with, while it begins; of an optimizer that is handed none, what parameters
        have."""
        return self._read(self._gradients(chosen))

    def _gradients(self, chosen: Chosen) -> list[tuple[Named, Any]]:
        values: Mapping[int, Any] = {}
        updated = getattr(self._updates, "parameters", None)
        if self._values is not None and updated is not None:
            values = {id(one): value for one, value in zip(updated, self._values, strict=False)}
        parameters = [one for one in self._parameters if chosen(one.name)]
        found = [(one, values.get(id(one.thing), gradient_of(one.thing))) for one in parameters]
        return [(one, gradient) for one, gradient in found if gradient is not None]

    def weights(self, chosen: Chosen) -> list[Row]:
        """All parameters that have elements, now."""
        parameters = [one for one in self._parameters if chosen(one.name)]
        return self._read([(one, one.thing) for one in parameters if one.thing.size])

    def note_state(self) -> None:
        """Nothing to note: what optimizers keep is there from the beginning."""

    def moments(self, chosen: Chosen) -> list[tuple[str, list[Row]]]:
        """By key of the optimizer's state, looked up now; extended: all that there are."""
        if self._updates is None:
            return []
        held: dict[str, list[tuple[Named, Any]]] = {"exp_avg": [], "exp_avg_sq": []}
        for key, named, state in self._own_named() if self._as_msprobe else ():
            held[key].append((named, state))
        if not any(held.values()):
            for key, named, state in self._states():
                if (key in held or self._extended) and chosen(named.name):
                    held.setdefault(key, []).append((named, state))
        place = {id(one): at for at, one in enumerate(self._parameters)}
        return [
            (key, self._read(sorted(pairs, key=lambda pair: place.get(id(pair[0]), len(place)))))
            for key, pairs in held.items()
        ]

    def _own_named(self) -> Iterator[tuple[str, Named, Any]]:
        """As msProbe finds state, and under the names that it gives it."""
        for one in self._updates.get_parameters():
            for key in ("exp_avg_sq", "exp_avg"):
                if key in one.name:
                    yield key, Named(one.name, -1, one), one
                    break

    def _states(self) -> Iterator[tuple[str, Named, Any]]:
        """State by key and by the parameter that it belongs to."""
        seen = set()
        for key, states in optimizer_states(self._updates):
            for parameter, state in zip(self._updates.parameters, states, strict=True):
                named = self._names.get(id(parameter))
                seen.add(id(state))
                if named is not None:
                    yield key, named, state
        by_name = {one.thing.name: one for one in self._parameters}
        for one in self._updates.get_parameters():
            prefix, _, rest = one.name.partition(".")
            if id(one) not in seen and prefix in _PREFIXES and rest in by_name:
                yield _PREFIXES[prefix], by_name[rest], one

    def _read(self, tensors: Sequence[tuple[Named, Any]]) -> list[Row]:
        readings = self._meter.read([tensor for _, tensor in tensors])
        return [
            (named.name, named.stage, reading) for (named, _), reading in zip(tensors, readings, strict=True)
        ]


class Nothing:
    """Hooks where none can be."""

    def install(self) -> None:
        """Nothing."""

    def watched(self) -> str:
        return "nothing in GRAPH mode"

    def arm(self, on: bool) -> None:
        """Nothing."""

    def remove(self) -> None:
        """Nothing."""
