"""Millions of cells a second of CSV and JSON Lines, and ratios to Python's csv.writer and json.dumps.

    python benchmarks/rows.py [--quick]

A table as the per-tensor files have it: step, name and eight float64 columns, one of them with nulls; the peers get
the columns as lists in the same run, so that the ratios hold for the text alone.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import csv_rows, json_rows

MARK = 1.0  # million cells a second


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes a smaller table and fewer turns."""
    rounds = 2 if quick else 8
    rows = []
    for count in (300, 10_000) if quick else (300, 100_000):
        rows += one_size(count, rounds)
    return rows + kinds(20_000 if quick else 200_000, rounds)


def one_size(count: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    table: dict[str, object] = {
        "step": np.arange(count),
        "name": [f"layers.{i % 300}.attention.weight" for i in range(count)],
    }
    table |= {f"column {i}": rng.lognormal(size=count) for i in range(8)}
    valid = {"column 0": rng.random(count) < 0.9}
    names = list(table)
    lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in table.values()]
    lists[2] = [value if known else None for value, known in zip(lists[2], valid["column 0"], strict=True)]

    def csv_writer() -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(zip(*lists, strict=True))
        return text.getvalue().encode()

    def json_dumps() -> bytes:
        records = (dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True))
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()

    assert csv_writer() == csv_rows(table, valid)
    assert json_dumps() == json_rows(table, valid)
    best = best_of(
        {
            "csv": lambda: csv_rows(table, valid),
            "csv.writer": csv_writer,
            "json": lambda: json_rows(table, valid),
            "json.dumps": json_dumps,
        },
        rounds,
    )
    rows = []
    for name, peer in (("csv", "csv.writer"), ("json", "json.dumps")):
        speed = count * len(names) / best[name] / 1e6
        title = f"{count} rows of {len(names)}"
        rows.append(Row(f"{name}_rows, {title}", f"{speed:.1f} M cells/s", f">= {MARK:g}", speed >= MARK))
        rows.append(ratio_row(f"{peer} / {name}_rows, {title}", best[peer] / best[name]))
    return rows


def kinds(count: int, rounds: int) -> list[Row]:
    """One column of each kind."""
    rng = np.random.default_rng(0)
    columns: dict[str, object] = {
        "float64, 17 digits": rng.standard_normal(count),
        "float64, 3 digits": np.round(rng.standard_normal(count), 2),
        "float32": rng.standard_normal(count).astype(np.float32),
        "float16": rng.standard_normal(count).astype(np.float16),
        "int64": rng.integers(-(2**62), 2**62, count),
        "str": ["layers.12.attention.weight"] * count,
    }
    best = best_of(
        {name: lambda values=values: csv_rows({"x": values}) for name, values in columns.items()}, rounds
    )
    return [Row(f"csv_rows, {name}", f"{count / best[name] / 1e6:.1f} M cells/s") for name in columns]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
