"""What a probe has found that is not finite: the facts from which the first cause is told (trainmon/health/cause.py).

Every probe gives its own through ``ProbeContext.found``, in every step in which it sees one; whether and how it is said
is not its business. Findings of all ranks travel with the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

__all__ = ["LAST_CALL", "Finding", "Role", "Stage", "kinds_of", "pack_findings", "unpack_findings"]

Stage = Literal["forward", "backward", "optimizer"]
#: Finite in and not out; not finite in; not known.
Role = Literal["producer", "propagator", "unknown"]

#: Behind all calls of its stage and micro-batch.
LAST_CALL = 1 << 31

_KINDS = ("nan", "+inf", "-inf")


@dataclass(frozen=True, slots=True)
class Finding:
    """Values that are not finite: where, when, how many.

    Attributes:
        step: in which they were seen.
        stage: of the step in which the values were made: losses, activations and router logits in ``forward``, gradients
            in ``backward``, weights and moments in ``optimizer``.
        quantity: what it is, in a word or two of a sentence: ``loss``, ``gradient``, ``weight``, ``output``.
        name: of the tensor or module, as the model gives it; empty for the loss.
        series: the series that shows it, for the rules that watch it.
        micro: micro-batch; None for what is seen once a step, after all of them.
        call: order within the stage and micro-batch, as this rank called; of gradients, the position in backward order.
        role: whether the values were made there or only passed on.
        counts: of the kinds ``nan``, ``+inf``, ``-inf``; empty if unknown.
        index: position of the first in this rank's piece, C order; None if unknown.
        more: tensors of the same quantity that are not finite either, later in the order.
        note: what else a reader needs, e.g. the phase of a gradient.
        rank: filled in when findings of ranks come together.
        place: (virtual stage, stage) of the pipeline; the stage is filled in by the engine.
    """

    step: int
    stage: Stage
    quantity: str
    name: str
    series: str
    micro: int | None = None
    call: int = 0
    role: Role = "unknown"
    counts: Mapping[str, int] = field(default_factory=dict)
    index: int | None = None
    more: int = 0
    note: str = ""
    rank: int = 0
    place: tuple[int, int] = (0, 0)


def kinds_of(counts: Sequence[float]) -> dict[str, int]:
    """Counts of NaN, +inf and -inf as :class:`Finding` names them, zeros left out."""
    return {kind: int(count) for kind, count in zip(_KINDS, counts, strict=True) if count}


def pack_findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """As plain data, for the other ranks and for files."""
    return [asdict(finding) for finding in findings]


def unpack_findings(packed: Sequence[Mapping[str, Any]], rank: int) -> list[Finding]:
    """The findings of a rank."""
    return [replace(Finding(**{**entry, "place": tuple(entry["place"])}), rank=rank) for entry in packed]
