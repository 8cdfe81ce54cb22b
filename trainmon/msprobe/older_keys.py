"""A configuration of msProbe's older monitor, whose switches stand at the top, in the form of Monitor V2."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainmon.msprobe.saying import warn

__all__ = ["SWITCHES", "in_new_form"]

#: What each switch is in V2.
_MONITORS = {
    "xy_distribution": "module",
    "wg_distribution": "weight_grad",
    "mv_distribution": "optimizer",
    "param_distribution": "param",
}
_CC = ("cc_codeline", "cc_pre_hook", "cc_log_only")
#: Keys that only the older monitor has at the top.
SWITCHES = frozenset({*_MONITORS, "cc_distribution", "ops", "eps", "monitor_mbs_grad", "module_ranks"})


def in_new_form(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same in V2's keys, if there are no ``monitors`` and any switch is on; else as it is.

    Raises:
        TypeError: an unknown key in ``cc_distribution``, as msProbe has it.
    """
    found = sorted(SWITCHES & config.keys())
    if "monitors" in config:
        if found:
            warn(f"{', '.join(found)}: keys of the older monitor, ignored beside monitors")
        return config
    monitors = {_MONITORS[key]: _own(config) for key in found if key in _MONITORS and config[key] is True}
    collectives = config.get("cc_distribution")
    if isinstance(collectives, Mapping):
        unknown = sorted(collectives.keys() - {"enable", *_CC})
        if unknown:
            raise TypeError(f"[monitor_v2] cc_distribution has no keys {', '.join(unknown)}")
        if collectives.get("enable"):
            monitors["cc"] = _own(config) | {key: collectives[key] for key in _CC if key in collectives}
    if not monitors:
        if found:
            warn(f"{', '.join(found)}: none of the older monitor's switches is on, nothing is watched")
        return config
    if "weight_grad" in monitors and "monitor_mbs_grad" in config:
        monitors["weight_grad"]["monitor_mbs_grad"] = config["monitor_mbs_grad"]
    new = {key: value for key, value in config.items() if key not in SWITCHES}
    new.setdefault("output_dir", os.environ.get("MONITOR_OUTPUT_DIR", "./monitor_output"))
    if config.get("module_ranks"):
        new.setdefault("rank", [int(rank) for rank in config["module_ranks"]])
    return {**new, "monitors": monitors}


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    own = {"enabled": True, "ops": config.get("ops") or ["norm"]}
    return own if "eps" not in config else {**own, "eps": config["eps"]}
