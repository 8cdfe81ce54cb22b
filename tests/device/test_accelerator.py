"""The same training on an accelerator and on the host: the same numbers, one read a step. Skipped, with the reason, where
there is none: the device path itself is proven on CPU tensors by tests/backend/test_device_path.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="this is about torch's devices")
if not torch.accelerator.is_available():
    pytest.skip("this machine has no accelerator", allow_module_level=True)

import trainmon  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

STEPS = 20


def train(directory: Path, device: Any, nan_at: int | None = None) -> tuple[list[dict[str, Any]], int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(STEPS, 32, 64, generator=torch.Generator().manual_seed(1))
    keys = {
        "output_dir": str(directory),
        "run_name": "r",
        "sinks": {"log": False},
        "gradients": {"per_parameter": True, "clipped": True},
        "weights": {"every": 1},
        "moments": {"every": 1},
        "updates": {"every": 1, "adam": True},
        "spectral": {"every": 1},
    }
    with trainmon.attach(model, optimizer, keys) as mon:
        for step in range(1, STEPS + 1):
            loss = model(inputs[step - 1].to(device)).square().mean()
            loss.backward()
            if step == nan_at:
                next(model.parameters()).grad[0, 0] = float("nan")
            mon.micro_end(loss, 32)
            mon.grads_ready(clip_norm=1.0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step != nan_at:
                optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
        reads = mon.monitor.host_reads
    records = read_jsonl(directory / "r/rank_0/scalars.jsonl")
    return [record for record in records if "step" in record], reads


def test_the_numbers_of_the_host_with_one_read_a_step(tmp_path: Path) -> None:
    found, reads = train(tmp_path / "device", torch.accelerator.current_accelerator())
    expected, _ = train(tmp_path / "host", torch.device("cpu"))
    assert reads <= STEPS
    for ours, theirs in zip(found, expected, strict=True):
        for name in (
            "loss/global",
            "grad/norm",
            "grad/norm_clipped",
            "weight/norm",
            "moment/norm/exp_avg_sq",
            "update/norm",
        ):
            # Two devices round products differently, and steps add that up.
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3), name


def test_a_nan_on_the_device_is_counted(tmp_path: Path) -> None:
    found, _ = train(tmp_path, torch.accelerator.current_accelerator(), nan_at=7)
    assert [record["grad/nonfinite"] for record in found][5:8] == [0, 1, 0]
