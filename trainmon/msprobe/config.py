"""The configuration of msProbe's Monitor V2: its keys, its defaults, and what it does with values that are wrong.

Wrong values are warned about and replaced, as msProbe does, so that a file that msProbe accepts is accepted here too;
only what msProbe refuses (no JSON object, another framework or format) is refused.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from trainmon.msprobe.naming import read_targets
from trainmon.msprobe.older_keys import SWITCHES, in_new_form
from trainmon.msprobe.saying import logger
from trainmon.msprobe.saying import warn as _warn
from trainmon.msprobe.window import Window

__all__ = [
    "FACTS",
    "MORE_OPS",
    "OPS",
    "Mode",
    "MonitorSettings",
    "Settings",
    "load",
    "logger",
    "read_settings",
    "slug",
]

OPS = ("min", "max", "mean", "norm", "nans")
#: What a tensor is, as msProbe's older monitor has it; of ``extended``, and not of ``cc``.
FACTS = ("zeros", "id", "shape", "dtype")
#: Of ``extended``.
MORE_OPS = ("n", "sum", "sumsq", "absmax", "rms", "n_posinf", "n_neginf", "n_zero", "first_bad")
KINDS = ("module", "weight_grad", "optimizer", "param", "cc")
COMPAT = "msprobe-v2"

_FRAMEWORKS = {"pytorch": "pytorch", "pt": "pytorch", "torch": "pytorch"} | {
    "mindspore": "mindspore",
    "ms": "mindspore",
}
_TIMES = 100_000_000
_RECORD = 1_000_000
_TOP = frozenset(
    {"framework", "output_dir", "format", "async_write", "rank", "start_step", "stop_step", "step_interval"}
    | {"step_count_per_record", "collect_times", "patch_optimizer_step", "monitors", "compat", "extended"}
    | {"start_iteration"}
)
#: Of msProbe's older monitor; read by :mod:`trainmon.msprobe.older_settings`.
OLDER = frozenset(
    {"alert", "print_struct", "stack_info", "dynamic_on", "mg_direction", "ndigits", "squash_name", "targets"}
    | {"all_xy", "forward_only", "backward_only", "recording_l2_features", "l2_targets", "sa_order"}
)
_COMMON = frozenset({"enabled", "ops", "eps"})
_CC = frozenset({"cc_codeline", "cc_log_only", "cc_pre_hook", "module_ranks"})
_OWN: Mapping[str, frozenset[str]] = {
    "module": frozenset({"targets"}),
    "weight_grad": frozenset({"monitor_mbs_grad", "micro_batch_number", "grad_acc_steps"}),
    "optimizer": frozenset({"mv_distribution"}),
    "param": frozenset({"param_distribution"}),
    "cc": _CC | {"cc_distribution"},
}
#: Of ``extended``.
_MORE: Mapping[str, frozenset[str]] = {
    "module": frozenset({"include_eval", "include_recompute"}),
    "weight_grad": frozenset({"targets", "grad_view"}),
    "optimizer": frozenset({"targets"}),
    "param": frozenset({"targets"}),
    "cc": frozenset(),
}
_VIEWS = ("accumulated", "own")
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class Mode(Enum):
    """``V2``: msProbe's bytes; ``DEFAULT``: its rows, exact and none lost; ``EXTENDED``: more rows and columns."""

    V2 = "msprobe-v2"
    DEFAULT = "default"
    EXTENDED = "extended"


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """One entry of ``monitors``.

    Attributes:
        key: as written; names the files.
        kind: one of the five.
        ops: columns in order.
        eps: what is nearer to zero counts for ``zeros``.
        named: exact names of modules, or beginnings of those of parameters, and what of each has rows; None: there are
            none, ``targets`` holds.
        distribution: whether ``optimizer`` and ``param`` have rows.
        targets: parts of names, or what :func:`trainmon.msprobe.targets.selection` takes; empty: all.
        micro_counts: what the configuration says of micro-batches, first the one that goes first.
        each_micro: a row a micro-batch.
        own: gradients as each micro-batch adds them.
        evaluation, repeated: passes of evaluation, and those that checkpointing repeats, have rows.
        codelines, log_only, before, ranks: of ``cc``.
    """

    key: str
    kind: str
    ops: tuple[str, ...]
    distribution: bool = True
    eps: float = 1e-8
    named: Mapping[str, Mapping[str, str]] | None = None
    targets: tuple[str, ...] = ()
    micro_counts: tuple[Any, ...] = ()
    each_micro: bool = False
    own: bool = False
    evaluation: bool = True
    repeated: bool = True
    codelines: tuple[str, ...] = ()
    log_only: bool = False
    before: bool = False
    ranks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a configuration means.

    Attributes:
        ranks: that are watched; None: all.
        patch: whether the optimizer counts steps; None: if there is one.
        asynchronous: files are written by another thread.
        first: the number of the first step.
    """

    mode: Mode
    framework: str
    output_dir: Path
    ranks: frozenset[int] | None
    window: Window
    patch: bool | None
    asynchronous: bool
    first: int
    monitors: tuple[MonitorSettings, ...]


def load(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        RuntimeError: the file can't be read or is no JSON; the cause is chained.
        TypeError: it holds something else than an object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    try:
        with open(config, encoding="utf-8") as stream:
            loaded = json.load(stream)
    except (OSError, ValueError, TypeError) as error:
        raise RuntimeError(f"[monitor_v2] the configuration {config} can't be read: {error}") from error
    if not isinstance(loaded, dict):
        raise TypeError(f"[monitor_v2] the configuration must be a JSON object, not {type(loaded).__name__}")
    return loaded


def read_settings(config: Mapping[str, Any], framework: str | None = None) -> Settings:
    """Reads a configuration; says what is replaced.

    Args:
        framework: beats the key.

    Raises:
        ValueError: an unknown framework, or a format other than csv.
    """
    mode = _mode(config)
    if mode is not Mode.V2:
        config = in_new_form(config)
    name = _framework(framework or config.get("framework", "pytorch"))
    kind = config.get("format", "csv")
    if kind is not None and str(kind).strip().lower() != "csv":
        raise ValueError(f"[monitor_v2] Unsupported format {kind!r}, only 'csv' is currently supported.")
    if mode is not Mode.V2:
        _say_unknown(config, _TOP | OLDER, "", SWITCHES)
    elif unread := [key for key in config if key in OLDER]:
        _warn(f"{', '.join(unread)}: ignored, compat is set")
    start = _integer(config, "start_step", 0, 0)
    interval = _integer(config, "step_interval", 1, 1)
    record = _integer(config, "step_count_per_record", 1, 1, most=_RECORD)
    times = _integer(config, "collect_times", 1, _TIMES)
    stop = _integer(config, "stop_step", start, start + times * interval)
    asynchronous = _flag(config, "async_write", False, mode)
    patch = (
        None if "patch_optimizer_step" not in config else _flag(config, "patch_optimizer_step", True, mode)
    )
    return Settings(
        mode=mode,
        framework=name,
        output_dir=Path(str(config.get("output_dir") or "./")).expanduser(),
        ranks=_ranks(config, mode),
        window=Window(start, stop, interval, record, times),
        patch=patch,
        asynchronous=asynchronous,
        first=0 if mode is Mode.V2 else _integer(config, "start_iteration", 0, 0),
        monitors=tuple(_monitors(config.get("monitors", {}), mode)),
    )


def slug(key: str) -> str:
    """The part of a file's name that a monitor's key becomes."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", key).replace("..", "_").strip("._")
    return name or "monitor"


