"""The health of a run as one state, the same on every rank.

::

    healthy  -- a flag -->  suspect  -- calm -->  healthy
    any      -- a value not finite, an alarm that marks, a divergent spike -->  unhealthy
    unhealthy  -- a report without flag -->  recovering  -- calm -->  healthy

*Calm* is a number of reports in a row without any flag.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Machine", "State"]


class State(IntEnum):
    """``health/state``."""

    HEALTHY = 0
    SUSPECT = 1
    UNHEALTHY = 2
    RECOVERING = 3


class Machine:
    """Follows the state from report to report.

    Args:
        calm: reports in a row without a flag until the run is healthy again.
    """

    def __init__(self, calm: int) -> None:
        self._calm = calm
        self._quiet = 0
        self.state = State.HEALTHY

    def follow(self, *, flagged: bool, unhealthy: bool) -> bool:
        """Takes one report; returns whether the state changed."""
        before = self.state
        self._quiet = 0 if flagged or unhealthy else self._quiet + 1
        if unhealthy:
            self.state = State.UNHEALTHY
        elif flagged:
            self.state = State.SUSPECT if self.state == State.HEALTHY else self.state
        elif self.state == State.UNHEALTHY:
            self.state = State.RECOVERING
        elif self._quiet >= self._calm:
            self.state = State.HEALTHY
        return self.state != before

    def state_dict(self) -> list[int]:
        return [int(self.state), self._quiet]

    def load_state_dict(self, state: list[int]) -> None:
        self.state, self._quiet = State(int(state[0])), int(state[1])
