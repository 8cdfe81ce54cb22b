"""The exception with which a rule ends a run."""

from __future__ import annotations

from trainmon.events import Decision

__all__ = ["TrainingStopped"]


class TrainingStopped(RuntimeError):
    """A rule with the action ``raise`` has ended the run; raised on every rank at the same step.

    Attributes:
        step: the step that was judged.
        reason: which rule, and what it saw.
    """

    def __init__(self, decision: Decision | str) -> None:
        if isinstance(decision, str):  # a host that passes an exception on makes it anew of its text
            super().__init__(decision)
            self.step, self.reason = 0, decision
            return
        super().__init__(f"training stopped at step {decision.step}: {decision.reason}")
        self.step = decision.step
        self.reason = decision.reason
