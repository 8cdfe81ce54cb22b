"""What trainmon costs a training step: its own clock, and an A/B run beside it.

    python -m benchmarks.overhead [--quick] [--pairs N] [--steps N]

Both are taken on the GPT of `examples/gpt` with all that can be switched on switched on.

- *Inside*: nanoseconds that the training thread spent in trainmon's entry points, as a share of the steps.
- *A/B*: in each pair of blocks one runs with the monitor attached and one without, in random order, in
  one process, on one model. The interval is a 95 % bootstrap over the pairs. Two clocks: wall time, which
  the neighbours of a shared machine disturb, and the CPU time of all threads, which contains the writer
  thread's work, too.

The first step of each block is not counted: attaching, opening files and warming caches happen once a run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(Path(__file__).resolve().parent)]

import train as demo  # noqa: E402  (the demo is a program, not a package)
from _measure import Row  # noqa: E402

import trainmon  # noqa: E402

#: The share of a step that trainmon may spend inside its entry points.
MARK = 0.01

EVERYTHING: dict[str, Any] = {
    "loss": {"micro": True},
    "gradients": {"per_parameter": True, "clipped": True},
    "sinks": {"log": {"progress": False}, "jsonl": True, "csv": True, "tensorboard": True},
}


@dataclass(frozen=True)
class Block:
    """One block of steps: wall and CPU seconds a step, and the seconds a step inside trainmon."""

    wall: float
    cpu: float
    inside: float


def measure(pairs: int = 20, steps: int = 5, seed: int = 0) -> list[Row]:
    """Runs `pairs` pairs of blocks of `steps` counted steps and returns the rows of the report."""
    load = os.getloadavg()[0]
    config = demo.read_config(ROOT / "examples" / "gpt" / "train.yaml")
    training = demo.Training(
        demo.section_of(config, "model", demo.ModelConfig),
        demo.section_of(config, "data", demo.DataConfig),
        demo.section_of(config, "train", demo.TrainConfig),
    )
    random = np.random.default_rng(seed)
    plain: list[Block] = []
    watched: list[Block] = []
    with tempfile.TemporaryDirectory() as directory:
        _plain_block(training, steps)  # warms the process
        for _ in range(pairs):
            for arm in random.permutation(2):
                if arm:
                    watched.append(_watched_block(training, steps, directory))
                else:
                    plain.append(_plain_block(training, steps))
    step = float(np.median([block.wall for block in plain]))
    share = sum(block.inside for block in watched) / sum(block.wall for block in watched)
    rows = [
        Row("load average before", f"{load:.1f} on {os.cpu_count()} cores"),
        Row("step without monitor, median", f"{step * 1e3:.1f} ms"),
        Row("inside trainmon, per step", f"{np.mean([block.inside for block in watched]) * 1e6:.0f} us"),
        Row("inside trainmon, share of the step", f"{share:.3%}", f"<= {MARK:.0%}", share <= MARK),
    ]
    for clock in ("wall", "cpu"):
        base = np.array([getattr(block, clock) for block in plain])
        difference = np.array([getattr(block, clock) for block in watched]) - base
        low, high = _interval(difference / base.mean(), random)
        rows.append(
            Row(
                f"A/B, {clock} time, {pairs} pairs of {steps} steps",
                f"{difference.mean() / base.mean():+.2%} (95 %: {low:+.2%} to {high:+.2%})",
            )
        )
    return rows


def _interval(differences: NDArray[np.float64], random: np.random.Generator) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean over pairs."""
    picks = random.integers(len(differences), size=(10_000, len(differences)))
    low, high = np.quantile(differences[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def _plain_block(training: demo.Training, steps: int) -> Block:
    off = demo.NoMonitor()
    training.step(off)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step(off)
    return Block((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps, 0.0)


def _watched_block(training: demo.Training, steps: int, directory: str) -> Block:
    name = f"run_{len(list(Path(directory).iterdir()))}"
    entry = {"output_dir": directory, "run_name": name, **EVERYTHING}
    with contextlib.ExitStack() as stack:
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        mon = stack.enter_context(trainmon.attach(training.model, training.optimizer, config=entry))
        training.step(mon)
        inside = mon.overhead_ns
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            training.step(mon)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        inside = mon.overhead_ns - inside
    return Block(wall / steps, cpu / steps, inside * 1e-9 / steps)


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    verdict = {None: "", True: "holds", False: "MISSED"}
    lines = ["| measure | value | mark | |", "|---|---|---|---|"]
    lines += [f"| {row.measure} | {row.value} | {row.mark} | {verdict[row.holds]} |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Prints the table; exit status 1 if a mark is missed."""
    parser = argparse.ArgumentParser(description="What trainmon costs a training step.")
    parser.add_argument("--quick", action="store_true", help="few pairs: a rough figure in under a minute")
    parser.add_argument("--pairs", type=int, help="pairs of blocks (20; 4 with --quick)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps in a block")
    options = parser.parse_args()
    rows = measure(options.pairs or (4 if options.quick else 20), options.steps)
    print(markdown(rows))
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
