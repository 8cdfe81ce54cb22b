"""What a probe is.

Per step: the engine hands a due probe the events that it has a method for (``on_micro_end``, ``on_grads_ready`` ...),
then asks it to ``close`` the step. What must be read from a device comes back in the :class:`Sample`; ``write`` gets
the numbers when they have arrived, in this step or the next, and puts them into the frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmon.backend.base import Backend, Lazy
from trainmon.events import StepEnd, TrainBegin
from trainmon.findings import Finding
from trainmon.frame import Frame, Registry

__all__ = ["Probe", "ProbeContext", "Sample", "Say"]

Floats = NDArray[np.float64]


class Say(Protocol):
    """Tells the user something beside the numbers."""

    def __call__(
        self,
        level: Literal["info", "warning", "error"],
        kind: str,
        text: str,
        *,
        step: int,
        data: Mapping[str, Any] | None = None,
    ) -> None: ...


@dataclass(slots=True)
class ProbeContext:
    """What the engine gives every probe at the start of a run.

    Attributes:
        say: tells the user something.
        found: takes a value that is not finite; in every step in which there is one: saying it is not the probe's part.
        order: numbers what probes see one after the other, for ``Finding.call``.
        before: what an earlier life of the run published at the step that this one goes on from, by series; on rank 0
            alone, once the first step has begun.
    """

    begin: TrainBegin
    backend: Backend
    say: Say
    found: Callable[[Finding], None]
    order: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    before: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a probe saw in one step: numbers to be read, and how they enter the frame."""

    lazies: Sequence[Lazy]
    write: Callable[[Frame, Sequence[Floats]], None]


class Probe(Protocol):
    """Attributes:
    name: the configuration section.
    stale: set by the probe when its series have to be registered anew (parameters came or went); until then it
        writes what the layout has.

    A probe of what single layers see may have ``held()``, names of what this rank sees, alike on ranks that see the same
    of the same tokens, and ``take_owners(names)``, which tells it what of that it contributes to sums over ranks.

    A probe may have ``idle``, true while no rank has anything that it could show.

    A probe whose values depend on earlier steps may have ``state_dict()`` and ``load_state_dict(state)``
    (``trainmon.carried``): what it remembers, the same on every rank.

    A probe may have a method ``merged(frame)``: called once the frame holds all ranks' values, to derive what needs
    memory of its own; it gives the same on every rank. One whose parts are ``early`` has a method ``before_update()``:
    a :class:`Sample` of what it knows once gradients are ready, for the rules; ``close`` gives the same again.
    """

    name: str
    stale: bool

    def begin(self, context: ProbeContext) -> None:
        """The run starts or resumes."""
        ...

    def register(self, registry: Registry) -> None:
        """Declares parts and series; called again on a new registry after ``stale``."""
        ...

    def close(self, event: StepEnd) -> Sample:
        """The step is over; forgets what it gathered."""
        ...
