"""What the host's own sections ask for, as configuration below the user's own.

Sections are looked for in ``args.train``, then ``args``, then ``config``: not all of the host's callbacks look where its
configuration keeps them, and some only warn that they do nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmon.adapters.hyperparallel.reading import read

__all__ = ["HostSettings", "settings_of"]

_ROOTS = (("args", "train"), ("args",), ("config",))


@dataclass(slots=True)
class HostSettings:
    """What was found.

    Attributes:
        config: top-level configuration keys.
        taken: which of the host's keys it comes from.
        problems: what could not be followed, and why.
        deterministic: whether computation is to be deterministic; "warn": as far as it goes.
    """

    config: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    deterministic: bool | str = False

    def put(self, source: str, *path: str, value: Any) -> None:
        """Sets a key, unless an earlier section did."""
        place = self.config
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place.setdefault(path[-1], value)
        if source not in self.taken:
            self.taken.append(source)


def settings_of(trainer: Any) -> HostSettings:
    """The host's settings that trainmon follows."""
    found = HostSettings()
    for follow in (_monitor, _tensorboard, _wandb, _logging, _moe, _debug):
        try:
            follow(trainer, found)
        except Exception as error:  # a section of any shape
            found.problems.append(f"{follow.__name__[1:]}: {type(error).__name__}: {error}")
    return found


def _section(trainer: Any, name: str) -> Any:
    for root in _ROOTS:
        section = _get(read(trainer, *root), name)
        if section is not None:
            return section
    return None


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)


def _steps(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _monitor(trainer: Any, found: HostSettings) -> None:
    """``train.monitor`` of the first generation: local losses and norms."""
    section = _section(trainer, "monitor")
    if not _get(section, "monitor_on"):
        return
    name = "train.monitor"
    found.taken.append(name)
    every = _steps(_get(section, "step_interval"))
    if every is not None:
        for part in ("loss", "gradients"):
            found.put(name, part, "every", value=every)
    target = _get(section, "target")
    targets = [target] if isinstance(target, str) else list(target or ())
    for pattern in targets:
        try:
            re.compile(pattern)
        except re.error as error:
            found.problems.append(f"{name}.target: {pattern!r}: {error}")
            targets = []
            break
    if targets:
        found.put(name, "gradients", "target", value=targets)
        found.put(name, "gradients", "invert", value=bool(_get(section, "invert")))
    formats: set[str] = set()
    for key, path in (
        ("local_loss_format", ("loss", "micro")),
        ("device_local_loss_format", None),  # loss/device is there with several ranks
        ("local_norm_format", ("gradients", "local")),
        ("device_local_norm_format", ("gradients", "device")),
    ):
        wanted = _get(section, key)
        if wanted:
            formats.update([wanted] if isinstance(wanted, str) else wanted)
            if path is not None:
                found.put(name, *path, value=True)
    if _get(section, "dump_path"):
        found.put(name, "output_dir", value=str(_get(section, "dump_path")))
    if "tensorboard" in formats:
        _event_files(name, found, {} if every is None else {"every": every})


def _tensorboard(trainer: Any, found: HostSettings) -> None:
    section = _section(trainer, "tensorboard")
    if _get(section, "enabled"):
        every = _steps(_get(section, "log_steps"))
        _event_files("tensorboard", found, {} if every is None else {"every": every})
        directory = _get(section, "output_dir") or _get(section, "log_dir")
        if directory:
            found.put("tensorboard", "output_dir", value=str(directory))


def _event_files(source: str, found: HostSettings, sink: dict[str, Any]) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        found.problems.append(
            f"{source}: no event files without the package tensorboard (trainmon[tensorboard])"
        )
    else:
        found.put(source, "sinks", "tensorboard", value=sink)


def _wandb(trainer: Any, found: HostSettings) -> None:
    section = _section(trainer, "wandb")
    if not (_get(section, "enabled") or _get(section, "enable")):
        return
    if importlib.util.find_spec("wandb") is None:
        found.problems.append("wandb: the package is not installed")
        return
    sink: dict[str, Any] = {"to": "wandb", "online": True}
    every, project = _steps(_get(section, "log_steps")), _get(section, "project")
    if every is not None:
        sink["every"] = every
    if project:
        sink["project"] = str(project)
    found.put("wandb", "sinks", "bridge", value=sink)


def _logging(trainer: Any, found: HostSettings) -> None:
    every = _steps(_get(_section(trainer, "logging"), "log_steps"))
    if every is None:
        every = _steps(read(trainer, "config", "training", "logging_steps"))
    if every is not None:
        found.put("logging", "sinks", "log", "every", value=every)


def _moe(trainer: Any, found: HostSettings) -> None:
    if _get(_section(trainer, "moe_monitor"), "enabled"):
        found.put("moe_monitor", "moe", "per_expert", value=True)


def _debug(trainer: Any, found: HostSettings) -> None:
    """The host's own check raises on rank 0 alone, after these rules."""
    section = _section(trainer, "debug")
    if _get(section, "check_nan_inf"):
        rule = {
            "series": ["loss/global", "grad/norm", "grad/nonfinite"],
            "detector": "nonfinite",
            "name": "check_nan_inf",
            "action": ["log", "raise"],
        }
        found.put("debug.check_nan_inf", "health", "gate", value="before_update")
        found.put("debug.check_nan_inf", "health", "rules", value=[rule])
    if _get(section, "deterministic") or read(trainer, "config", "training", "enable_full_determinism"):
        found.deterministic = "warn" if _get(section, "deterministic_warn_only") else True
        found.taken.append("determinism")
