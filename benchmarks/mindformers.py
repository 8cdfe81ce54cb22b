"""What a monitor costs MindFormers' GRAPH trainer on a CPU: compiling, and its steps.

    python -m benchmarks.mindformers [--quick]

In the environment of `make mindspore`. Each arm is a training of a Llama in a process of its own, with trainmon's
defaults: *squares*, where the training cell returns the squares of gradients (`local_norm: true`), and *hooks*, where
two sums of each gradient are compiled into the step. Each stands beside the same training without a monitor.

- *Compiling*: the first step, in CPU time of all threads, which neighbours on the machine disturb least.
- *Inside*: nanoseconds that the training thread spent in trainmon's entry points, as a share of the other steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._measure import Row

EXAMPLE = Path(__file__).parents[1] / "examples" / "mindformers_graph"
#: Of the model's configuration; the second makes steps of 200 ms and more.
SIZES = {
    "tiny": {"seq_length": 16, "vocab_size": 64},
    "small": {"seq_length": 256, "hidden_size": 256, "num_layers": 4, "num_heads": 8, "vocab_size": 4096},
}
ARMS = {"squares": True, "hooks": False}
STEPS = 40
COMPILING, INSIDE = 0.30, 0.02


def measure(quick: bool = False) -> list[Row]:
    """The rows of the report."""
    if importlib.util.find_spec("mindformers") is None:
        return [Row("MindFormers", "not installed here")]
    size, steps = ("tiny", 12) if quick else ("small", STEPS)
    rows = [Row("load average before", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")]
    for arm in ARMS:
        plain, watched = (
            min(
                (_train(size, steps, arm, seen) for _ in range(1 if quick else 2)),
                key=lambda one: one["first"],
            )
            for seen in (False, True)
        )
        more = watched["first"] / plain["first"] - 1
        rows.append(Row(f"{arm}: first step without monitor", f"{plain['first']:.1f} s"))
        mark = f"at most {COMPILING:+.0%}"
        rows.append(Row(f"{arm}: first step with trainmon", f"{more:+.1%}", mark, more <= COMPILING))
        rows.append(Row(f"{arm}: step without monitor, median", f"{plain['step'] * 1e3:.0f} ms"))
        ratio = watched["step"] / plain["step"] - 1
        rows.append(Row(f"{arm}: step with trainmon", f"{ratio:+.1%}"))
        share, long = watched["inside"] / watched["step"], plain["step"] >= 0.2
        reached = share <= INSIDE if long else None
        rows.append(
            Row(f"{arm}: inside trainmon", f"{share:.2%}", f"at most {INSIDE:.0%}" if long else "", reached)
        )
    return rows


def _train(size: str, steps: int, arm: str, seen: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        options = json.dumps([size, steps, arm, seen])
        command = [sys.executable, "-m", "benchmarks.mindformers", "--train", options]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        found: dict[str, float] = json.loads((Path(folder) / "times.json").read_text())
        return found


def _child(size: str, steps: int, arm: str, seen: bool) -> None:
    """One training; leaves its times in the current folder."""
    import mindspore.dataset
    from mindformers import MindFormerConfig, Trainer, build_context
    from mindspore.train import Callback

    spec = importlib.util.spec_from_file_location("example", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # registers the training cell
    model = SIZES[size]
    config = MindFormerConfig(str(EXAMPLE / "train.yaml"))
    config.callbacks, config.tensorboard = config.callbacks[:1], None
    config.runner_wrapper.local_norm = ARMS[arm]
    for name, value in model.items():
        config.model.model_config[name] = value
    watching: list[Any] = []
    if seen:
        from trainmon.adapters.mindformers.graph.callback import GraphMonitor

        watching = [GraphMonitor(output_dir="runs", sinks={"log": False})]

    class Clock(Callback):  # type: ignore[misc]
        """Behind the monitor."""

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []
            self.inside: list[int] = []
            self.began = self.first = 0.0

        def on_train_step_begin(self, run_context: Any) -> None:
            self.began = self.began or time.process_time()

        def on_train_step_end(self, run_context: Any) -> None:
            self.first = self.first or time.process_time() - self.began
            self.ends.append(time.perf_counter())
            self.inside.append(watching[0].monitor.overhead_ns if watching else 0)

    def rows() -> Iterator[tuple[Any]]:
        random = np.random.default_rng(0)
        length, words = model["seq_length"] + 1, model["vocab_size"]
        for _ in range(steps * 2):
            yield (random.integers(3, words, length).astype(np.int32),)

    data = mindspore.dataset.GeneratorDataset(rows, ["input_ids"], shuffle=False).batch(2)
    clock = Clock()
    build_context(config)
    Trainer(config, task="text_generation", train_dataset=data, callbacks=[*watching, clock]).train()
    step = float(np.median(np.diff(clock.ends[1:])))
    inside = float(np.median(np.diff(clock.inside[1:]))) * 1e-9
    mean = (clock.inside[-1] - clock.inside[1]) * 1e-9 / (len(clock.inside) - 2)
    times = {"first": clock.first, "step": step, "inside": max(inside, mean)}
    Path("times.json").write_text(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        _child(*json.loads(arguments.train))
        return
    for row in measure(arguments.quick):
        print(row.measure, row.value, row.mark, "" if row.holds is None else row.holds, sep="  ")


if __name__ == "__main__":
    main()