def _mode(config: Mapping[str, Any]) -> Mode:
    compat = config.get("compat") or os.environ.get("TRAINMON_COMPAT")
    extended = bool(config.get("extended", False))
    if compat and compat != COMPAT:
        _warn(f"compat {compat!r} is not known, only {COMPAT!r} is; ignored")
    elif compat:
        if extended:
            _warn("extended is ignored: compat is set")
        return Mode.V2
    return Mode.EXTENDED if extended else Mode.DEFAULT


def _framework(name: Any) -> str:
    found = _FRAMEWORKS.get(str(name).strip().lower())
    if found is None:
        raise ValueError(f"[monitor_v2] Unsupported framework {name!r}")
    return found


def _integer(config: Mapping[str, Any], key: str, least: int, default: int, most: int | None = None) -> int:
    if key not in config:
        return default
    value = config[key]
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= least and (most is None or value <= most):
            return value
    bound = f"of at least {least}" + ("" if most is None else f" and at most {most}")
    _warn(f"{key} must be an integer {bound}, not {value!r}; replaced by {default}")
    return default


def _ranks(config: Mapping[str, Any], mode: Mode, key: str = "rank") -> frozenset[int] | None:
    value = config.get(key, [])
    if isinstance(value, bool):
        if mode is Mode.EXTENDED:
            _warn(f"{key} must be a number or a list of numbers, not {value!r}; all ranks are watched")
            return None
        if mode is Mode.DEFAULT:
            _warn(f"{key} is {value!r}, which is taken for rank {int(value)}")
        return frozenset({int(value)})
    if isinstance(value, int):
        return frozenset({value})
    if isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        return frozenset(value) or None
    _warn(f"{key} must be a number or a list of numbers, not {value!r}; all ranks are watched")
    return None


