"""The torch backend on tensors whose numbers only counted reads can get: one packed read a step, with everything on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="this is about torch's tensors")

import trainmon  # noqa: E402
from tests.backend.counted import Counted, on_device  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

STEPS = 5
#: Per step, whatever is measured; names of sections that need host memory are left out.
EVERYTHING: dict[str, Any] = {
    "loss": {"micro": True, "perplexity": True, "positions": 2},
    "gradients": {
        "per_parameter": True,
        "clipped": True,
        **dict.fromkeys(("local", "device", "micro", "increment"), True),
    },
    "weights": {"every": 1, "per_parameter": True},
    "moments": {"every": 1, "per_parameter": True},
    "updates": {"every": 1, "per_parameter": True, "adam": True},
    "spectral": {"every": 1},
}


def train(directory: Path, model: Any, backend: str, nan_at: int | None = None) -> tuple[Any, list[int]]:
    """Steps of two micro-batches; the reads that each step took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keys = {"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}, **EVERYTHING}
    reads = []
    with trainmon.attach(model, optimizer, keys, backend=backend) as mon:  # type: ignore[arg-type]
        for step in range(1, STEPS + 1):
            before = len(Counted.reads)
            for micro in range(2):
                torch.manual_seed(10 * step + micro)
                losses = model(torch.randn(4, 6)).square().sum(-1).view(2, 2)
                (losses.mean() / 2).backward()
                mon.micro_end(losses.mean(), 4, token_losses=losses, parts={"aux": losses.max()})
            if step == nan_at:
                next(model.parameters()).grad.fill_(math.nan)
            mon.grads_ready(clip_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
            reads.append(len(Counted.reads) - before)
    records = read_jsonl(directory / "r/rank_0/scalars.jsonl")
    return [record for record in records if "step" in record], reads


def make() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def test_one_packed_read_a_step_and_the_numbers_of_the_host(tmp_path: Path) -> None:
    found, reads = train(tmp_path / "device", on_device(make()), "torch")
    assert reads[0] == 0, "the first step's numbers are waited for in the second"
    assert reads[1:] == [1] * (STEPS - 1)
    expected, _ = train(tmp_path / "host", make(), "host")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name.startswith(("loss/", "grad/", "weight/", "moment/", "update/", "optim/", "data/")):
                assert ours[name] == (None if value is None else pytest.approx(value, rel=1e-6)), name


def test_what_is_not_finite_is_found_without_a_further_read(tmp_path: Path) -> None:
    found, reads = train(tmp_path, on_device(make()), "torch", nan_at=3)
    assert max(reads) == 1
    assert [record["grad/nonfinite"] for record in found][:3] == [0, 0, 30]


def test_the_host_kernels_cannot_reach_such_a_tensor() -> None:
    tensor = Counted(torch.ones(3))
    with pytest.raises((AssertionError, TypeError, ValueError, RuntimeError, BufferError)):
        trainmon.multi_norm([tensor])


def test_float32_devices_finish_in_float64(tmp_path: Path) -> None:
    from trainmon.backend.torch import TorchBackend

    backend = TorchBackend("cpu", float64=False)
    tensors = [torch.randn(200_001, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    table, square = backend.read([backend.summaries(tensors), backend.square_sum(tensors)]).wait()
    exact = [float(tensor.double().square().sum()) for tensor in tensors]
    assert table[:, 0] == pytest.approx(exact, rel=1e-6)
    assert square[0] == pytest.approx(sum(exact), rel=1e-6)
    assert backend.reads == 1
