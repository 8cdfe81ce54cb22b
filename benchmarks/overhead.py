"""What a monitor costs a training step: trainmon's own clock, and runs beside each other.

    python -m benchmarks.overhead [--quick] [--rounds N]

Watched are the GPT of `examples/gpt` and an MLP of 21 M parameters, with trainmon's defaults, with everything at its own
cadence, and with the four monitors of msProbe V2, where that is installed.

- *Inside*: nanoseconds that the training thread spent in trainmon's entry points, as a share of the steps.
- *A/B*: each round runs a block of steps with each arm in random order, in one process, on one model. The interval is
  a 95 % bootstrap over the rounds. Two clocks: wall time, which the neighbours of a shared machine disturb, and the CPU
  time of all threads, which contains the writer thread's work, too.

A block's first step is not counted: attaching, opening files and warming caches happen once a run. A block has ten
counted steps, so that sections with `every: 10` are in it once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from benchmarks._arms import ARMS, have_msprobe
from benchmarks._loads import Gpt, Load, ManyParameters, Mlp, NoMonitor
from benchmarks._measure import Row
from trainmon.ops import plain_read

#: Shares of a step that trainmon may spend inside its entry points.
MARKS = {"trainmon, defaults": 0.005, "trainmon, everything": 0.02}
STEPS = 10


@dataclass(frozen=True)
class Block:
    """One block of steps: wall and CPU seconds a step, and the seconds a step inside trainmon."""

    wall: float
    cpu: float
    inside: float


def measure(quick: bool = False, rounds: int | None = None, seed: int = 0) -> list[Row]:
    """The rows of the report."""
    arms = [name for name in ARMS if "msProbe" not in name or have_msprobe()]
    rows = [Row("load average before", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")]
    if len(arms) < len(ARMS):
        rows.append(Row("msProbe V2", "not installed here"))
    loads: list[tuple[Callable[[], Load], int]] = [
        (Gpt, rounds or (1 if quick else 4)),
        (lambda: Mlp(batch=256 if quick else 4096), rounds or (1 if quick else 2)),
    ]
    for make, count in loads:
        rows += _compare(make(), arms, count, np.random.default_rng(seed))
    rows += _engine(3 if quick else 30)
    rows += _memory(128 if quick else 4096, 1 if quick else 3)
    return rows


def _compare(load: Load, arms: Sequence[str], rounds: int, random: np.random.Generator) -> list[Row]:
    blocks: dict[str, list[Block]] = {name: [] for name in arms}
    _block(load, "plain")  # warms the process
    for _ in range(rounds):
        for arm in random.permutation(len(arms)):
            blocks[arms[arm]].append(_block(load, arms[arm]))
    plain = blocks.pop("plain")
    step = float(np.median([block.wall for block in plain]))
    rows = [Row(f"{load.name}: step without monitor, median", f"{step * 1e3:.0f} ms")]
    for name, watched in blocks.items():
        if name in MARKS:
            share = sum(block.inside for block in watched) / sum(block.wall for block in watched)
            microseconds = np.mean([block.inside for block in watched]) * 1e6
            rows.append(
                Row(
                    f"{load.name}: {name}: inside, share of the step",
                    f"{share:.3%} ({microseconds:.0f} us a step)",
                    f"<= {MARKS[name]:.1%}",
                    share <= MARKS[name],
                )
            )
        for clock in ("wall", "cpu"):
            base = np.array([getattr(block, clock) for block in plain])
            difference = np.array([getattr(block, clock) for block in watched]) - base
            low, high = _interval(difference / base.mean(), random)
            rows.append(
                Row(
                    f"{load.name}: {name}: A/B, {clock} time, {rounds} rounds of {STEPS} steps",
                    f"{difference.mean() / base.mean():+.1%} (95 %: {low:+.1%} to {high:+.1%})",
                )
            )
    return rows


def _interval(differences: NDArray[np.float64], random: np.random.Generator) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean over rounds."""
    picks = random.integers(len(differences), size=(10_000, len(differences)))
    low, high = np.quantile(differences[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def _block(load: Load, arm: str, steps: int = STEPS) -> Block:
    with tempfile.TemporaryDirectory() as directory, ARMS[arm](load, directory) as watch:
        load.step(watch.calls)
        inside = watch.nanoseconds
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            load.step(watch.calls)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        inside = watch.nanoseconds - inside
    return Block(wall / steps, cpu / steps, inside * 1e-9 / steps)


def _engine(steps: int) -> list[Row]:
    """Time inside a step whose tensors have next to nothing to read, and what finding and reading them takes alone."""
    load = ManyParameters()
    block = _block(load, "trainmon, defaults", steps)
    plain = _PlainRead(load)
    for _ in range(steps):
        load.step(plain)
    inside, floor = block.inside * 1e3, plain.nanoseconds * 1e-6 / steps
    return [
        Row(f"inside a step of {load.name}, defaults", f"{inside:.2f} ms"),
        Row(
            "asking torch for these gradients and a plain read of them, in the same place of a step",
            f"{floor:.2f} ms",
        ),
        Row(
            "the engine: the first less the second", f"{inside - floor:.2f} ms", "< 5 ms", inside - floor < 5
        ),
    ]


class _PlainRead(NoMonitor):
    """Reads the gradients where a monitor would, and does nothing else."""

    def __init__(self, load: ManyParameters) -> None:
        self._parameters, self.nanoseconds = list(load.model), 0

    def grads_ready(self) -> SimpleNamespace:
        entered = time.perf_counter_ns()
        plain_read([parameter.grad for parameter in self._parameters])
        self.nanoseconds += time.perf_counter_ns() - entered
        return SimpleNamespace(skip=False)


_CHILD = """
import sys
import tempfile
from benchmarks import _loads
from benchmarks._arms import ARMS
arm, kind, batch, steps = sys.argv[1:]
load = _loads.Gpt() if kind == "Gpt" else _loads.Mlp(batch=int(batch))
with tempfile.TemporaryDirectory() as directory, ARMS[arm](load, directory) as watch:
    for _ in range(int(steps)):
        load.step(watch.calls)
    status = open("/proc/self/status").read()
# What docs/state.md lists: the copies of the weights, and two warm vectors of each matrix that is no small one.
shapes = [tuple(p.shape) for p in load.model.parameters()]
copies = sum(p.nbytes for p in load.model.parameters())
warm = sum(8 * shape[-1] for shape in shapes if len(shape) == 2 and min(shape) > 256)
print(int(status.split("VmHWM:")[1].split()[0]), copies, warm)
"""


def _memory(batch: int, runs: int) -> list[Row]:
    """Peak resident memory of processes of their own, against the same without a monitor; the median of some runs each,
    as an allocator's peak differs by tens of MiB from run to run."""
    if not Path("/proc/self/status").exists():
        return []
    rows = []
    for kind, name in (("Mlp", f"MLP, batch {batch}"), ("Gpt", "GPT")):
        peaks, listed = dict[str, float](), 0.0
        for arm in ("plain", *MARKS):
            # The tenth step is the one in which sections with `every: 10` look.
            command = [sys.executable, "-c", _CHILD, arm, kind, str(batch), str(STEPS + 1)]
            found = []
            for _ in range(runs):
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                peak, copies, warm = map(int, done.stdout.splitlines()[-1].split())
                found.append(peak / 1024)
                listed = (copies + warm) / 2**20
            peaks[arm] = float(np.median(found))
        for arm in MARKS:
            allowed = listed if "everything" in arm else 0.0
            more = peaks[arm] - peaks["plain"] - allowed
            beside = f" beside the {allowed:.0f} MiB of copies and warm states" if allowed else ""
            rows.append(
                Row(f"peak memory of the {name}: {arm}{beside}", f"{more:+.0f} MiB", "<= 64 MiB", more <= 64)
            )
    return rows


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    verdict = {None: "", True: "holds", False: "MISSED"}
    lines = ["| measure | value | mark | |", "|---|---|---|---|"]
    lines += [f"| {row.measure} | {row.value} | {row.mark} | {verdict[row.holds]} |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Prints the table; exit status 1 if a mark is missed."""
    parser = argparse.ArgumentParser(description="What a monitor costs a training step.")
    parser.add_argument("--quick", action="store_true", help="one round on small batches: a rough figure")
    parser.add_argument("--rounds", type=int, help="rounds of blocks (GPT 4, MLP 2)")
    options = parser.parse_args()
    rows = measure(options.quick, options.rounds)
    print(markdown(rows))
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