def _flag(config: Mapping[str, Any], key: str, default: bool, mode: Mode) -> bool:
    if key not in config:
        return default
    value = config[key]
    if not isinstance(value, str) or mode is Mode.V2:
        return bool(value)
    if mode is Mode.DEFAULT:
        _warn(f"{key} is the text {value!r}, which counts as {str(bool(value)).lower()}")
        return bool(value)
    word = _WORDS.get(value.strip().lower())
    if word is None:
        _warn(f"{key} must be true or false, not {value!r}; replaced by {str(default).lower()}")
    return default if word is None else word


def _monitors(section: Any, mode: Mode) -> Iterable[MonitorSettings]:
    if not isinstance(section, Mapping):
        _warn(f"monitors must be an object, not {type(section).__name__}; nothing is watched")
        return
    for key, own in section.items():
        if not isinstance(own, Mapping):
            if mode is not Mode.V2:
                _warn(f"monitors.{key} must be an object, not {own!r}; left out")
            continue
        if not _flag(own, "enabled", key == "module", mode):
            continue
        kind = key.lower()
        if kind not in KINDS:
            _warn(f"Unsupported monitor {key!r}{_nearest(kind, KINDS)}; left out")
            continue
        if mode is Mode.DEFAULT:
            for name in [name for name in own if name in _MORE[kind]]:
                _warn(f"monitors.{key}.{name} needs extended: true; ignored")
            _say_unknown(own, _COMMON | _OWN[kind], f"monitors.{key}.", _MORE[kind])
        elif mode is Mode.EXTENDED:
            _say_unknown(own, _COMMON | _OWN[kind] | _MORE[kind], f"monitors.{key}.")
        made = _monitor(key, kind, own, mode)
        if mode is not Mode.V2 and kind != "cc":
            made = replace(made, eps=_eps(own, key), named=_named(own, key))
        yield made


