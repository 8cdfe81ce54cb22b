"""One entry of ``monitors`` at work: its rows, its hooks, and why it has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmon.msprobe.collectives import CollectiveRows
from trainmon.msprobe.config import MonitorSettings
from trainmon.msprobe.host import Hooks, Host, Row
from trainmon.msprobe.tables import Rows
from trainmon.msprobe.targets import selection

__all__ = ["Monitor", "check_needs"]

#: Written steps without rows after which the likely reason is said.
_PATIENCE = 3
_REASONS = {
    "module": "no module that targets select was called",
    "weight_grad": "no parameter has had a gradient when the optimizer stepped",
    "optimizer": "the optimizer keeps neither exp_avg nor exp_avg_sq",
    "param": "the optimizer has not stepped, or the model has no parameters",
    "cc": "torch.distributed was not called, or from no line of cc_codeline",
}
#: Columns between scope and statistics, as msProbe has them, and extended.
_KEYS_OF_MSPROBE = {"weight_grad": ("micro_step",)}
_KEYS = {"weight_grad": ("micro_step",), "module": ("micro_step", "call")}
_NEEDS = {"weight_grad": "weight grad", "optimizer": "optimizer", "param": "param"}


class Monitor:
    """One entry of ``monitors`` at work.

    Attributes:
        settings: what was asked for.
        chosen: whether a name's rows are wanted.
        keys: columns between scope and statistics.
        rows, calls: those of the running step; of collectives by call.
        hooks: what has to be told which steps are looked at.
        update: the rows that the optimizer's running or failed step has added, from and to.
        micro: micro-batches of a step.
        empty: in how many written steps there were no rows so far; -1 once there were any.
    """

    def __init__(self, settings: MonitorSettings, *, extended: bool) -> None:
        self.settings = settings
        self.chosen = selection(settings.targets, extended=extended)
        self.keys = _KEYS.get(settings.kind, ()) if extended else _KEYS_OF_MSPROBE.get(settings.kind, ())
        self.rows = Rows()
        self.calls = CollectiveRows()
        self.hooks: Hooks | None = None
        self.update: tuple[int, int] | None = None
        self.micro = 1
        self.empty = 0

    def __len__(self) -> int:
        return len(self.rows) + len(self.calls)

    def clear(self) -> None:
        self.rows.clear()
        self.calls.clear()
        self.update = None

    def add(self, scope: str, rows: Sequence[Row]) -> None:
        for name, stage, reading in rows:
            self.rows.add(name, scope, stage, self.micro, reading)

    def watched(self, host: Host) -> str:
        """What is looked at, in words."""
        if self.hooks is not None:
            return self.hooks.watched()
        if self.settings.kind == "cc" or not self.settings.distribution:
            return "nothing"
        return f"{host.parameters(self.chosen)} parameters"

    def why_empty(self, reasons: Mapping[str, str]) -> str | None:
        """What to say when a written step has had no rows: once, when the first steps that should have some have none.

        Args:
            reasons: the host's own, by kind.
        """
        settings = self.settings
        silent = (
            settings.log_only or not settings.distribution or (settings.kind == "cc" and self.hooks is None)
        )
        if self.empty < 0 or silent:
            return None
        self.empty += 1
        if self.empty != _PATIENCE:
            return None
        reason = reasons.get(settings.kind, _REASONS[settings.kind])
        return f"monitor {settings.key!r} had no rows in {_PATIENCE} written steps: {reason}"


def check_needs(kind: str, model: Any, optimizer: Any) -> None:
    """Raises:
    ValueError: a monitor of this kind needs one of them.
    """
    if kind in _NEEDS and optimizer is None:
        raise ValueError(f"Optimizer must be provided to start {_NEEDS[kind]} function")
    if kind in ("module", "optimizer", "param") and model is None:
        raise ValueError(f"Model must be provided to start {kind} function")
