"""Rows of text by Python's csv and json: the twin of csv_rows and json_rows."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def number_text(value: Any) -> str:
    """A float32 by its own shortest digits, anything else by those of Python; in Python's notation."""
    return repr(float(str(value))) if isinstance(value, np.float32) else repr(value)


class _Text(float):
    """A float32 that json writes with its own digits."""

    def __new__(cls, value: np.float32) -> _Text:
        return super().__new__(cls, str(value))


def _cells(values: Any, mask: Any) -> list[Any]:
    if isinstance(values, np.ndarray):
        if values.dtype.itemsize < 4 and values.dtype.kind not in "iub":
            values = values.astype(np.float32)
        cells = [_Text(value) for value in values] if values.dtype == np.float32 else values.tolist()
    else:
        cells = list(values)
    return [cell if mask is None or mask[i] else None for i, cell in enumerate(cells)]


def _rows(table: Mapping[str, Any], valid: Mapping[str, Any] | None) -> list[tuple[Any, ...]]:
    return list(
        zip(*(_cells(values, (valid or {}).get(name)) for name, values in table.items()), strict=True)
    )


def csv_twin(table: Mapping[str, Any], valid: Mapping[str, Any] | None, header: bool) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(([list(table)] if header else []) + [list(row) for row in _rows(table, valid)])
    return text.getvalue().encode()


def json_twin(table: Mapping[str, Any], valid: Mapping[str, Any] | None) -> bytes:
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    lines = [
        json.dumps(
            {
                name: words[repr(cell)] if isinstance(cell, float) and not math.isfinite(cell) else cell
                for name, cell in zip(table, row, strict=True)
            },
            ensure_ascii=False,
        )
        for row in _rows(table, valid)
    ]
    return "".join(line + "\n" for line in lines).encode()
