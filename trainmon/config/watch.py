"""A configuration file that is edited while the run goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .load import Source, files_of, load_config
from .schema import TrainMonitorConfig

__all__ = ["FIXED", "ConfigWatch", "changed_sections"]

#: What a running run can't change: where it writes, who writes, and how.
FIXED = ("output_dir", "run_name", "ranks", "sinks", "tag_style")


class ConfigWatch:
    """Looks at the files of a configuration; a look costs a system call a file.

    Args:
        source, overrides, under: as `load_config` takes them.

    Attributes:
        ignored: top-level keys that the change seen by the last look touched and that a running run can't change.
    """

    def __init__(
        self,
        source: Source,
        overrides: Mapping[str, Any],
        config: TrainMonitorConfig,
        under: Mapping[str, Any] | None = None,
    ) -> None:
        self._source, self._overrides, self._config = source, dict(overrides), config
        self._under = under
        self._files = files_of(source, self._overrides)
        self._seen = self._stamps()
        self.ignored: tuple[str, ...] = ()

    def poll(self) -> TrainMonitorConfig | None:
        """The new configuration if a file has changed and says something else; None otherwise.

        Raises:
            ConfigError: the changed file is wrong; the old configuration goes on, and the next change is looked at.
        """
        self.ignored = ()
        if not self._files:
            return None
        stamps = self._stamps()
        if stamps == self._seen or None in stamps:
            return None  # editors write a new file and rename it: for a moment there is none
        self._seen = stamps
        try:
            new = load_config(self._source, self._under, **self._overrides)
        finally:
            self._files = files_of(self._source, self._overrides) or self._files
        self.ignored = tuple(name for name in FIXED if getattr(new, name) != getattr(self._config, name))
        new = replace(new, **{name: getattr(self._config, name) for name in FIXED})
        if new.digest() == self._config.digest():
            return None
        self._config = new
        return new

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                state = os.stat(file)
            except OSError:
                found.append(None)
            else:
                found.append((state.st_mtime_ns, state.st_size, state.st_ino))
        return found


def changed_sections(old: TrainMonitorConfig, new: TrainMonitorConfig) -> tuple[str, ...]:
    """Top-level keys whose values differ, in the schema's order."""
    before, after = old.to_dict(), new.to_dict()
    return tuple(name for name in before if before[name] != after[name])
