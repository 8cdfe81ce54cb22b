"""Two ranks of the GRAPH trainer, data parallel, under msrun. It takes most of a minute: in `make soak`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.campaign import LONG
from tests.hosts.mindformers.graph.trainings import EVERYTHING, train_two, write


@pytest.mark.soak
@pytest.mark.skipif(not LONG, reason="takes most of a minute: make soak")
def test_two_ranks(tmp_path: Path) -> None:
    """The loss is that of both; the host's norm is that of reduced gradients; each rank's own are its own, to the last
    bit; weights count once."""
    file = write(
        tmp_path,
        [{**EVERYTHING, "auto_register": "trainmon_mf.TrainMonitor", "ranks": "all"}],
        use_parallel=True,
        parallel={"parallel_mode": 0, "gradients_mean": True, "full_batch": False},
    )
    training = train_two(tmp_path, file, 3, "Truth")
    truths = [dict(np.load(tmp_path / f"truth_{rank}.npz")) for rank in range(2)]
    assert not np.array_equal(truths[0]["loss"], truths[1]["loss"])
    names = truths[0]["names"][0].tolist()
    for step, record in enumerate(training.steps()):
        losses = [float(truth["loss"][step][0]) for truth in truths]
        np.testing.assert_allclose(record["loss/global"], np.mean(losses), rtol=1e-12)
        np.testing.assert_allclose(record["grad/norm"], float(truths[0]["norm"][step][0]), rtol=1e-6)
        reduced = [
            float(row["grad/norm"]) for (at, _), row in training.table("gradients").items() if at == step + 1
        ]
        np.testing.assert_allclose(np.sqrt(np.square(reduced).sum()), record["grad/norm"], rtol=1e-6)
        weights = [truths[0][f"weight {name}"][step].astype(np.float64) for name in names]
        whole = np.sqrt(sum(np.square(one).sum() for one in weights))
        np.testing.assert_allclose(record["weight/norm"], whole, rtol=1e-12)
        assert record["data/consumed_samples"] == 4 * (step + 1)
    for rank, truth in enumerate(truths):
        rows = training.table("gradients", rank=rank)
        for step in range(3):
            squares = truth["squares"][step].astype(np.float64).tolist()
            for name, square in zip(names, squares, strict=True):
                assert float(rows[step + 1, name]["grad/norm_local"]) == np.sqrt(square)
