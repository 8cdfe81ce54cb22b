"""What the trainer's own keys ask for, as configuration below the user's own.

``monitor_config`` is followed while ``monitor_on`` is, with the host's defaults and rules; of its stable ranks a section
that is there in part has the defaults of the parts that aren't. Nothing is ever written into these sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmon.adapters.mindformers.graph.host_config import HostConfig

__all__ = ["FORMATS", "HostSettings", "settings_of"]

#: Keys that say where a metric goes, and what of ours they switch on.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "local_norm_format": ("gradients", "local"),
    "device_local_norm_format": ("gradients", "device"),
    "local_loss_format": (),
    "device_local_loss_format": (),
    "optimizer_state_format": ("moments", "per_parameter"),
    "weight_state_format": ("weights", "norm"),
    "max_attention_logit_format": ("attention", "per_head"),
}
_PLACES = frozenset({"log", "tensorboard"})
_SHOW_MODES = ("all", "full", "statistics")
#: More elements than any model has.
_ALL = 1 << 53


@dataclass(slots=True)
class HostSettings:
    """What was found.

    Attributes:
        config: top-level configuration keys.
        taken: which of the host's keys it comes from.
        problems: ``(key, what is wrong)``, as the host would refuse it.
        formats: by metric (``local_norm``, ``stable_rank``), where the host would show it; only of those that are on.
        step_interval, stable_rank_interval: how often.
        show_mode: of the stable ranks of experts: ``all``, ``full`` or ``statistics``.
        target, invert: which parameters.
        throughput_baseline: samples a second of one device that count as 1; None: not shown.
        print_struct: whether only the parameters' names are asked for.
        dump_path: where the graph leaves files; None: nowhere.
        precision_sync: whether computation is to be deterministic.
        norm_limit: a step with such a norm of the gradients, or a larger one, is left (``check_for_global_norm``).
    """

    config: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    formats: dict[str, frozenset[str]] = field(default_factory=dict)
    step_interval: int = 1
    stable_rank_interval: int = 100
    show_mode: str = "all"
    target: tuple[str, ...] = (".*",)
    invert: bool = False
    throughput_baseline: float | None = None
    print_struct: bool = False
    dump_path: str | None = None
    precision_sync: bool = False
    norm_limit: float | None = None

    def put(self, *path: str, value: Any) -> None:
        """Sets a key, unless it is set."""
        place = self.config
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place.setdefault(path[-1], value)

    def rule(self, name: str, series: list[str], detector: str, **keys: Any) -> None:
        """Adds a rule that ends the run."""
        rule = {"name": name, "series": series, "detector": detector, "action": ["log", "raise"], **keys}
        self.config.setdefault("health", {}).setdefault("rules", []).append(rule)

    def shown(self, name: str) -> bool:
        """Whether a parameter is selected, as the host selects."""
        return any(re.search(pattern, name) for pattern in self.target) != self.invert


def settings_of(host: HostConfig, section: Mapping[str, Any] | None = None) -> HostSettings:
    """The host's settings that trainmon follows.

    Args:
        section: ``monitor_config``, where the host gives it; None: the host's own, if it is on.
    """
    found = HostSettings()
    if section is None:
        own = host.get("monitor_config")
        section = own if isinstance(own, Mapping) and own.get("monitor_on") is True else None
    if section is not None:
        found.taken.append("monitor_config")
        _monitor(found, section)
    _checks(found, host, section or {})
    if host.flag("train_precision_sync"):
        found.taken.append("train_precision_sync")
        found.precision_sync = True
    capacity = host.get("moe_config.capacity_factor")
    if isinstance(capacity, int | float) and not isinstance(capacity, bool) and capacity > 0:
        found.put("moe", "capacity_factor", value=float(capacity))
    return found


def _interval(found: HostSettings, section: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = section.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        found.problems.append((f"{where}.{key}", f"expected a positive integer, found {value!r}"))
        return default
    return value


def _places(found: HostSettings, where: str, value: Any) -> frozenset[str]:
    """Where a metric is shown; a text is one place, never a list of characters."""
    if not value:
        return frozenset()
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list | tuple):
        found.problems.append((where, f"expected log, tensorboard, a list of them or null, found {value!r}"))
        return frozenset()
    unknown = [one for one in named if one not in _PLACES]
    if unknown:
        found.problems.append((where, f"expected log or tensorboard, found {unknown[0]!r}"))
    return frozenset(named) & _PLACES


def _patterns(found: HostSettings, where: str, value: Any) -> tuple[str, ...]:
    if not value:
        return (".*",)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        found.problems.append((where, f"expected a list of regular expressions, found {value!r}"))
        return (".*",)
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            found.problems.append((where, f"{pattern!r} is no regular expression: {error}"))
            return (".*",)
    return tuple(value)


def _flag(found: HostSettings, section: Mapping[str, Any], key: str) -> bool:
    value = section.get(key)
    if value is not None and not isinstance(value, bool):
        found.problems.append((f"monitor_config.{key}", f"expected true or false, found {value!r}"))
    return value is True


def _monitor(found: HostSettings, section: Mapping[str, Any]) -> None:
    name = "monitor_config"
    found.step_interval = every = _interval(found, section, "step_interval", 1, name)
    found.target = _patterns(found, f"{name}.target", section.get("target"))
    found.invert = _flag(found, section, "invert")
    found.print_struct = _flag(found, section, "print_struct")
    path = section.get("dump_path")
    found.dump_path = str(path) if path else None
    for key, place in FORMATS.items():
        places = _places(found, f"{name}.{key}", section.get(key))
        if not places:
            continue
        found.formats[key.removesuffix("_format")] = places
        if place:
            found.put(*place, value=True)
            found.put(place[0], "every", value=every)
    if found.target != (".*",):
        for part in ("gradients", "moments"):
            if part in found.config:
                found.put(part, "target", value=list(found.target))
                found.put(part, "invert", value=found.invert)
    baseline = section.get("throughput_baseline")
    if baseline is not None:
        if isinstance(baseline, bool) or not isinstance(baseline, int | float) or baseline <= 0:
            text = f"expected a positive number or null, found {baseline!r}"
            found.problems.append((f"{name}.throughput_baseline", text))
        else:
            found.throughput_baseline = float(baseline)
    ranks = section.get("stable_rank_config")
    if isinstance(ranks, Mapping):
        _stable_rank(found, ranks)


def _stable_rank(found: HostSettings, section: Mapping[str, Any]) -> None:
    name = "monitor_config.stable_rank_config"
    places = _places(found, f"{name}.format", section.get("format"))
    every = _interval(found, section, "step_interval", 100, name)
    target = _patterns(found, f"{name}.target", section.get("target"))
    _interval(found, section, "power_iteration_num", 5, name)
    mode = section.get("moe_show_mode")
    mode = mode[0] if isinstance(mode, list | tuple) and len(mode) == 1 else mode
    if mode not in (None, *_SHOW_MODES):
        text = f"expected {', '.join(_SHOW_MODES)}, found {mode!r}"
        found.problems.append((f"{name}.moe_show_mode", text))
    if not places:
        return
    found.stable_rank_interval, found.formats["stable_rank"] = every, places
    found.show_mode = mode if mode in _SHOW_MODES else "all"
    # All of them at each of these steps, as the host does.
    for key, value in (("every", every), ("eigenvalue", True), ("elements", _ALL)):
        found.put("spectral", key, value=value)
    if target != (".*",):
        found.put("spectral", "target", value=list(target))


def _checks(found: HostSettings, host: HostConfig, section: Mapping[str, Any]) -> None:
    """What ends a run, as rules."""
    if host.flag("check_for_nan_in_loss_and_grad"):
        key = "check_for_nan_in_loss_and_grad"
        found.taken.append(key)
        series = ["loss/global", "grad/norm", "grad/nonfinite"]
        found.rule(key, series, "nonfinite")
    skips, key = host.flag("use_skip_data_by_global_norm"), "global_norm_spike_threshold"
    checks = section.get("check_for_global_norm") is True
    threshold: Any = section.get(key)
    health = section.get("health_checkpoint")
    if isinstance(health, Mapping) and health.get(key):
        threshold, checks = health[key], True
    if not (checks or skips):
        return
    if checks and skips:
        text = "check_for_global_norm and use_skip_data_by_global_norm exclude each other"
        found.problems.append(("monitor_config.check_for_global_norm", text))
        return
    if threshold is None:
        threshold = host.get(f"monitor_config.{key}", 3.0)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or threshold <= 0:
        found.problems.append((f"monitor_config.{key}", f"expected a positive number, found {threshold!r}"))
        return
    # The graph passes over its optimizer by itself; the run ends after so many in a row.
    several = "global_norm_spike_count_threshold"
    count = _interval(found, section, several, 10, "monitor_config") if skips else 1
    name = "use_skip_data_by_global_norm" if skips else "check_for_global_norm"
    found.taken.append(name)
    if checks:
        found.norm_limit = float(threshold)
        return
    parameters = {"threshold": float(threshold), "count": count}
    found.rule(name, ["grad/norm"], "global_norm_spike", parameters=parameters)
