"""What the host's own sections ask for, as configuration below the user's own.

Sections are looked for in ``args.train``, then ``args``, then ``config``: not all of the host's callbacks look where its
configuration keeps them, and some only warn that they do nothing.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmon.adapters.hyperparallel.reading import read

__all__ = ["HostSettings", "settings_of"]

_ROOTS = (("args", "train"), ("args",), ("config",))
#: What the host's monitor shows: the key with its formats, what publishes it here, the series.
_QUANTITIES = (
    ("local_loss_format", ("loss", "micro"), ("loss/micro",)),
    ("device_local_loss_format", ("loss", "device"), ("loss/device",)),
    ("local_norm_format", ("gradients", "local"), ("grad/norm_local",)),
    (
        "device_local_norm_format",
        ("gradients", "device"),
        ("grad/norm_device", "grad/norm_device_selected"),
    ),
)


@dataclass(slots=True)
class HostSettings:
    """What was found.

    Attributes:
        config: top-level configuration keys.
        taken: which of the host's keys it comes from.
        problems: what could not be followed, and why.
        event_files: who asks for event files, and every how many steps.
        hidden: patterns of series that are to stay out of them.
        deterministic: whether computation is to be deterministic; "warn": as far as it goes.
    """

    config: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    event_files: dict[str, int] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
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
    _event_files(found)
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
            found.put(name, part, "own_every", value=every)
        found.put(name, "comparison", "every", value=every)  # the ranks' own values side by side
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
    _formats(section, found, every or 1)
    if _get(section, "dump_path"):
        found.put(name, "output_dir", value=str(_get(section, "dump_path")))


def _formats(section: Any, found: HostSettings, every: int) -> None:
    """Where each quantity is shown: on the line of the log, in TensorBoard, in both or in neither."""
    name = "train.monitor"
    shown: list[str] = []
    for key, path, series in _QUANTITIES:
        wanted = _get(section, key) or ()
        formats = {wanted} if isinstance(wanted, str) else set(wanted)
        for unknown in sorted(formats - {"log", "tensorboard"}, key=str):
            found.problems.append(f"{name}.{key}: {unknown!r} is neither log nor tensorboard")
        pattern = f"^({'|'.join(series)})$"
        if formats & {"log", "tensorboard"}:
            found.put(name, *path, value=True)
        if "log" in formats:
            shown.append(pattern)
        if "tensorboard" in formats:
            found.event_files[name] = every
        else:
            found.hidden.append(pattern)
    if shown:
        found.put(name, "sinks", "log", "series", value=shown)


def _tensorboard(trainer: Any, found: HostSettings) -> None:
    section = _section(trainer, "tensorboard")
    if _get(section, "enabled"):
        found.event_files["tensorboard"] = _steps(_get(section, "log_steps")) or 1
        directory = _get(section, "output_dir") or _get(section, "log_dir")
        if directory:
            found.put("tensorboard", "output_dir", value=str(directory))


def _event_files(found: HostSettings) -> None:
    """One set of files for all who ask for some, as often as the one that wants it oftenest."""
    there = importlib.util.find_spec("tensorboard") is not None
    for source in found.event_files:
        if there:
            sink: dict[str, Any] = {"every": math.gcd(*found.event_files.values())}
            found.put(
                source,
                "sinks",
                "tensorboard",
                value=sink | ({"exclude": found.hidden} if found.hidden else {}),
            )
        else:
            found.problems.append(
                f"{source}: no event files without the package tensorboard (trainmon[tensorboard])"
            )


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


def _log_steps(trainer: Any) -> int | None:
    every = _steps(_get(_section(trainer, "logging"), "log_steps"))
    return _steps(read(trainer, "config", "training", "logging_steps")) if every is None else every


def _logging(trainer: Any, found: HostSettings) -> None:
    every = _log_steps(trainer)
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
