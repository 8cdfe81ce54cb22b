"""The overhead governor: trainmon's own time stays below a share of the step.

Every entry point is timed, per probe. When a window of steps was over the budget, the probes that can be looked at less
often are, in a declared order, until the rest fits; when there is room again, they come back. What a probe costs and what
a step lasts are merged over the ranks first (the largest of each), so that every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainmon.config.schema import OverheadConfig
from trainmon.frame import Frame, Registry
from trainmon.messages import Told
from trainmon.slots import Slot

__all__ = ["SHED_FIRST", "Governor"]

#: What is looked at less often first. Loss, gradients, rates and times stay as they are.
SHED_FIRST = ("spectral", "activations", "attention", "updates", "moments", "moe", "weights")
#: Steps after which a window is judged, and those at the start that count in none.
_WINDOW, _SETTLE = 20, 10
#: A probe is looked at no less often than at every so many of its own steps.
_SELDOM = 256
#: There is room for more when a window took less than this share of the budget.
_ROOM = 0.4


class Governor:
    """Decides once a window from merged times.

    Args:
        section: the budget.
        slots: all probes; their ``stretch`` is what is governed.
    """

    def __init__(self, section: OverheadConfig, slots: Sequence[Slot]) -> None:
        self._budget = section.budget
        self._slots = slots
        governed = {slot.probe.name: slot for slot in slots if slot.probe.name in SHED_FIRST}
        self._governed = [governed[name] for name in SHED_FIRST if name in governed]
        self._seen = 0
        self._forget()

    def _forget(self) -> None:
        self._lasted = self._spent = 0.0
        self._steps = 0
        self._by_slot = np.zeros(len(self._governed))

    def register(self, registry: Registry) -> None:
        """Adds the parts to a new layout."""
        self._part = registry.part("governor.spent", "max", max(1, len(self._governed)))

    def write(self, frame: Frame) -> None:
        """Puts this rank's times of the step into the frame, in seconds."""
        for index, slot in enumerate(self._governed):
            frame.set(self._part, slot.spent_ns * 1e-9, index)
            slot.spent_ns = 0

    def judge(self, frame: Frame, spent: float, lasted: float, step: int) -> list[Told]:
        """Takes a merged step; what was changed, in words.

        Args:
            spent: seconds inside trainmon, the largest of all ranks.
            lasted: seconds of the step, the largest of all ranks.
        """
        self._seen += 1
        if self._seen <= _SETTLE:
            return []
        values, valid = frame.get(self._part)
        self._by_slot += np.where(valid, values, 0.0)[: len(self._governed)]
        self._spent, self._lasted, self._steps = self._spent + spent, self._lasted + lasted, self._steps + 1
        if self._steps < _WINDOW or not self._lasted > 0:
            return []
        share = self._spent / self._lasted
        said = []
        if share > self._budget:
            said = self._shed(share, step)
        elif share < _ROOM * self._budget:
            said = self._restore(share, step)
        self._forget()
        return said

    def _shed(self, share: float, step: int) -> list[Told]:
        """Halves as many probes as it takes, the cheap ones last."""
        over, said = self._spent - self._budget * self._lasted, []
        for slot, spent in zip(self._governed, self._by_slot.tolist(), strict=True):
            if over <= 0:
                break
            if spent < 0.05 * over or slot.stretch >= _SELDOM:
                continue
            slot.stretch *= 2
            over -= spent / 2
            said.append(self._told(slot, share, step, "over"))
        return said

    def _restore(self, share: float, step: int) -> list[Told]:
        """Doubles one probe again, the last in the order first, if that fits."""
        for slot, spent in reversed(list(zip(self._governed, self._by_slot.tolist(), strict=True))):
            if slot.stretch > 1 and self._spent + spent <= 0.8 * self._budget * self._lasted:
                slot.stretch //= 2
                return [self._told(slot, share, step, "under")]
        return []

    def _told(self, slot: Slot, share: float, step: int, side: str) -> Told:
        name, often = slot.probe.name, slot.stretch
        now = "as configured" if often == 1 else f"at one in {often} of its steps"
        text = (
            f"trainmon took {share:.2%} of the last {_WINDOW} steps, {side} its budget of {self._budget:.2%} "
            f"(overhead.budget): {name} comes {now} from now on"
        )
        data: Mapping[str, object] = {"probe": name, "one_in": often, "share": share, "budget": self._budget}
        return Told("info", "overhead", text, step, dict(data))
