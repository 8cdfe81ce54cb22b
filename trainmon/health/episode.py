"""An episode of values that are not finite: said when it begins, with its first cause, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainmon.findings import Finding
from trainmon.health.cause import Cause, first_cause
from trainmon.messages import Told

__all__ = ["Episode"]


class Episode:
    """Follows the findings of all ranks from report to report.

    Attributes:
        since: the step with which the present episode began; None outside.
        cause: its first cause.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._told: set[str] = set()
        self._bad: set[str] = set()  # series that were not finite when last looked at
        self.since: int | None = None
        self.cause: Cause | None = None

    def follow(
        self, step: int, findings: Sequence[Finding], looked: Callable[[str], bool] = lambda series: True
    ) -> list[Told]:
        """Takes the findings of one step; returns what is to be said: the first cause, later each kind of quantity that
        the values have spread to, in the end that it is over.

        Args:
            looked: whether a series was looked at in this step: what was bad is so until it has been.
        """
        if not findings and self.since is not None and step < self.since:
            return []  # a report that comes after a gate has seen the next step
        self._bad = {series for series in self._bad if not looked(series)}
        self._bad.update(finding.series for finding in findings)
        if not findings:
            return [] if self._bad else self._end(step)
        new = [finding for finding in findings if finding.quantity not in self._told]
        self._told.update(finding.quantity for finding in findings)
        if not new:
            return []
        cause, text = first_cause(new, self._world), ""
        if self.since is None or self.cause is None:
            self.since, self.cause = step, cause
        else:
            text = f" (since step {self.since}: {self.cause.first.quantity})"
        kind = f"nonfinite_{cause.first.quantity.replace(' ', '_')}"
        return [Told("warning", kind, cause.text + text, step, {**cause.data, "since": self.since})]

    def _end(self, step: int) -> list[Told]:
        if self.since is None:
            return []
        steps = step - self.since
        self.restart()
        text = f"all values are finite again after {steps} step{'s' if steps > 1 else ''}"
        return [Told("info", "finite_again", text, step)]

    def restart(self) -> None:
        """The step went back."""
        self.since = self.cause = None
        self._told, self._bad = set(), set()
