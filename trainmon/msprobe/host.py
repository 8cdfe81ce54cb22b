"""What a framework shows of a training run: hooks that make rows, and rows that are read when asked for.

:class:`trainmon.adapters.torch_rows.TorchRows` is PyTorch's, :class:`trainmon.adapters.mindspore_rows.MindSporeRows`
MindSpore's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trainmon.adapters.rows_parts.kinds import AddCall, AddRow, Chosen, Row
from trainmon.backend import Backend
from trainmon.backend.base import Lazy

__all__ = [
    "AddCall",
    "AddRow",
    "Chosen",
    "FeatureHooks",
    "Hooks",
    "Host",
    "MoreHost",
    "Row",
    "StepHooks",
    "StructureHooks",
]


class Hooks(Protocol):
    """Hooks that look at a flag."""

    def install(self) -> None: ...

    def watched(self) -> str: ...

    def arm(self, on: bool) -> None: ...

    def remove(self) -> None: ...


class StepHooks(Protocol):
    """Attributes:
    counts: whether each step of the optimizer is seen. If not, one begins with the window's and ends with ``step()``.
    """

    counts: bool

    def install(self) -> None: ...

    def remove(self) -> None: ...


class StructureHooks(Hooks, Protocol):
    """Hooks that find something once.

    Attributes:
        found: by module.
    """

    found: Any


class FeatureHooks(Hooks, Protocol):
    """Hooks of one kind of features.

    Attributes:
        rows: of the running step: name, stage, micro-batch from 0 or -1, numbers.
    """

    kind: str
    rows: list[tuple[str, int, int, Lazy]]

    def complete(self) -> list[tuple[str, int, int, Lazy]]:
        """All rows of the step."""
        ...


class MoreHost(Protocol):
    """What can be seen of a model beside rows; see :class:`trainmon.adapters.torch_rows.more.More`.

    Attributes:
        lacks: keys of the configuration that have no meaning with this host.
    """

    lacks: frozenset[str]

    def names(self) -> tuple[list[str], list[str]]: ...

    def describe(self, distances: frozenset[float]) -> None: ...

    def structure(self) -> StructureHooks: ...

    def stacks(self, chosen: Chosen) -> StructureHooks: ...

    def features(
        self, kind: str, names: Sequence[str] | None, sequence_first: bool
    ) -> tuple[FeatureHooks, list[str]]: ...

    def directions(self) -> list[tuple[str, int, Lazy]]: ...

    def redundant(self, data_group: Any, tensor_group: Any) -> frozenset[str]: ...

    def together(self) -> None: ...


class Host(Protocol):
    """A model and its optimizer.

    Attributes:
        communication: the module whose calls ``cc`` shows.
        reasons: why a kind of monitor may have no rows, where there is more to say than that nothing was called.
    """

    communication: str
    reasons: Mapping[str, str]

    @property
    def backend(self) -> Backend | None: ...

    def more(self) -> MoreHost:
        """What can be seen beside rows."""
        ...

    def calls(self, add: AddRow, chosen: Chosen, *, evaluation: bool, repeated: bool) -> Hooks:
        """Of modules.

        Args:
            evaluation, repeated: whether passes of evaluation, and those that checkpointing repeats, have rows.
        """
        ...

    def accumulated(self, add: AddRow, chosen: Chosen, *, count: int, each: bool, own: bool) -> Hooks:
        """Gradients as micro-batches add to them.

        Args:
            count: micro-batches of a step.
            each: a row for each of them, not for the last alone.
            own: what each adds, not what has been summed up.
        """
        ...

    def collectives(
        self,
        rank: int,
        add: AddCall,
        *,
        before: bool,
        codelines: Sequence[str],
        say: Callable[[str], None] | None,
    ) -> Hooks | None:
        """Calls between ranks; None as long as there are no others."""
        ...

    def steps(self, before: Callable[[], None], after: Callable[[], None]) -> StepHooks:
        """Before and after the optimizer's step."""
        ...

    def discards(self, dropped: Callable[[], None]) -> Hooks:
        """Steps whose gradients were thrown away: ``dropped`` is called when the next begins."""
        ...

    def parameters(self, chosen: Chosen) -> int:
        """How many there are."""
        ...

    def gradients(self, chosen: Chosen) -> list[Row]:
        """Of all parameters that have one, now."""
        ...

    def weights(self, chosen: Chosen) -> list[Row]:
        """All parameters that have elements here, now."""
        ...

    def note_state(self) -> None:
        """A step has ended, in the window or not; to be told where rows shall be those of msProbe, which lists what has
        state once, when there first is any."""
        ...

    def moments(self, chosen: Chosen) -> list[tuple[str, list[Row]]]:
        """By key of the optimizer's state, looked up now: those that msProbe reads, or, extended, all."""
        ...
