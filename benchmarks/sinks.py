"""What outputs cost: nanoseconds of the training thread, and of the writer thread for thousands of per-tensor values.

    python benchmarks/sinks.py [--quick]

The black box against the floor, a plain copy of the same bytes into the same mapping; the tables against Python's csv
module writing the same rows in the same run.
"""

from __future__ import annotations

import csv
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.frame import Snapshot, Table
from trainmon.sinks.base import RunInfo
from trainmon.sinks.blackbox import BlackBox
from trainmon.sinks.csv import CsvSink
from trainmon.sinks.jsonl import JsonlSink
from trainmon.sinks.writer import Writer

#: Nanoseconds of the black box in a step of ten marks and fifty values.
MARK = 20_000
NAMES = [f"group{n % 7}/metric_{n}/layers.{n}" for n in range(200)]


def snapshot(step: int, values: int) -> Snapshot:
    scalars: dict[str, float | None] = {name: 1.0 / (step + n) for n, name in enumerate(NAMES[:values])}
    scalars[NAMES[0]] = None
    return Snapshot(step, 1.7e9, float(step), scalars)


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report."""
    rounds = 3 if quick else 20
    with tempfile.TemporaryDirectory() as directory:
        return [*box_rows(Path(directory), rounds), *table_rows(Path(directory), rounds)]


def box_rows(directory: Path, rounds: int) -> list[Row]:
    box = BlackBox(directory, RunInfo(None, "bench"), host_every=1e9)
    few, many = snapshot(1, 50), snapshot(1, 200)
    mapped = box._map
    assert mapped is not None
    record, offset = bytes(40 + 50 * 11 + 4), box._frames.offset
    event, at = bytes(32), box._events.offset
    turns = 2000

    def marks() -> None:
        for _ in range(turns):
            box.mark(6, 7, 3)

    def event_copies() -> None:
        for _ in range(turns):
            mapped[at : at + 32] = event

    def frame_copies() -> None:
        for _ in range(turns):
            mapped[offset : offset + len(record)] = record

    def frames(shown: Snapshot) -> None:
        for _ in range(turns):
            box.frame(shown)

    def looks() -> None:
        for _ in range(turns // 20):
            box._look(0, 1)

    def step() -> None:
        for number in range(turns // 10):
            for _ in range(10):
                box.mark(6, number, 3)
            box.frame(few)

    writer = Writer([], RunInfo(None, "bench"), capacity=10**9)

    def puts() -> None:
        for _ in range(turns):
            writer.put(few)
        writer.flush()

    best = best_of(
        {
            "mark": marks,
            "event copy": event_copies,
            "50": lambda: frames(few),
            "200": lambda: frames(many),
            "frame copy": frame_copies,
            "look": looks,
            "step": step,
            "put": puts,
        },
        rounds,
        clock=time.thread_time,
    )
    writer.close()
    box.end("completed", step=1)
    each = {name: seconds / turns * 1e9 for name, seconds in best.items()}
    whole = best["step"] / (turns // 10) * 1e9
    return [
        Row("black box: a mark", f"{each['mark']:.0f} ns", "", None),
        ratio_row("the same / a copy of its 32 bytes", each["mark"] / each["event copy"]),
        Row("black box: a frame of 50 values", f"{each['50']:.0f} ns", "", None),
        ratio_row("the same / a copy of its bytes", each["50"] / each["frame copy"]),
        Row("black box: a frame of 200 values", f"{each['200']:.0f} ns", "", None),
        Row(
            "black box: a look at the host (once a second)",
            f"{best['look'] / (turns // 20) * 1e9:.0f} ns",
            "",
            None,
        ),
        Row("black box: a step of 10 marks and 50 values", f"{whole:.0f} ns", f"<= {MARK} ns", whole <= MARK),
        Row("a snapshot handed to the writer thread", f"{each['put']:.0f} ns", "", None),
    ]


def table_rows(directory: Path, rounds: int) -> list[Row]:
    found = []
    for count in (300, 10_000):
        names = tuple(f"layers.{n}.attention.weight" for n in range(count))
        rng = np.random.default_rng(0)
        tables = tuple(
            Table(
                f"group/{name}/<p>",
                "weights",
                "1",
                names,
                rng.lognormal(size=count),
                np.ones(count, np.bool_),
            )
            for name in ("norm", "ratio", "absmax")
        )
        sinks: dict[str, Any] = {
            "csv": CsvSink(steps_per_file=10**9, rows_per_file=10**9),
            "jsonl": JsonlSink(),
        }
        try:
            from trainmon.sinks.parquet import ParquetSink

            sinks["parquet"] = ParquetSink(steps_per_file=1, rows_per_file=10**9)
        except ImportError:
            pass
        for sink in sinks.values():
            sink.open(RunInfo(directory / str(count), "bench"))
        steps = iter(range(1, 10**9))
        path = directory / f"peer{count}.csv"

        def show(
            name: str, sinks: Any = sinks, tables: tuple[Table, ...] = tables, steps: Iterator[int] = steps
        ) -> None:
            sinks[name].write(Snapshot(next(steps), 1.7e9, 0.0, {"loss/global": 1.0}, tables))

        def peer(
            names: tuple[str, ...] = names, tables: tuple[Table, ...] = tables, path: Path = path
        ) -> None:
            text = io.StringIO(newline="")
            columns = (table.values.tolist() for table in tables)
            rows = zip([1] * len(names), names, *columns, strict=True)
            csv.writer(text, lineterminator="\n").writerows(rows)
            with path.open("ab") as file:
                file.write(text.getvalue().encode())

        competitors = {name: lambda name=name: show(name) for name in sinks}
        best = best_of({**competitors, "peer": peer}, rounds, clock=time.thread_time)
        for sink in sinks.values():
            sink.close()
        title = f"a step of {count} rows of 5"
        found.append(Row(f"csv sink, {title}", f"{best['csv'] * 1e3:.2f} ms", "", None))
        found.append(ratio_row(f"csv module / csv sink, {title}", best["peer"] / best["csv"], 1.0))
        if "parquet" in best:
            found.append(
                Row(f"parquet sink, {title}, a file each", f"{best['parquet'] * 1e3:.2f} ms", "", None)
            )
        found.append(Row(f"jsonl sink, one value, {title}", f"{best['jsonl'] * 1e6:.0f} us", "", None))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
