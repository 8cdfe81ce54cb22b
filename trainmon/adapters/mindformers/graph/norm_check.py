"""``check_for_global_norm``: a step whose gradients' norm is too large is left, once, so that it can be done again.

MindSpore goes back to an earlier step on an exception whose text has ``TREError`` (``MS_ENABLE_TFT="{TRE:1}"``), from
inside its training loop; without that the run ends. Which steps were left stands in ``abnormal_global_norm.json`` in
the run's directory, ``{"<step>": [norm, ...]}``; when such a step comes again its norm is added, and it is let pass. The
host's own file lies beside all runs, so that an earlier run's disarms the check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from trainmon.sinks.base import publish

__all__ = ["FILE", "NormCheck"]

FILE = "abnormal_global_norm.json"


class NormCheck:
    """Looks at each step's norm; all ranks have the same one.

    Args:
        limit: a norm of this size or more is too large.
        directory: of the run; None: nothing is written.
        resumed: whether an earlier life of the run may have left the file.
        writes: whether this rank does.
        say: takes what went wrong with the file.
    """

    def __init__(
        self, limit: float, directory: Path | None, resumed: bool, writes: bool, say: Callable[[str], None]
    ) -> None:
        self._limit, self._writes, self._say = limit, writes, say
        self._path = None if directory is None else directory / FILE
        self.steps: dict[int, list[float]] = self._read() if resumed else {}

    def look(self, step: int, norm: float | None) -> str | None:
        """Why a step is to be left; None: it isn't."""
        if norm is None or math.isnan(norm) or norm < self._limit:
            return None
        again = step in self.steps
        self.steps.setdefault(step, []).append(norm)
        if self._writes and self._path is not None:
            try:
                publish(self._path, json.dumps(self.steps).encode())
            except OSError as error:
                self._say(f"{self._path} can't be written: {error.strerror}")
        if again:
            return None
        return f"TREError: check_for_global_norm: the norm of step {step} is {norm:g} (limit {self._limit:g})"

    def _read(self) -> dict[int, list[float]]:
        try:
            text = "" if self._path is None else self._path.read_text(encoding="utf-8")
            found = {int(step): [float(norm) for norm in norms] for step, norms in json.loads(text).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError):
            if self._path is not None:
                self._say(f"{self._path} can't be read: steps that were left before may be left again")
            return {}
        return found
