"""The first cause of a value that is not finite, from the findings of all probes and ranks.

The order is that of the computation: step, micro-batch, forward before backward before optimizer, place in the pipeline
(descending once the gradients come back), call. Clocks have no say: those of two ranks can't be compared, and a rank
that is ahead is not a cause. What is seen once a step, after its micro-batches, comes after all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainmon.findings import Finding
from trainmon.messages import named_ranks

__all__ = ["Cause", "first_cause", "order"]

_STAGES = {"forward": 0, "backward": 1, "optimizer": 2}
#: Others that a sentence names.
_NAMED = 3
#: Findings that go to events.jsonl with the report.
_KEPT = 64


def order(finding: Finding) -> tuple[float, ...]:
    """Where a finding stands in the computation, smaller is earlier."""
    stage = _STAGES[finding.stage]
    virtual, place = finding.place if stage == 0 else (-finding.place[0], -finding.place[1])
    micro = math.inf if finding.micro is None else finding.micro
    return finding.step, micro, stage, virtual, place, finding.call


@dataclass(frozen=True, slots=True)
class Cause:
    """What is told of the findings of a step.

    Attributes:
        first: the earliest finding, of its lowest rank.
        ranks: all ranks that have exactly this finding.
        text: a sentence.
        data: the facts: ``first`` and all ``findings`` in order, ``ranks``.
    """

    first: Finding
    ranks: tuple[int, ...]
    text: str
    data: dict[str, Any]


def first_cause(findings: Sequence[Finding], world: int) -> Cause:
    """The cause among at least one finding of one step.

    Args:
        world: number of ranks; what all of them have needs no names.
    """
    ordered = sorted(findings, key=lambda finding: (order(finding), finding.rank))
    first = ordered[0]
    ranks = tuple(f.rank for f in ordered if replace(f, rank=first.rank) == first)
    text = _sentence(first)
    if len(ranks) < world:
        text = f"{named_ranks(ranks)}: {text}"
    others: dict[tuple[str, str], list[int]] = {}
    for finding in ordered:
        if (finding.quantity, finding.name) != (first.quantity, first.name):
            others.setdefault((finding.quantity, finding.name), []).append(finding.rank)
    if others:
        named = [_other(*what, tuple(sorted(set(at))), world) for what, at in list(others.items())[:_NAMED]]
        rest = len(others) - len(named)
        text += f"; then {', '.join(named)}{f' and {rest} more' if rest else ''}"
    data = {
        "first": asdict(first),
        "ranks": list(ranks),
        "findings": [asdict(finding) for finding in ordered[:_KEPT]],
    }
    return Cause(first, ranks, text, data)


def _sentence(finding: Finding) -> str:
    when = f"at step {finding.step}"
    if finding.micro is not None:
        when = f"in micro-batch {finding.micro} of step {finding.step}"
    note = f" ({finding.note})" if finding.note else ""
    counts = " and ".join(f"{count} {kind}" for kind, count in finding.counts.items())
    if not finding.name and len(finding.counts) == 1:  # a single number
        return f"{finding.quantity} is {next(iter(finding.counts))} {when}{note}"
    parts = [f"{_what(finding.quantity, finding.name)} is not finite {when}{note}"]
    if counts:
        parts[0] += f": {counts}"
    if finding.index is not None:
        parts[0] += f", first at element {finding.index}"
    if finding.role == "producer":
        parts.append("its inputs were finite")
    elif finding.role == "propagator":
        parts.append("its inputs were not finite already")
    if finding.more:
        parts.append(f"{finding.more} more tensor{'s are' if finding.more > 1 else ' is'} not finite")
    return "; ".join(parts)


def _what(quantity: str, name: str) -> str:
    return f"{quantity} of {name}" if name else quantity


def _other(quantity: str, name: str, ranks: tuple[int, ...], world: int) -> str:
    at = "" if len(ranks) == world else f" ({named_ranks(ranks)})"
    return f"{_what(quantity, name)}{at}"
