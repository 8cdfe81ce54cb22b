"""Columns in, rows of text out: CSV and JSON Lines, every number in its shortest form that reads back the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from trainmon.ops._extension import Array, _core

# Numbers: what a door of the kernels opens, one axis. Texts: str, or None for null.
Column: TypeAlias = Array | Sequence[str | None]
Columns: TypeAlias = Mapping[str, Column] | Iterable[tuple[str, Column]]


def csv_rows(columns: Columns, valid: Mapping[str, Array] | None = None, header: bool = False) -> bytes:
    r"""The rows of a CSV file, as Python's `csv.writer` writes them with `lineterminator="\n"`.

    Null is an empty cell; floats are `repr(float)`, float32 and narrower ones with the digits that float32 needs,
    and `nan`, `inf`, `-inf`; bool is `True` or `False`. Cells with a comma, a quote or the end of a line are
    quoted, and so is the only cell of a row if it is empty.

    Args:
        columns: (name, values) in order: one-dimensional arrays of one length (floats, integers, bool), or
            lists of `str` and None.
        valid: by name of column, bool arrays: where false, the cell is null.
        header: a first row with the names.

    Returns:
        UTF-8, each row ended by `\n`; empty without columns. A surrogate that stands alone, which UTF-8 can't
        hold, is written as `\udXXX`.

    Raises:
        ValueError: columns of different lengths or more than one axis, `valid` for a name that is no column.
        TypeError: values that are neither numbers nor texts; the message names the column.
    """
    return _write(columns, valid, False, header)


def json_rows(columns: Columns, valid: Mapping[str, Array] | None = None) -> bytes:
    r"""JSON Lines: one object a row, as `json.dumps(row, ensure_ascii=False)` writes it.

    Null is `null`; numbers are as in `csv_rows`; NaN and infinities are the strings `"NaN"`, `"Infinity"`,
    `"-Infinity"`.

    Args:
        columns, valid: as `csv_rows` has them.

    Returns:
        UTF-8, each object ended by `\n`; empty without columns.

    Raises:
        ValueError, TypeError: as `csv_rows`.
    """
    return _write(columns, valid, True, False)


def _write(columns: Columns, valid: Mapping[str, Array] | None, json: bool, header: bool) -> bytes:
    masks = {} if valid is None else dict(valid)
    plan, numbers, names, flags = [], [], [], []
    for name, values in columns.items() if isinstance(columns, Mapping) else columns:
        values, is_text = _sorted_out(values)
        if not is_text:
            numbers.append(values)
            names.append(name)
        mask = masks.pop(name, None)
        if mask is not None:
            flags.append(mask)
        plan.append((name, values if is_text else None, mask is not None))
    if masks:
        raise ValueError(f"valid has {next(iter(masks))!r}, which is no column")
    return _core.write_rows(tuple(plan), tuple(numbers), tuple(names), tuple(flags), json, header)


def _sorted_out(values: Any) -> tuple[Any, bool]:
    """The values as the extension takes them: texts as a tuple, or an array; and whether they are texts."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "OUT":
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        return values, False
    first = next((value for value in values if value is not None), "")
    if isinstance(first, str):
        return tuple(values), True
    if isinstance(values, tuple) and len(values) == 2 and isinstance(values[1], str):
        return values, False  # a buffer and the name of its dtype
    return np.asarray(values), False
