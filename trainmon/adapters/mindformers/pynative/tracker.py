"""The host's store of a step's numbers (``monitor_utils``, from 2.1.0 on), out of which it writes its event files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainmon.frame import Snapshot
from trainmon.sinks.base import tag

__all__ = ["Tracker", "loss_parts"]

_PARTS = {"load-balancing-loss": "aux", "indexer-loss": "indexer", "dsa-indexer-loss": "indexer"}


class Tracker:
    """Reads and writes the store; has nothing where there is none."""

    def __init__(self) -> None:
        try:
            from mindformers.pynative.tools import monitor_utils
        except ImportError:
            self._store: Any = None
        else:
            self._store = monitor_utils

    @property
    def there(self) -> bool:
        return self._store is not None

    def data(self) -> Mapping[str, Any]:
        """What the host and its callbacks have put there in this step."""
        return {} if self._store is None else dict(self._store.get_monitor_data_tracker().data)

    def save(self, snapshot: Snapshot, style: str, consumed_samples: int | None) -> None:
        """Puts a step's numbers there; the host's own stay as they are. To be called before the host writes the step."""
        taken = self.data()
        for name, value in snapshot.scalars.items():
            known = tag(name, style)
            if value is not None and known not in taken:
                state = {"step": snapshot.step, "consumed_samples": consumed_samples}
                self._store.save_monitor_data(known, float(value), **state)


def loss_parts(data: Mapping[str, Any]) -> dict[str, float]:
    """Named losses among the host's numbers."""
    found: dict[str, float] = {}
    for name, value in data.items():
        part = _PARTS.get(name)
        if part is None and name.startswith("mtp-") and name.endswith("-loss"):
            part = f"mtp_{name.removeprefix('mtp-').removesuffix('-loss')}"
        if part is not None and isinstance(value, int | float) and not math.isnan(value):
            found[part] = float(value)
    return found
