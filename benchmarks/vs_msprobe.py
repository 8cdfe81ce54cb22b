"""What msProbe's Monitor V2 costs a training step, and what the drop-in costs in its place.

    python -m benchmarks.vs_msprobe [--quick]

Each arm is a process of its own, msProbe's with its own packages (`build/peers`), all with the same model and data: no
monitor, the drop-in (as it is, and with its writer thread), the drop-in outside its window, msProbe. They take turns, a
block of steps each; of a block the median step counts, of an arm its best block. All five monitors are on, every step is
written, and a step calls one collective, in a group of one rank. Two clocks: wall time, which the neighbours of a shared
machine disturb, and the CPU time of the training thread, which works alone.

Memory is the peak of a step against that of the same process before the monitor was started; arrays go back to the
system at once, so that it is what is alive.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks._measure import Row, best_of, main, ratio_row

__all__ = ["measure"]

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"

#: The drop-in's added time may be this share of msProbe's.
SHARE = 0.1
#: Seconds a hook may take outside the window.
HOOK = 2e-6
CELLS = 1.0  # million a second
ARMS = ("plain", "trainmon", "async", "outside", "msprobe")
LOADS = ("GPT", "MLP")
MONITORS = ("module", "weight_grad", "optimizer", "param", "cc")


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes one model and few steps."""
    wanted = ("plain", "trainmon", "msprobe") if quick else ARMS
    arms = [arm for arm in wanted if arm != "msprobe" or have_msprobe()]
    rows = [Row("load average before", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")]
    if "msprobe" not in arms:
        rows.append(Row("msProbe V2", "not installed here"))
    for load in LOADS[:1] if quick else LOADS:
        rows += _compare(load, arms, 2 if quick else 5, 2 if quick else 5)
    return rows + _hooks(5 if quick else 40) + _tables(20_000 if quick else 100_000)


def have_msprobe() -> bool:
    """Whether its arm can run; `make bench` fetches it."""
    return (PEERS / "msprobe").is_dir() or importlib.util.find_spec("msprobe") is not None


def _compare(load: str, arms: Sequence[str], turns: int, steps: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        workers = {arm: stack.enter_context(_worker(arm, load)) for arm in arms}
        blocks: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        facts = next(iter(workers.values())).ready()
        for _ in range(turns):
            for arm, worker in workers.items():
                blocks[arm].append(worker.block(steps))
    name = f"{load} of {facts['parameters'] / 1e6:.1f} M"
    rows = []
    for clock in ("wall", "cpu"):
        best = {arm: min(block[clock] for block in found) for arm, found in blocks.items()}
        rows += _added(f"{name}, {clock}", best)
    # The least of the peaks: what else a process did meanwhile is in some of them only.
    peak = {arm: min(block["peak"] for block in found) for arm, found in blocks.items()}
    allowed = max(0.01 * facts["bytes"], 2 * 2**20)
    for arm in ("trainmon", "async", "msprobe"):
        if arm in peak:
            more = peak[arm] - peak["plain"]
            mark = (f"<= {allowed / 2**20:.1f} MiB", more <= allowed) if arm != "msprobe" else ("", None)
            rows.append(Row(f"{name}: {arm}: peak memory of a step", f"{more / 2**20:+.1f} MiB", *mark))
    return rows


def _added(name: str, best: Mapping[str, float]) -> list[Row]:
    """What each arm adds to the step without a monitor, and the ratio."""
    plain = best["plain"]
    titles = {
        "trainmon": "trainmon adds in the window",
        "async": "trainmon adds, with async_write",
        "outside": "trainmon adds outside the window",
        "msprobe": "msProbe adds in the window",
    }
    rows = [Row(f"{name}: step without monitor", f"{plain * 1e3:.1f} ms")]
    for arm, title in titles.items():
        if arm in best:
            more = best[arm] - plain
            rows.append(Row(f"{name}: {title}", f"{more * 1e3:+.2f} ms ({more / plain:+.1%})"))
    if "msprobe" in best:
        ratio = (best["trainmon"] - plain) / (best["msprobe"] - plain)
        rows.append(ratio_row(f"{name}: trainmon's added time / msProbe's", ratio, SHARE, at_most=True))
    return rows


def _hooks(turns: int) -> list[Row]:
    """What a hook costs while its step is not looked at: a chain of modules that do nothing, with and without."""
    import torch
    from torch import nn

    from trainmon.msprobe import TrainerMonitorV2

    torch.set_num_threads(1)
    count = 500
    chains = {name: nn.Sequential(*(nn.Identity() for _ in range(count))) for name in ("plain", "watched")}
    x = torch.ones(1)
    with tempfile.TemporaryDirectory() as directory:
        monitor = TrainerMonitorV2({"output_dir": directory, "start_step": 10**9, "monitors": {"module": {}}})
        monitor.start(chains["watched"])
        best = best_of(
            {name: lambda chain=chain: chain(x) for name, chain in chains.items()},
            turns,
            clock=time.thread_time,
        )
        monitor.stop()
    each = (best["watched"] - best["plain"]) / (2 * (count + 1))
    return [
        Row(
            "outside the window, a hook's call, torch's own cost of calling it included",
            f"{each * 1e6:.2f} us",
            f"<= {HOOK * 1e6:g} us",
            each <= HOOK,
        )
    ]


def _tables(count: int) -> list[Row]:
    """Rows from readings to the file, as the writer thread does it."""
    from trainmon.backend.base import STATISTICS
    from trainmon.msprobe.tables import Rows, TableFiles, table_bytes

    rng = np.random.default_rng(0)
    ops = STATISTICS[1:]
    rows = Rows()
    rows.names = [f"layers.{at % 300}.attention.weight" for at in range(count)]
    rows.scopes, rows.stages, rows.micros = ["reduced"] * count, [-1] * count, [1] * count
    table = rng.lognormal(size=(count, len(STATISTICS)))
    best = float("inf")
    with tempfile.TemporaryDirectory() as directory:
        files = TableFiles(Path(directory))
        header = table_bytes(Rows(), table[:0], 0, ops, keys=("micro_step",), header=True)
        for turn in range(5):
            start = time.perf_counter()
            files.append(
                f"weight_grad_step{turn}-{turn}",
                header,
                table_bytes(rows, table, turn, ops, keys=("micro_step",)),
            )
            best = min(best, time.perf_counter() - start)
    speed = count * (5 + len(ops)) / best / 1e6
    return [
        Row(
            f"CSV, {count} rows of {5 + len(ops)}, to the file",
            f"{speed:.1f} M cells/s",
            f">= {CELLS:g}",
            speed >= CELLS,
        )
    ]


# -- an arm -------------------------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._facts: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any]:
        """Waits until the model has been trained a little; what it is."""
        if self._facts is None:
            self._facts = self._answer()
        return self._facts

    def block(self, steps: int) -> dict[str, float]:
        """Seconds of the median step and bytes of memory at the most, of so many steps."""
        self.ready()
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of an arm ended with {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def _worker(arm: str, load: str) -> Iterator[_Worker]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Every array of some size goes back to the system at once, so that a peak is what is alive at a time.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": str(ROOT) + (f"{os.pathsep}{PEERS}" if arm == "msprobe" else ""),
    }
    command = [sys.executable, "-m", "benchmarks.vs_msprobe", "--arm", arm, load]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield _Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


def _arm(arm: str, name: str) -> None:
    """Answers a line of JSON for each line with a number of steps."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever else is printed
    import torch
    import torch.distributed as distributed

    from benchmarks._loads import Gpt, Mlp, NoMonitor

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    load = Gpt("train.batch=2", "train.accumulation=1") if name == "GPT" else Mlp(batch=64)

    class Loop(NoMonitor):
        """Sums up the loss over the ranks, as training scripts do."""

        def grads_ready(self) -> SimpleNamespace:
            distributed.all_reduce(torch.ones(1))
            return SimpleNamespace(skip=False)

    loop = Loop()
    parameters = list(load.model.parameters())
    facts = {
        "parameters": sum(one.numel() for one in parameters),
        "bytes": sum(one.nbytes for one in parameters),
    }
    prepare = _imported(arm)
    for _ in range(2):
        load.step(loop)
    before = _block(load, loop, 2)["peak"]
    with tempfile.TemporaryDirectory() as directory, _watched(arm, prepare, load, directory):
        for _ in range(2):
            load.step(loop)
        print(json.dumps(facts), file=answers, flush=True)
        for line in sys.stdin:
            block = _block(load, loop, int(line))
            print(json.dumps(block | {"peak": block["peak"] - before}), file=answers, flush=True)
    distributed.destroy_process_group()


def _imported(arm: str) -> Any:
    """The class; what it imports when it starts is imported, too."""
    if arm == "plain":
        return None
    if arm == "msprobe":
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        return TrainerMonitorV2
    import trainmon.adapters.torch_rows
    import trainmon.sinks.writer  # noqa: F401
    from trainmon.msprobe import TrainerMonitorV2 as Ours

    return Ours


@contextlib.contextmanager
def _watched(arm: str, monitor_of: Any, load: Any, directory: str) -> Iterator[None]:
    if arm == "plain":
        yield
        return
    monitors = {
        name: {"enabled": True, **({"cc_pre_hook": True} if name == "cc" else {})} for name in MONITORS
    }
    config: dict[str, Any] = {"framework": "pytorch", "output_dir": directory, "monitors": monitors}
    config |= {"async": {"async_write": True}, "outside": {"start_step": 10**9}}.get(arm, {})
    path = Path(directory) / "monitor_v2.json"
    path.write_text(json.dumps(config))
    monitor = monitor_of(str(path))
    monitor.start(model=load.model, optimizer=load.optimizer)
    yield
    monitor.stop()


def _block(load: Any, loop: Any, steps: int) -> dict[str, float]:
    # After the steps of the others, the first finds cold caches.
    load.step(loop)
    seconds, busy, peaks = [], [], []
    for _ in range(steps):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start, worked = time.perf_counter(), time.thread_time()
        load.step(loop)
        seconds.append(time.perf_counter() - start)
        busy.append(time.thread_time() - worked)
        peaks.append(_status("VmHWM"))
    return {"wall": statistics.median(seconds), "cpu": statistics.median(busy), "peak": min(peaks)}


def _status(name: str) -> int:
    """Bytes, by Linux."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        _arm(*sys.argv[2:])
    else:
        sys.exit(main(__doc__, measure))
