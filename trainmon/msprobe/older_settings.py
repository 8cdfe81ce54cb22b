"""Keys of msProbe's older monitor that this drop-in takes beside those of Monitor V2; not with `compat: "msprobe-v2"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainmon.msprobe.alerts import AlertSettings, read_alerts
from trainmon.msprobe.naming import Target, read_targets
from trainmon.msprobe.saying import warn

__all__ = ["HOOKS", "FeatureSettings", "OlderSettings", "read_older"]

#: Kinds of features, each a table.
HOOKS = ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
_ORDERS = ("s,b,h,d", "b,s,h,d")
_FLAGS = ("stack_info", "mg_direction", "squash_name", "all_xy", "forward_only", "backward_only")


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    """``recording_l2_features`` with what belongs to it.

    Attributes:
        targets: module names by kind; of ``attention_hook`` none is none, of the others all that fit.
        sequence_first: whether q and k are [sequence, batch, heads, depth], or else [batch, sequence, heads, depth].
    """

    targets: Mapping[str, tuple[str, ...]]
    sequence_first: bool = True


@dataclass(frozen=True, slots=True)
class OlderSettings:
    """What the keys say.

    Attributes:
        alert: rules; None: there are none.
        structure: the structure of the model is written after the first step, and ``exit`` ends the training then.
        stacks: where each module is called from is written in the first step that is.
        directions: the share of gradient elements that go the way of the momentum is written.
        digits: decimals that are kept; None: every digit.
        squash: names begin with what tells layers apart.
        targets: by exact name of the module, or beginning of the parameter's, what of it has rows; None: everything, as
            the monitors say.
        everything: modules are watched whatever targets say.
        passes: which rows of modules there are.
        features: None: none are written.
    """

    alert: AlertSettings | None = None
    structure: Literal["no", "yes", "exit"] = "no"
    stacks: bool = False
    directions: bool = False
    digits: int | None = None
    squash: bool = False
    targets: Mapping[str, Target] | None = None
    everything: bool = False
    passes: frozenset[str] = field(default=frozenset({"forward", "backward"}))
    features: FeatureSettings | None = None


def read_older(config: Mapping[str, Any]) -> OlderSettings:
    """Reads the keys; what is wrong is warned about and left out.

    Raises:
        TypeError: a wrong ``alert``, as msProbe has it.
    """
    flags = {key: _flag(config, key) for key in _FLAGS}
    passes = {"forward", "backward"}
    if flags["forward_only"] and flags["backward_only"]:
        warn("forward_only and backward_only leave no rows of modules")
    passes -= {"backward"} if flags["forward_only"] else set()
    passes -= {"forward"} if flags["backward_only"] else set()
    return OlderSettings(
        alert=read_alerts(config),
        structure=_structure(config),
        stacks=flags["stack_info"],
        directions=flags["mg_direction"],
        digits=_digits(config),
        squash=flags["squash_name"],
        targets=_targets(config),
        everything=flags["all_xy"],
        passes=frozenset(passes),
        features=_features(config),
    )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if isinstance(value, bool):
        return value
    warn(f"{key} must be true or false, not {value!r}; replaced by false")
    return False


def _structure(config: Mapping[str, Any]) -> Literal["no", "yes", "exit"]:
    value = config.get("print_struct", False)
    if value == "exit":
        return "exit"
    if not isinstance(value, bool):
        warn(f'print_struct must be true, false or "exit", not {value!r}; replaced by false')
        return "no"
    return "yes" if value else "no"


def _digits(config: Mapping[str, Any]) -> int | None:
    value = config.get("ndigits")
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 20:
        return value
    warn(f"ndigits must be an integer from 1 to 20, not {value!r}; every digit is written")
    return None


def _targets(config: Mapping[str, Any]) -> dict[str, Target] | None:
    value = config.get("targets")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        warn(f"targets must be an object of names, not {value!r}; everything is watched")
        return None
    return read_targets(value, "targets", warn) or None


def _features(config: Mapping[str, Any]) -> FeatureSettings | None:
    if not _flag(config, "recording_l2_features"):
        return None
    given, order = config.get("l2_targets") or {}, config.get("sa_order", _ORDERS[0])
    if not isinstance(given, Mapping):
        warn(f"l2_targets must be an object of lists, not {given!r}; replaced by none")
        given = {}
    targets: dict[str, tuple[str, ...]] = {}
    for hook, names in given.items():
        if hook not in HOOKS:
            warn(f"l2_targets.{hook} is none of {', '.join(HOOKS)}; left out")
        elif not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            warn(f"l2_targets.{hook} must be a list of names, not {names!r}; left out")
        else:
            targets[hook] = tuple(names)
    if order not in _ORDERS:
        warn(
            f"sa_order must be one of {', '.join(map(repr, _ORDERS))}, not {order!r}; replaced by {_ORDERS[0]!r}"
        )
        order = _ORDERS[0]
    return FeatureSettings(targets, order == _ORDERS[0])
