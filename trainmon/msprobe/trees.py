"""Where the tables of both monitors of msProbe lie: which rank, which monitor, which steps.

Monitor V2 (and trainmon's drop-in) writes ``rank_<r>/<monitor>_step<A>-<B>.csv``, after a restart with other columns
``.part2.csv`` beside it. The older monitor writes ``<MonDD_HH-MM-SS>-rank<r>-<id>/<metric>_<a>-<b>.csv``, a directory a
rank and run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

__all__ = ["METRICS", "TableFile", "find_tables", "metric_of", "time_of"]

Layout = Literal["v1", "v2"]

#: The older monitor's metrics: monitor and scope of the same rows in Monitor V2.
METRICS = {
    "actv": ("module", "forward"),
    "actv_grad": ("module", "backward"),
    "grad_unreduced": ("weight_grad", "unreduced"),
    "grad_reduced": ("weight_grad", "reduced"),
    "exp_avg": ("optimizer", "exp_avg"),
    "exp_avg_sq": ("optimizer", "exp_avg_sq"),
    "param_origin": ("param", "param_origin"),
    "param_updated": ("param", "param_updated"),
}
_BY_ROWS = {rows: metric for metric, rows in METRICS.items()}

_TIME = "%b%d_%H-%M-%S"
_V1_DIRECTORY = re.compile(r"([A-Z][a-z]{2}\d{2}_\d{2}-\d{2}-\d{2})-rank(\d+)-[0-9a-zA-Z]+")
_V2_DIRECTORY = re.compile(r"rank_(\d+)")
_V1_FILE = re.compile(r"(.+)_(\d+)-(\d+)\.csv")
_V2_FILE = re.compile(r"(.+)_step(\d+)-(\d+)(?:\.part(\d+))?\.csv")


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file.

    Attributes:
        monitor: as Monitor V2 calls it, in lower case; the metric where V2 has none.
        scope: of all its rows; empty: each says its own.
        first, last: steps that its name says.
        part: 1, or that of a restart with other columns.
        run: of the older monitor's directories of a rank, which in order of their time; 0 in V2.
    """

    path: Path
    layout: Layout
    rank: int
    monitor: str
    scope: str
    first: int
    last: int
    part: int = 1
    run: int = 0


def metric_of(monitor: str, scope: str) -> str:
    """The older monitor's name for rows; the scope, or else the monitor, where it has none."""
    return _BY_ROWS.get((monitor, scope)) or scope or monitor


def time_of(text: str) -> datetime:
    """A time as the older monitor's directories have it, of no year.

    Raises:
        ValueError: it is not of the form ``Dec03_21-34-40``.
    """
    try:
        return datetime.strptime(f"2000 {text}", f"%Y {_TIME}")
    except ValueError:
        raise ValueError(f"{text!r} is no time of the form Dec03_21-34-40") from None


def find_tables(
    path: str | os.PathLike[str], time_start: str | None = None, time_end: str | None = None
) -> list[TableFile]:
    """All tables of a tree, in order of rank, run, monitor, step and part.

    Args:
        path: the output directory, the directory of one rank, or one file.
        time_start, time_end: of the older monitor's directories, those from here to there, both included.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: it holds no tables; times that are none, or whose start is after the end.
    """
    start = None if time_start is None else time_of(time_start)
    end = None if time_end is None else time_of(time_end)
    if start is not None and end is not None and start > end:
        raise ValueError(f"time_start {time_start} is after time_end {time_end}")
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is no {place}")
    found = []
    runs: dict[int, int] = {}
    for directory, rank, time in sorted(_directories(place), key=lambda one: (one[1], one[2] or "", one[0])):
        if time is not None:
            when = time_of(time)
            if (start is not None and when < start) or (end is not None and when > end):
                continue
        run = runs.get(rank, 0)
        runs[rank] = run + 1
        files = [directory] if directory.is_file() else directory.iterdir()
        tables = [_table(file, rank, time is not None, run) for file in files]
        found += [one for one in tables if one is not None]
    if not found:
        raise ValueError(
            f"{place} holds no tables of msProbe's monitors: neither rank_<r>/<monitor>_step<A>-<B>.csv nor "
            "<MonDD_HH-MM-SS>-rank<r>-<id>/<metric>_<a>-<b>.csv" + ("" if start is end else " of that time")
        )
    return sorted(found, key=lambda one: (one.rank, one.run, one.monitor, one.scope, one.first, one.part))


def _directories(place: Path) -> Iterator[tuple[Path, int, str | None]]:
    """Directories of ranks (or the one file of one), the rank, and the time of the older monitor's."""
    whole = place.resolve()
    candidates = [(whole, whole.parent if whole.is_file() else whole)]
    if whole.is_dir():
        candidates += [(one, one) for one in whole.iterdir() if one.is_dir()]
    for what, named in candidates:
        old, new = _V1_DIRECTORY.fullmatch(named.name), _V2_DIRECTORY.fullmatch(named.name)
        if old is not None:
            yield what, int(old[2]), old[1]
        elif new is not None:
            yield what, int(new[1]), None


def _table(path: Path, rank: int, older: bool, run: int) -> TableFile | None:
    match = (_V1_FILE if older else _V2_FILE).fullmatch(path.name)
    if match is None:
        return None
    name, first, last = match[1], int(match[2]), int(match[3])
    if older:
        monitor, scope = METRICS.get(name, (name, name))
        return TableFile(path, "v1", rank, monitor, scope, first, last, run=run)
    return TableFile(path, "v2", rank, name.lower(), "", first, last, part=int(match[4] or 1))
