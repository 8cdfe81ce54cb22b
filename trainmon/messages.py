"""Messages of many ranks, said once: what several ranks say alike becomes one message that names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainmon.findings import Finding, pack_findings, unpack_findings

__all__ = ["Told", "found_together", "named_ranks", "pack_messages", "together"]


@dataclass(frozen=True, slots=True)
class Told:
    """One message of one rank, or of several."""

    level: Literal["info", "warning", "error"]
    kind: str
    text: str
    step: int
    data: dict[str, Any] = field(default_factory=dict)


def pack_messages(messages: Sequence[Told], findings: Sequence[Finding] = ()) -> bytes:
    """For the other ranks."""
    said = [asdict(told) for told in messages]
    return json.dumps({"said": said, "found": pack_findings(findings)}, default=str).encode()


def found_together(everybody: Sequence[bytes]) -> list[Finding]:
    """The findings of all ranks, each with its rank."""
    return [
        finding
        for rank, packed in enumerate(everybody)
        for finding in unpack_findings(json.loads(packed)["found"], rank)
    ]


def together(everybody: Sequence[bytes], size: int) -> list[Told]:
    """The messages of all ranks in order of step and rank, each with the ranks that said it.

    Args:
        everybody: packed messages by rank.
        size: number of ranks; what all of them say needs no names.
    """
    ranks_of: dict[tuple[int, str, str], list[int]] = {}
    first: dict[tuple[int, str, str], Told] = {}
    for rank, packed in enumerate(everybody):
        for entry in json.loads(packed)["said"]:
            told = Told(**entry)
            key = told.step, told.kind, told.text
            ranks_of.setdefault(key, []).append(rank)
            first.setdefault(key, told)
    said = []
    for key in sorted(first, key=lambda key: (key[0], ranks_of[key])):
        told, ranks = first[key], ranks_of[key]
        prefix = "" if len(ranks) == size else f"{named_ranks(ranks)}: "
        said.append(Told(told.level, told.kind, prefix + told.text, told.step, {**told.data, "ranks": ranks}))
    return said


def named_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
