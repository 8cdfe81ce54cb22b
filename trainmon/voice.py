"""What trainmon has to say beside the numbers, and who says it.

Rank 0 speaks for all. What another rank has to say of more than its own business waits for the next report, travels with
it, and is said once with the ranks that have it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from trainmon.findings import Finding
from trainmon.messages import Told, together
from trainmon.run import Run
from trainmon.sinks.base import Message
from trainmon.sinks.blackbox import BlackBox

__all__ = ["Voice"]

_logger = logging.getLogger("trainmon")

#: Messages that may wait for the next report.
_OUTBOX = 32
#: Findings of one rank that may wait for the next report; the first ones are nearest to the cause.
_FOUND = 64


class Voice:
    """One rank's messages and findings.

    Attributes:
        rank, size: this process's place among those that report together.
        run: takes what is said; None before it is open, when Python's logging does.
        travels: whether other ranks can be told with a report.
        step: the running step.
        findings: what probes have found and no report has taken.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.step = 0, 1, 0
        self.run: Run | None = None
        self.travels: Callable[[], bool] = lambda: False
        self.findings: list[Finding] = []
        self._outbox: list[Told] = []

    @property
    def box(self) -> BlackBox | None:
        """The rank's black box, if there is one."""
        return None if self.run is None else self.run.box

    def say(
        self,
        level: Literal["info", "warning", "error"],
        kind: str,
        text: str,
        *,
        step: int,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Tells the user something once."""
        if self.box is not None:
            self.box.message(Message(level, kind, text, step, 0.0))
        told = Told(level, kind, text, step, dict(data or {}))
        if self.travels() and level != "info":
            self.send(told)
        else:
            self.now(told)

    def now(self, told: Told) -> None:
        """Says it on this rank, at once."""
        if self.run is not None:
            self.run.say(told.level, told.kind, told.text, step=told.step, data=told.data)
        else:
            _logger.log(logging.getLevelName(told.level.upper()), "%s", told.text)

    def send(self, told: Told) -> None:
        """Says it with the next report."""
        if len(self._outbox) < _OUTBOX:
            self._outbox.append(told)
        elif len(self._outbox) == _OUTBOX:
            text = f"rank {self.rank} has more than {_OUTBOX} messages in one report: the rest is left out"
            self._outbox.append(Told("warning", "messages_left_out", text, told.step))

    def everywhere(self, messages: Sequence[Told]) -> None:
        """Says what every rank has come to by itself; those that write do."""
        if self.run is not None and (self.rank == 0 or self.run.writes):
            for told in messages:
                self.now(told)

    def found(self, finding: Finding) -> None:
        """Keeps a finding for the next report."""
        if len(self.findings) < _FOUND:
            self.findings.append(finding)

    def take_messages(self) -> list[Told]:
        """What waits for a report."""
        messages, self._outbox = self._outbox, []
        return messages

    def take_findings(self, step: int) -> list[Finding]:
        """What was found up to a step."""
        taken = [finding for finding in self.findings if finding.step <= step]
        self.findings = [finding for finding in self.findings if finding.step > step]
        return taken

    def tell(self, messages: Sequence[Told], everybody: Sequence[bytes] | None) -> None:
        """Says what a report has brought: rank 0 for all, the others their own part if they write at all.

        Args:
            everybody: the packed messages of all ranks; None: they were not exchanged.
        """
        if everybody is not None and self.rank == 0:
            messages = together(everybody, self.size)
        if everybody is None or self.rank == 0 or (self.run is not None and self.run.writes):
            for told in messages:
                self.now(told)