def _monitor(key: str, kind: str, own: Mapping[str, Any], mode: Mode) -> MonitorSettings:
    if mode is Mode.V2 or kind == "cc":
        _eps(own, key)  # says what is wrong
    extended = mode is Mode.EXTENDED
    facts = () if kind == "cc" else FACTS
    ops = _ops(own, key, (*OPS, *MORE_OPS, *facts) if extended else OPS)
    targets = _targets(own, key, mode) if kind == "module" or (extended and kind != "cc") else ()
    if kind == "module":
        return MonitorSettings(
            key,
            kind,
            ops,
            targets=targets,
            evaluation=not extended or _flag(own, "include_eval", False, mode),
            repeated=not extended or _flag(own, "include_recompute", False, mode),
        )
    if kind == "weight_grad":
        each = own.get("monitor_mbs_grad", False)
        if not isinstance(each, bool):
            _warn(f"monitors.{key}.monitor_mbs_grad must be true or false, not {each!r}; replaced by false")
            each = False
        counts = own.get("micro_batch_number"), own.get("grad_acc_steps")
        view = own.get("grad_view", _VIEWS[0]) if extended else _VIEWS[0]
        if view not in _VIEWS:
            _warn(
                f"monitors.{key}.grad_view must be one of {list(_VIEWS)}, not {view!r}; replaced by {_VIEWS[0]!r}"
            )
        return MonitorSettings(
            key, kind, ops, targets=targets, micro_counts=counts, each_micro=each, own=view == "own"
        )
    if kind == "optimizer":
        return MonitorSettings(
            key, kind, ops, targets=targets, distribution=_flag(own, "mv_distribution", True, mode)
        )
    if kind == "param":
        return MonitorSettings(
            key, kind, ops, targets=targets, distribution=_flag(own, "param_distribution", True, mode)
        )
    nested = own.get("cc_distribution")
    if isinstance(nested, Mapping):
        own = nested
        if mode is not Mode.V2:
            _say_unknown(own, _CC, f"monitors.{key}.cc_distribution.")
    return MonitorSettings(
        key,
        kind,
        ops,
        codelines=_patterns(_texts(own.get("cc_codeline")), key),
        log_only=_flag(own, "cc_log_only", False, mode),
        before=_flag(own, "cc_pre_hook", False, mode),
        ranks=_ranks(own, mode, "module_ranks"),
    )


def _ops(own: Mapping[str, Any], key: str, supported: tuple[str, ...]) -> tuple[str, ...]:
    wanted = own.get("ops", OPS)
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(wanted, Iterable):
        return OPS
    wanted = list(wanted)
    unknown = [one for one in wanted if one not in supported]
    if unknown:
        _warn(f"monitors.{key}: Unsupported ops {unknown}; supported: {list(supported)}.")
    known = tuple(dict.fromkeys(one for one in wanted if one in supported))
    if not known:
        _warn(f"monitors.{key}: No valid ops provided; fallback to default ops.")
    return known or OPS


def _targets(own: Mapping[str, Any], key: str, mode: Mode) -> tuple[str, ...]:
    wanted = own.get("targets")
    if isinstance(wanted, Mapping) and mode is not Mode.V2:
        return ()
    if mode is Mode.EXTENDED:
        targets = _texts(wanted if wanted else None)
        regexes = [one for one in targets if one.removeprefix("!").startswith("re:")]
        bad = {one for one in regexes if not _patterns((one.removeprefix("!")[3:],), key)}
        return tuple(one for one in targets if one not in bad)
    if isinstance(wanted, str):
        if mode is Mode.DEFAULT:
            _warn(f"monitors.{key}.targets is a text: each of its characters is a target; write a list")
        return tuple(wanted)
    return _texts(wanted)


def _patterns(texts: tuple[str, ...], key: str) -> tuple[str, ...]:
    """Those that are regular expressions; the others are said."""
    found = []
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            _warn(f"monitors.{key}: {text!r} is no regular expression ({error}); left out")
        else:
            found.append(text)
    return tuple(found)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(str(one) for one in value) if isinstance(value, Iterable) else ()


def _named(own: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, str]] | None:
    """Targets that are an object, as msProbe's older monitor has them."""
    wanted = own.get("targets")
    return (
        read_targets(wanted, f"monitors.{key}.targets", _warn) or None
        if isinstance(wanted, Mapping)
        else None
    )


def _eps(own: Mapping[str, Any], key: str) -> float:
    try:
        return float(own.get("eps", 1e-8))
    except (TypeError, ValueError):
        _warn(f"monitors.{key}.eps must be a number, not {own['eps']!r}; replaced by 1e-8")
        return 1e-8


def _say_unknown(
    section: Mapping[str, Any], known: Iterable[str], prefix: str, said: Iterable[str] = ()
) -> None:
    for key in section:
        if key not in known and key not in said:
            _warn(f"{prefix}{key} is no key of msProbe's Monitor V2{_nearest(str(key), known)}; ignored")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
