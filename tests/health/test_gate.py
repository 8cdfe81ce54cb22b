"""What is merged before the update: by row, NaN kept, failures named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainmon.frame import Registry, identity, ratio
from trainmon.gate import Gate


def gate_of() -> tuple[Gate, dict[str, object]]:
    registry = Registry()
    late = registry.part("late", "sum")
    s, n = registry.part("s", "sum", early=True), registry.part("n", "sum", early=True)
    high, low = registry.part("high", "max", early=True), registry.part("low", "min", early=True)
    registry.add("loss/global", (s, n), ratio, probe="loss")
    registry.add("grad/norm", (high,), identity, probe="gradients")
    registry.add("weight/norm", (low,), identity, probe="gradients")
    registry.add("update/norm", (s, late), ratio, probe="loss")
    registry.freeze()
    return Gate(registry, ["loss", "gradients"]), {"s": s, "n": n, "high": high, "low": low}


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_ranks_are_merged_by_row(holder: int) -> None:
    rows = []
    for rank in range(3):
        gate, parts = gate_of()
        if rank != 1:  # one knows nothing of the loss
            gate.frame.set(parts["s"], 2.0 + rank)  # type: ignore[arg-type]
            gate.frame.set(parts["n"], 1.0)  # type: ignore[arg-type]
        gate.frame.set(parts["high"], math.nan if rank == holder else 5.0 + rank)  # type: ignore[arg-type]
        gate.frame.set(parts["low"], 7.0 - rank)  # type: ignore[arg-type]
        rows.append(gate.row({"gradients"} if rank == 2 else set()))
    assert gate.names == {"loss/global", "grad/norm", "weight/norm"}, "what needs a late part is not known"
    assert gate.probes_of({"grad/norm"}) == {"gradients"}
    assert gate.take(np.array(rows)) == {"gradients"}
    found = gate.scalars(gate.names, {"loss", "gradients"})
    assert found["loss/global"] == 3.0 and found["weight/norm"] == 5.0
    assert math.isnan(found["grad/norm"] or 0.0)
    assert gate.scalars({"loss/global", "grad/norm"}, {"loss"}) == {"loss/global": 3.0}


def test_what_no_rank_knows_is_null() -> None:
    gate, _ = gate_of()
    assert gate.take(np.array([gate.row(set())] * 2)) == set()
    assert gate.scalars(gate.names, {"loss", "gradients"}) == dict.fromkeys(gate.names)
