"""What becomes of alerts: lines of the log, not too many, and records in files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainmon.backend.base import Floats
from trainmon.msprobe.alerts import Alert, Alerts, AlertSettings
from trainmon.msprobe.anomalies import FOLDER, Anomaly, AnomalyFiles
from trainmon.msprobe.saying import logger
from trainmon.msprobe.tables import Rows

__all__ = ["Alarms", "pipeline_stage"]

#: Lines of the log for one monitor's rows of one step.
_LINES = 5


class Alarms:
    """Rules at work on all monitors of a rank. Called by whoever writes tables.

    Args:
        output: the output directory.
        micros: micro-batches of a step.
        pipeline: this rank's place in the pipeline.
        micro_known: rows of modules say their micro-batch.
        goes_on: records of the same run are there.
        failed: takes what goes wrong here.
    """

    def __init__(
        self,
        settings: AlertSettings,
        output: Path,
        rank: int,
        *,
        micros: int,
        pipeline: int,
        micro_known: bool,
        goes_on: bool,
        failed: Callable[[Exception], None],
    ) -> None:
        self._settings, self._rank, self._failed = settings, rank, failed
        self._micros, self._pipeline, self._micro_known = micros, pipeline, micro_known
        self._files: AnomalyFiles | None = None
        self._runs: dict[tuple[str, str], int] = {}
        if settings.dump:
            try:
                self._files = AnomalyFiles(output / FOLDER / f"rank{rank}", goes_on=goes_on)
            except OSError as error:
                failed(error)

    def watch(self, monitor: str, ops: Sequence[str]) -> Callable[[int, Rows, Floats], None]:
        """What looks at one monitor's rows of a step: its number, rows, statistics."""
        rules = Alerts(self._settings.rules, monitor, ops)
        standing: set[tuple[str, str]] = set()

        def look(step: int, rows: Rows, table: Floats) -> None:
            try:
                found = rules.look(rows, table)
                broken = {(one.rule, one.tag) for one in found}
                for over in standing - broken:
                    self._runs.pop(over, None)
                standing.clear()
                standing.update(broken)
                self._tell(step, monitor, rows, found)
            except Exception as error:
                self._failed(error)

        return look

    def close(self) -> None:
        """The files are whole."""
        if self._files is not None:
            try:
                self._files.finish()
            except OSError as error:
                self._failed(error)

    def _tell(self, step: int, monitor: str, rows: Rows, found: Sequence[Alert]) -> None:
        said, more = 0, 0
        for key in dict.fromkeys((one.rule, one.tag) for one in found):
            self._runs[key] = self._runs.get(key, 0) + 1
        for one in found:
            run = self._runs[one.rule, one.tag]
            if run & (run - 1):  # the first, the second, the fourth, ... in a row
                continue
            if said < _LINES:
                said += 1
                often = "" if run == 1 else f" ({run} written steps in a row)"
                logger.warning("[monitor_v2] rank %d: %s%s", self._rank, one.text(step), often)
            else:
                more += 1
        if more:
            logger.warning("[monitor_v2] rank %d: %d more alerts at step %d", self._rank, more, step)
        if self._files is not None:
            self._files.add([self._record(step, monitor, rows, one) for one in found])

    def _record(self, step: int, monitor: str, rows: Rows, alert: Alert) -> Anomaly:
        stage = rows.stages[alert.row]
        return Anomaly(
            rank=self._rank,
            step=step,
            micro_step=self._micro(monitor, rows, alert),
            pp_stage=self._pipeline,
            vpp_stage=0 if stage is None or stage < 0 else stage,
            call_id=rows.orders[alert.row] if rows.orders else alert.row,
            tag_name=alert.tag,
            message=alert.text(step),
        )

    def _micro(self, monitor: str, rows: Rows, alert: Alert) -> int:
        """From 0. Where rows don't say it, a module's calls are shared out among the micro-batches."""
        last = self._micros - 1
        if monitor == "weight_grad" or (monitor == "module" and self._micro_known):
            return max(rows.micros[alert.row] - 1, 0)
        if monitor != "module":
            return last
        turn, times = alert.occurrence
        calls = times // self._micros if times % self._micros == 0 else 1
        return min(turn // calls, last)


def pipeline_stage(told: Any) -> int:
    """What the user says, or Megatron where it is at work; else 0."""
    if isinstance(told, int) and told >= 0:
        return told
    states = sys.modules.get("megatron.core.parallel_state")
    try:
        return 0 if states is None else int(states.get_pipeline_model_parallel_rank())
    except Exception:
        return 0
