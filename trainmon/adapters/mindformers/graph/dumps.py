"""What the graph leaves in files: norms of gradients before they are reduced, losses of micro-batches, ends of steps.

``<dump_path>/rank_<r>/`` holds ``local_norm__<parameter>_<dtype>_<id>.npy``, ``device_local_norm_<dtype>_<id>.npy``,
``local_loss__<part>_<dtype>_<id>.npy`` and ``finish_step_<dtype>_<id>.npy``; ids only grow. What lies between the ids of
two ends belongs to the step of the later one. Files are left where they are, for whoever reads them next, or taken away.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

__all__ = ["DumpReader", "Dumped"]

_NAME = re.compile(
    r"(?:(?P<kind>local_norm|local_loss)__(?P<name>.+)|(?P<other>device_local_norm|finish_step))"
    r"_(?P<dtype>[A-Za-z]+\d+)_(?P<id>\d+)\.npy",
    re.ASCII,
)


@dataclass(slots=True)
class Dumped:
    """Of one step.

    Attributes:
        local_norms: by parameter.
        device_norm: over all of them.
        local_losses: by part, those of the micro-batches in their order.
    """

    local_norms: dict[str, float] = field(default_factory=dict)
    device_norm: float | None = None
    local_losses: dict[str, list[float]] = field(default_factory=dict)


class DumpReader:
    """Reads the files of finished steps, each once.

    Args:
        directory: of this rank.
        take: whether files of steps that were read are removed.
    """

    def __init__(self, directory: Path, *, take: bool = False) -> None:
        self._directory, self._take = directory, take
        self._after = -1  # everything up to here was read

    def steps(self) -> list[Dumped]:
        """Steps that have ended since the last call, in their order."""
        files = sorted(self._new(), key=lambda item: item[0])
        ends = [number for number, match, _ in files if match["other"] == "finish_step"]
        if not ends:
            return []
        found = [Dumped() for _ in ends]
        for number, match, path in files:
            if number > ends[-1]:
                break
            if match["other"] != "finish_step":
                step = found[int(np.searchsorted(ends, number))]
                with contextlib.suppress(OSError, ValueError):  # somebody else has taken it
                    self._enter(step, match, path)
            if self._take:
                path.unlink(missing_ok=True)
        self._after = ends[-1]
        return found

    def _new(self) -> Iterator[tuple[int, re.Match[str], Path]]:
        try:
            paths = list(self._directory.iterdir())
        except OSError:
            return
        for path in paths:
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match["id"]) > self._after:
                yield int(match["id"]), match, path

    @staticmethod
    def _enter(step: Dumped, match: re.Match[str], path: Path) -> None:
        value = float(np.mean(np.load(path, allow_pickle=False), dtype=np.float64))
        if match["kind"] == "local_norm":
            step.local_norms[match["name"]] = value
        elif match["kind"] == "local_loss":
            step.local_losses.setdefault(match["name"], []).append(value)
        else:
            step.device_norm = value
