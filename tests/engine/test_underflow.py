"""Shares of gradients that a smaller format would round to zero, on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradients of a real loop")

import trainmon  # noqa: E402
from trainmon.config import ConfigError, load_config  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

FORMATS = ["bf16", "fp16", "e4m3fn", "e5m2"]


def run(directory: Path, gradients: list[Any], backend: str, **keys: Any) -> dict[str, Any]:
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros_like(one)) for one in gradients)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    section = {"underflow": FORMATS, **keys}
    entry = {"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}, "gradients": section}
    with trainmon.attach(model, optimizer, entry, backend=backend) as mon:  # type: ignore[arg-type]
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient.clone()
        mon.grads_ready()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-8)  # what comes after is not counted
        optimizer.step()
        mon.step_end()
    (record,) = [one for one in read_jsonl(directory / "r/rank_0/scalars.jsonl") if "step" in one]
    return record


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_the_share_of_each_format(backend: str, tmp_path: Path) -> None:
    edge = torch.tensor([2.0**-10, 2.0**-10 * 1.001, 2.0**-17, 2.0**-25, 2.0**-26, 0.0, float("nan"), -1.0])
    record = run(tmp_path, [edge, torch.full((2, 2), -(2.0**-12))], backend)
    # Ten elements are finite and not zero: zero itself is not lost by a cast.
    assert record["grad/underflow_share/e4m3fn"] == pytest.approx(8 / 10)
    assert record["grad/underflow_share/e5m2"] == pytest.approx(3 / 10)
    assert record["grad/underflow_share/fp16"] == pytest.approx(2 / 10)
    assert record["grad/underflow_share/bf16"] == 0.0


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_nothing_to_share_is_null_and_a_target_chooses(backend: str, tmp_path: Path) -> None:
    gradients = [torch.zeros(3), torch.full((5,), 2.0**-20)]
    record = run(tmp_path / "a", gradients, backend, target="^0$")
    assert record["grad/underflow_share/e5m2"] is None
    record = run(tmp_path / "b", gradients, backend, target="^1$")
    assert record["grad/underflow_share/e5m2"] == 1.0


def test_both_backends_agree_with_the_kernel_on_random_gradients(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1000, generator=generator) * 2.0**-k for k in range(0, 40, 3)]
    expected = trainmon.underflow_shares(gradients, to=FORMATS)
    for backend in ("host", "torch"):
        record = run(tmp_path / backend, gradients, backend)
        for name in FORMATS:
            assert record[f"grad/underflow_share/{name}"] == pytest.approx(expected[name].underflow)


def test_an_unknown_format_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"gradients.underflow.*expected .*'e4m3fn'"):
        load_config({"gradients": {"underflow": "fp8"}})
