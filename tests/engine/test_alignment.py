"""grad/align of a single process, and when it can't be told; several ranks: tests/ranks/test_alignment.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradients of a real loop")

import trainmon  # noqa: E402
from trainmon.config import ConfigError, load_config  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402


class Run:
    """A loop whose parts the test chooses."""

    def __init__(self, directory: Path, backend: Any = "host", **keys: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        entry = {
            "output_dir": str(directory),
            "run_name": "r",
            "sinks": {"log": False},
            "gradients": {"align": True, **keys},
        }
        self.monitor = trainmon.attach(self.model, self.optimizer, entry, backend=backend)

    def backward(self, scale: float = 1.0, factor: float = 1.0) -> None:
        (self.model(torch.randn(3, 5)).square().mean() * scale * factor).backward()
        self.monitor.micro_end(loss_scale=None if scale == 1 else scale)

    def end(self, *, shown: bool = True, to_none: bool = True) -> None:
        if shown:
            self.monitor.grads_ready()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)
        self.monitor.step_end()

    def values(self) -> list[float | None]:
        self.monitor.close()
        return [
            one["grad/align"]
            for one in read_jsonl(self.directory / "r/rank_0/scalars.jsonl")
            if "step" in one
        ]

    def said(self) -> list[str]:
        found = read_jsonl(self.directory / "r/rank_0/events.jsonl")
        assert not [one for one in found if one.get("kind") in ("internal_error", "probe_failed")]
        return [one["text"] for one in found if one.get("kind") == "alignment_unknown"]


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_one_process_agrees_with_itself(tmp_path: Path, backend: str) -> None:
    run = Run(tmp_path, backend)
    for micros in (1, 3, 2):
        for _ in range(micros):
            run.backward()
        run.end(to_none=False)  # zeros that the next step adds to
    assert run.values() == pytest.approx([1.0] * 3, rel=1e-12)
    assert run.said() == []


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_loss_scale_that_is_taken_off_before_gradients_are_shown(tmp_path: Path, backend: str) -> None:
    run = Run(tmp_path, backend)
    for _ in range(2):
        run.backward(scale=256.0)
    for parameter in run.model.parameters():
        parameter.grad /= 256
    run.end()
    assert run.values() == pytest.approx([1.0], rel=1e-12)


def test_no_gradient_at_all_is_null(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.backward(factor=0.0)
    run.monitor.grads_ready()
    run.monitor.step_end()
    run.optimizer.zero_grad()
    run.end()  # no backward pass
    assert run.values() == [None, None] and run.said() == []


def test_what_is_not_finite_shows(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.backward(factor=float("nan"))
    run.monitor.grads_ready()
    run.monitor.step_end()
    (value,) = run.values()
    assert value is not None and math.isnan(value)


def test_gradients_that_are_shown_after_clipping_only_are_null(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.backward()
        run.end(shown=False)
    assert run.values() == [None] * 3
    (said,) = run.said()
    assert "grads_ready()" in said


def test_gradients_that_somebody_changes_between_micro_batches_are_null(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for changes in (True, False, True):
        for _ in range(2):
            run.backward()
            if changes:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        run.end()
    assert run.values() == [None, pytest.approx(1.0, rel=1e-12), None]
    (said,) = run.said()
    assert "no_sync()" in said


def test_gradients_that_were_left_from_an_earlier_step_are_null(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.backward()
    run.monitor.grads_ready()
    run.monitor.step_end()  # nobody empties them
    run.backward()
    run.end()
    assert run.values() == [pytest.approx(1.0, rel=1e-12), None]


def test_a_gradient_that_no_backward_pass_gave_is_null(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.end()
    assert run.values() == [None]
    (said,) = run.said()
    assert said.startswith("grad/align is null: the gradient of 0.weight was never seen before its reduction")


def test_off_is_free_and_keys_are_checked(tmp_path: Path) -> None:
    run = Run(tmp_path, align=False)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in run.model.parameters())
    run.monitor.close()
    with pytest.raises(ConfigError, match=r"gradients\.align"):
        load_config({"gradients": {"align": "yes please"}})
    with pytest.raises(ConfigError, match="'mean' or 'sum'"):
        load_config({"gradients": {"align": True, "reduction": "max"}})
