"""The trainer's whole configuration, of which it hands a callback its own keys only.

It is looked for where the callback is built: in the frames of the trainer that builds it, else where MindFormers' context
keeps it. All of it becomes plain data: a missing attribute of the host's own mapping reads None, and would be found
everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from trainmon.config import ConfigError
from trainmon.config.files import read_file
from trainmon.config.load import entries_of

__all__ = ["HostConfig", "find_config", "plain"]

#: The host's keys of an entry.
HOST_KEYS = frozenset({"type", "auto_register"})
_MODULE = "mindformers.core.context.build_context"


def plain(value: Any) -> Any:
    """Mappings and lists of the host as Python's own, throughout."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class HostConfig:
    """What was found; empty where nothing was.

    Attributes:
        tree: the configuration as plain data.
        files: YAML files that it may come from, the likeliest first.
        global_batch: samples of a step on all ranks, as the trainer counts them; 0: not told.
    """

    tree: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    global_batch: int = 0

    def get(self, path: str, default: Any = None) -> Any:
        """The value at ``a.b.c``; ``default`` where a step is missing or None."""
        value: Any = self.tree
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, path: str, default: int) -> int:
        """A positive integer; else ``default``."""
        value = self.get(path)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def flag(self, path: str, default: bool = False) -> bool:
        return bool(self.get(path, default))

    def source_of(self, keys: Mapping[str, Any]) -> str | None:
        """The file whose entry has just these keys: what is wrong with them then has its line and column."""
        for file in self.files:
            try:
                root = read_file(file)
                entries = entries_of(root) if isinstance(root.data, dict) else []
            except ConfigError:
                continue
            if len(entries) == 1 and isinstance(entries[0].data, dict):
                if {str(key) for key in entries[0].data} - HOST_KEYS == set(keys):
                    return file
        return None


def find_config() -> HostConfig:
    """The configuration of the trainer that is at work."""
    found, files, batch = None, list[str](), 0
    for frame in _callers():
        owner = frame.f_locals.get("self")
        for candidate in (frame.f_locals.get("config"), _attribute(owner, "config")):
            if found is None and _is_whole(candidate):
                found = candidate
        samples = _attribute(owner, "global_batch_size")
        if not batch and isinstance(samples, int):
            batch = samples
        arguments = _attribute(owner, "args")
        if isinstance(arguments, str):
            files.append(arguments)
    if found is None:
        context = getattr(sys.modules.get(_MODULE), "Context", None)
        candidate = getattr(getattr(context, "_instance", None), "config", None)
        found = candidate if _is_whole(candidate) else {}
    files += [argument.partition("=")[2] or argument for argument in sys.argv[1:]]
    there = [file for file in files if file.endswith((".yaml", ".yml")) and os.path.isfile(file)]
    return HostConfig(plain(found), tuple(dict.fromkeys(there)), batch)


def _attribute(owner: Any, name: str) -> Any:
    """Of an object of any kind: it may be a property that fails."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _is_whole(candidate: Any) -> bool:
    return isinstance(candidate, dict) and "callbacks" in candidate and "runner_config" in candidate


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
