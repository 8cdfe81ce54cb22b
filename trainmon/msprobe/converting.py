"""Tables of both of msProbe's monitors as TensorBoard event files: a directory a rank and metric."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainmon.msprobe.reading import MonitorTable, read
from trainmon.msprobe.trees import METRICS, find_tables, metric_of
from trainmon.sinks.base import at_least

__all__ = ["csv2tensorboard_by_step", "each_rank"]

logger = logging.getLogger("trainmon.msprobe")

_Work = TypeVar("_Work", bound=tuple[object, ...])
_Result = TypeVar("_Result")


def csv2tensorboard_by_step(
    monitor_path: str | os.PathLike[str],
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Iterable[str] | None = None,
    output_dirpath: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes ``<output>/rank<r>/<metric>/``, tags ``vp<stage>:<name>[:micro<m>]/<statistic>`` over the step.

    Of rows that say the same thing of the same step the last wins, and how many others there were is logged.

    Args:
        monitor_path: the output of Monitor V2, of trainmon's drop-in or of msProbe's older monitor.
        time_start, time_end: of the older monitor's directories, as ``Dec03_21-34-40``, both included.
        process_num: ranks that are converted at once.
        data_type_list: of the older monitor's metrics (``actv``, ``grad_reduced``, ...), only these; None: everything.
        output_dirpath: None: ``<time>-csv2tensorboard_by_step`` in ``monitor_path``.

    Returns:
        The output directory.

    Raises:
        ValueError: an unknown metric, times that are none, ``process_num`` below 1, no tables.
        FileNotFoundError: there is no such path.
        ImportError: the package ``tensorboard`` is not installed.
    """
    wanted = None if data_type_list is None else list(data_type_list)
    unknown = [one for one in wanted or () if one not in METRICS]
    if unknown:
        raise ValueError(f"unknown data types {unknown}; there are {', '.join(METRICS)}")
    root = Path(monitor_path)
    output = root / time.strftime("%b%d_%H-%M-%S-csv2tensorboard_by_step")
    if output_dirpath is not None:
        output = Path(output_dirpath)
    ranks = sorted({file.rank for file in find_tables(root, time_start, time_end)})
    work = [(root, rank, time_start, time_end, wanted, output) for rank in ranks]
    doubled = sum(each_rank(_convert, work, process_num))
    if doubled:
        logger.warning("%d values stood more than once for their step; the last of each was taken", doubled)
    return output


def each_rank(convert: Callable[..., _Result], work: list[_Work], processes: int) -> list[_Result]:
    """The results of all work, in order; a failure of one is raised.

    Raises:
        ValueError: ``processes`` below 1.
    """
    at_least("process_num", processes, 1)
    if processes == 1 or len(work) < 2:
        return [convert(*one) for one in work]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(work)), mp_context=context) as pool:
        return [future.result() for future in [pool.submit(convert, *one) for one in work]]


def _convert(
    root: Path, rank: int, start: str | None, end: str | None, wanted: list[str] | None, output: Path
) -> int:
    """One rank; returns how many values another one replaced."""
    from trainmon.sinks.tensorboard import EventFile

    kinds = None if wanted is None else {METRICS[metric][0] for metric in wanted}
    tree = read(root, ranks=[rank], monitors=kinds, time_start=start, time_end=end)
    for problem in tree.problems:
        logger.warning("%s", problem)
    doubled = 0
    now = time.time()
    for table in tree.tables.values():
        whole, others = table.latest()
        doubled += others
        for metric, part in _metrics(whole):
            if wanted is not None and metric not in wanted:
                continue
            file = EventFile(output / f"rank{rank}" / metric, "trainmon")
            try:
                for step, rows in _steps(part):
                    stats = [
                        (name, rows.stats[name].tolist(), rows.valid[name].tolist()) for name in rows.stats
                    ]
                    values = [
                        file.number(f"{tag}/{name}", column[at])
                        for at, tag in enumerate(_tags(rows))
                        for name, column, valid in stats
                        if valid[at]
                    ]
                    file.write_summary(step, now, values)
            finally:
                file.close()
    return doubled


def _metrics(table: MonitorTable) -> Iterator[tuple[str, MonitorTable]]:
    for scope in dict.fromkeys(table.scope.tolist()):
        yield metric_of(table.monitor, scope), table.where(table.scope == scope)


def _steps(table: MonitorTable) -> Iterator[tuple[int, MonitorTable]]:
    order = np.argsort(table.step, kind="stable")
    steps, starts = np.unique(table.step[order], return_index=True)
    for step, rows in zip(steps.tolist(), np.split(order, starts[1:]), strict=True):
        yield step, table.where(rows)


def _tags(table: MonitorTable) -> Iterator[str]:
    columns = (table.vpp_stage.tolist(), table.name.tolist(), table.micro_step.tolist(), table.call.tolist())
    for stage, name, micro, call in zip(*columns, strict=True):
        yield (
            f"vp{stage}:{name}"
            + (f":micro{micro}" if micro >= 0 else "")
            + (f":call{call}" if call > 0 else "")
        )
