"""What a monitor costs a training step of HyperParallel's trainers, on the fakes of them.

    python -m benchmarks.hyperparallel [--quick]

Each generation's fake trains a mixture of experts of 7 million parameters with trainmon's defaults. *Inside* are the
nanoseconds that the training thread spends in trainmon's entry points, as a share of the step; beside it, in the same
run, the same of the plain loop (`trainmon.attach`) on the same model and data. The fakes' own trainers do what the
contract says and nothing to be fast, so a step of the real ones may be shorter.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trainmon
from benchmarks._measure import Row, main
from tests.adapters.hyperparallel.runs import EACH, build, inner_of, settings_of, train
from tests.hosts.hyperparallel import model as task

MARK = 0.005
#: The tiny model of the fakes, made large enough that a step lasts as long as one of a training.
LARGE = {"VOCAB": 2048, "WIDTH": 512, "HIDDEN": 2048}
QUICK = {"VOCAB": 256, "WIDTH": 64, "HIDDEN": 128}
#: Steps whose time is not counted: the run begins, memory is touched for the first time.
WARM = 2


def measure(quick: bool = False) -> list[Row]:
    """The rows of the report."""
    before = {name: getattr(task, name) for name in LARGE}
    steps = 6 if quick else 22
    shape = {
        "rows": 4 if quick else 16,
        "length": 64 if quick else 192,
        "max_steps": steps,
        "epochs": steps,
        "loader_len": 2,
    }
    try:
        for name, size in (QUICK if quick else LARGE).items():
            setattr(task, name, size)
        rows = []
        for name, watched in (*((name, _host) for name in EACH), ("the plain loop", _plain)):
            share, spent, lasted = watched(name, shape)
            rows.append(Row(f"{name}: step, median", f"{lasted * 1e3:.0f} ms"))
            text = f"{share:.3%} ({spent * 1e6:.0f} us a step)"
            rows.append(Row(f"{name}: trainmon, defaults: inside", text, f"<= {MARK:.1%}", share <= MARK))
        return rows
    finally:
        for name, size in before.items():
            setattr(task, name, size)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


class _Clock:
    """When steps end, and what had been spent inside by then."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []

    def tick(self, spent: int) -> None:
        self.times.append((time.perf_counter(), spent))

    def result(self) -> tuple[float, float, float]:
        """Share of the steps, seconds inside of one, and its median."""
        (began, spent_before), (ended, spent) = self.times[WARM], self.times[-1]
        count = len(self.times) - 1 - WARM
        lasted = [
            after - before
            for (before, _), (after, _) in zip(self.times[WARM:], self.times[WARM + 1 :], strict=False)
        ]
        inside = (spent - spent_before) * 1e-9
        return inside / (ended - began), inside / count, statistics.median(lasted)


def _keys(directory: str) -> dict[str, Any]:
    return {"output_dir": directory, "run_name": "r", "sinks": {"log": {"progress": False}, "jsonl": True}}


def _host(name: str, shape: dict[str, Any]) -> tuple[float, float, float]:
    clock = _Clock()
    with tempfile.TemporaryDirectory() as directory, _quiet():
        trainer = build(name, settings_of(name, **shape), Path(directory))
        session = trainmon.attach_hyperparallel(trainer, _keys(directory))

        def after_backward(step: int, index: int, count: int) -> None:
            if index == 0:
                clock.tick(session.monitor.overhead_ns)

        inner_of(trainer).after_backward = after_backward
        train(trainer)
    return clock.result()


def _plain(name: str, shape: dict[str, Any]) -> tuple[float, float, float]:
    clock = _Clock()
    settings = task.settings(**shape)
    model, optimizer, schedule = task.build(settings)
    with (
        tempfile.TemporaryDirectory() as directory,
        _quiet(),
        trainmon.attach(model, optimizer, config=_keys(directory)) as mon,
    ):
        for epoch in range(settings["max_steps"]):
            for number in range(settings["micro_batches"]):
                batch = task.micro_batch(settings, epoch, number, 0)
                loss = model(**batch).loss
                (loss / settings["micro_batches"]).backward()
                mon.micro_end(loss=loss.detach(), tokens=task.valid_labels(batch)[0])
                if number == 0:
                    clock.tick(mon.overhead_ns)
            mon.grads_ready()
            task.torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mon.step_end()
    return clock.result()


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
