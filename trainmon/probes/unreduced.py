"""Gradients of this rank before they are reduced: of single micro-batches, accumulated, of all parameters together.

Formulas: docs/formulas.md. Values are this rank's own and of its own pieces; nothing is merged. All norms are divided by
the loss scale of their backward pass, as ``micro_end`` or ``grads_ready`` tells it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainmon.backend.base import Lazy
from trainmon.events import GradientAccumulated, GradsReady, MicroEnd, MicroGradient, StepBegin, StepEnd
from trainmon.findings import Finding
from trainmon.frame import Floats, Frame, Part, Registry, identity
from trainmon.probes.base import ProbeContext, Sample, Selected

__all__ = ["UnreducedProbe"]

#: Micro-batches that have rows from the start.
_CAPACITY = 4


class UnreducedProbe:
    """Publishes ``grad/norm_local/<p>``, ``grad/norm_device``, ``grad/norm_device_selected``, ``grad/norm_micro/<p>``,
    ``grad/norm_increment/<p>``; rows of micro-batches are named ``<parameter>@<micro-batch>``.

    Args:
        selected: whether a parameter of this name has rows; ``device`` is of all parameters.
        local, device, micro, increment: what is published.
        some: not all parameters are selected: ``device`` gives the norm of those that are, too.
        rare: looked at less often than others of the section: ``device`` is left out, not null, in other steps.
        says_unseen: whether to say that a host shows no such gradients; one of two probes does.
    """

    name = "gradients"

    def __init__(
        self,
        selected: Selected,
        *,
        local: bool = False,
        device: bool = False,
        micro: bool = False,
        increment: bool = False,
        some: bool = False,
        rare: bool = False,
        says_unseen: bool = True,
    ) -> None:
        self.title = "gradients of micro-batches" if micro or increment else "gradients before reduction"
        self.stale = False
        self._selected = selected
        self._local, self._device, self._micro, self._increment = local, device, micro, increment
        self._some, self._rare = device and some, rare
        self._row_of: dict[str, int | None] = {}  # None: not selected
        self._names: list[str] = []
        self._capacity = _CAPACITY
        self._said = not says_unseen
        # The engine asks for the events of which a probe has the method.
        if micro:
            self.on_micro_gradient = self._take_own
        if local or device or increment:
            self.on_gradient_accumulated = self._take_sum
        self._reset()

    def _reset(self) -> None:
        self._own: dict[tuple[int, str], list[Lazy]] = {}
        self._sums: dict[tuple[int, str], Lazy] = {}
        self._orders: dict[tuple[int, str], int] = {}
        self._scales: dict[int, float] = {}
        self._scale = 1.0
        self._backward = False

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.model is not None:
            for name in context.begin.model.parameter_names():
                self._row(name)

    def _row(self, name: str) -> int | None:
        """The row of a parameter; None without one."""
        if name not in self._row_of:
            chosen = name in self._selected
            self._row_of[name] = len(self._names) if chosen else None
            if chosen:
                self._names.append(name)
                self.stale = True
        return self._row_of[name]

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._rows = len(self._names)
        self._tables: dict[str, Part] = {}
        names = tuple(self._names)
        micros = tuple(f"{name}@{micro}" for micro in range(self._capacity) for name in names)
        for wanted, what, subjects in (
            (self._local, "local", names),
            (self._micro, "micro", micros),
            (self._increment, "increment", micros),
        ):
            if wanted:
                self._tables[what] = registry.part(f"grad.norm_{what}", "local", len(subjects))
                registry.add(
                    f"grad/norm_{what}/<p>",
                    (self._tables[what],),
                    identity,
                    probe=self.name,
                    subjects=subjects,
                    optional=True,
                )
        if self._device:
            self._add_scalar(registry, "device")
        if self._some:
            self._add_scalar(registry, "device_selected")

    def _add_scalar(self, registry: Registry, what: str) -> None:
        part = self._tables[what] = registry.part(f"grad.norm_{what}", "local")
        name = f"grad/norm_{what}"
        registry.add(name, (part,), identity, probe=self.name, optional=self._rare)

    # -- a step -----------------------------------------------------------------------------------------------------

    def on_step_begin(self, event: StepBegin) -> None:
        self._reset()

    def _take_own(self, event: MicroGradient) -> None:
        if self._row(event.name) is not None:
            square = self._context.backend.square_sum([event.gradient])
            self._own.setdefault((event.micro, event.name), []).append(square)
            self._orders.setdefault((event.micro, event.name), self._context.order())

    def _take_sum(self, event: GradientAccumulated) -> None:
        if self._row(event.name) is not None or self._device:
            square = self._context.backend.square_sum([event.gradient])
            self._sums[event.micro, event.name] = square
            self._orders.setdefault((event.micro, event.name), self._context.order())

    def on_micro_end(self, event: MicroEnd) -> None:
        self._backward = True
        if event.loss_scale is not None:
            self._scales[event.micro] = float(event.loss_scale)

    def on_grads_ready(self, event: GradsReady) -> None:
        self._backward = True
        if event.loss_scale is not None and event.phase == "reduced":
            self._scale = float(event.loss_scale)

    def close(self, event: StepEnd) -> Sample:
        # A gradient that arrived in pieces (a checkpointed part that is used twice) has no norm of its own.
        own = {key: squares[0] for key, squares in self._own.items() if len(squares) == 1}
        sums, orders, scales, scale = self._sums, self._orders, self._scales, self._scale
        if self._backward and not self._own and not sums:
            self._say_unseen(event.step)
        self._reset()
        micros = [micro for micro, _ in (*own, *sums)]
        if (self._micro or self._increment) and micros and max(micros) >= self._capacity:
            self._capacity = 1 << max(micros).bit_length()
            self.stale = True
        lazies = [*own.values(), *sums.values()]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            norms = np.sqrt(np.array([float(square[0]) for square in read]))
            keys = [*own, *sums]
            norms /= np.array([scales.get(micro, scale) for micro, _ in keys])
            self._find(event.step, list(own), norms[: len(own)], orders)
            self._find(event.step, list(sums), norms[len(own) :], orders)
            self._write_rows(frame, "micro", list(own), norms[: len(own)])
            self._write_sums(frame, list(sums), norms[len(own) :])

        return Sample(lazies, write)

    def _find(
        self, step: int, keys: list[tuple[int, str]], norms: Floats, orders: Mapping[tuple[int, str], int]
    ) -> None:
        """The first that is not finite, as they came in backward: the reduction gives it to all ranks."""
        bad = np.flatnonzero(~np.isfinite(norms))
        if not len(bad):
            return
        micro, name = keys[int(bad[0])]
        finding = Finding(
            step=step,
            stage="backward",
            quantity="gradient",
            name=name,
            series="grad/norm_device",
            micro=micro,
            call=orders[micro, name],
            more=sum(keys[index][0] == micro for index in bad) - 1,
            note="before reduction",
        )
        self._context.found(finding)

    def _write_sums(self, frame: Frame, keys: list[tuple[int, str]], norms: Floats) -> None:
        """Accumulated gradients: the last ones of each parameter, and by how much each norm grew."""
        by_key = dict(zip(keys, norms.tolist(), strict=True))
        last: dict[str, float] = {}
        growth = []
        for (_, name), value in sorted(by_key.items()):
            growth.append(value - last.get(name, 0.0))
            last[name] = value
        if keys and self._device:
            frame.set(self._tables["device"], _root(last.values()))
        if keys and self._some:
            chosen = [value for name, value in last.items() if self._row_of.get(name) is not None]
            frame.set(self._tables["device_selected"], _root(chosen))
        if self._local:
            names = [name for name in last if self._has_row(name)]
            rows = np.array([self._row_of[name] for name in names], np.int64)
            frame.put(self._tables["local"], np.array([last[name] for name in names]), rows)
        if self._increment:
            self._write_rows(frame, "increment", sorted(by_key), np.array(growth))

    def _has_row(self, name: str) -> bool:
        row = self._row_of.get(name)
        return row is not None and row < self._rows

    def _write_rows(self, frame: Frame, what: str, keys: list[tuple[int, str]], values: Floats) -> None:
        part = self._tables.get(what)
        if part is None or not keys or not self._rows:
            return
        capacity = part.size // self._rows
        placed = [
            (index, micro * self._rows + (self._row_of[name] or 0))
            for index, (micro, name) in enumerate(keys)
            if self._has_row(name) and micro < capacity
        ]
        where: NDArray[np.int64] = np.array(placed, np.int64).reshape(-1, 2)
        frame.put(part, values[where[:, 0]], where[:, 1])

    def _say_unseen(self, step: int) -> None:
        if not self._said:
            self._said = True
            self._context.say(
                "info",
                "gradients_reduced_only",
                "no gradient was seen before its reduction: FSDP reduces inside backward, where no hook of a parameter "
                "is called; norms of unreduced gradients are null",
                step=step,
            )


def _root(norms: Iterable[float]) -> float:
    """Of the sum of their squares."""
    return float(np.sqrt(np.sum(np.square(list(norms)))))
