"""The three doors: the mapping of a host's callback entry, the file named by its `config:` key, keyword arguments.

Inline beats the file, keywords beat both. A text is read by the extension; nothing else here loads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from .bind import bind
from .errors import ConfigError, Problem
from .files import read_file
from .health import HealthConfig, LabelConfig, RulesFile
from .schema import TrainMonitorConfig
from .tree import Value, from_python
from .words import nearest

__all__ = [
    "Source",
    "entries_of",
    "files_of",
    "load_config",
    "load_labels",
    "load_rules",
    "none_found",
    "stands_for",
]

_TYPE = "TrainMonitor"
# Keys of an entry under `callbacks:` that are the host's: MindFormers' way to register a class of another package.
_HOST_KEYS = ("auto_register",)

Source = (
    str
    | os.PathLike[str]
    | Mapping[str, Any]
    | TrainMonitorConfig
    | tuple[str | os.PathLike[str], ...]
    | None
)

# Copies of files without our entry, which a host was given, and the files that have it; the latter by the keys left, too.
_originals: dict[str, str] = {}
_by_keys: dict[frozenset[object], str] = {}


def load_config(
    source: Source = None, under: Mapping[str, Any] | None = None, /, **overrides: Any
) -> TrainMonitorConfig:
    """The configuration of a TrainMonitor.

    Args:
        source: the path of a YAML or JSON file, a mapping, a configuration, or None for the defaults. In a file
            or mapping, the entry `type: TrainMonitor` under `callbacks:` is the configuration; else what stands
            under `trainmon:`, beside an entry without keys too; else the whole. It may name another file by
            `config:`, relative to its own. Of a tuple of paths, later files are joined key by key over earlier ones.
        under: what holds where neither says otherwise: a host's own settings.
        **overrides: top-level keys; a mapping is joined key by key with the section of that name.

    Raises:
        ConfigError: with every problem, each with its place and what to do.
    """
    if isinstance(source, TrainMonitorConfig) and not overrides:
        return source
    code = from_python(overrides)
    layers: list[Value] = []
    for inline in _inline(source):
        named = _named_file(inline, Value({}) if layers else code)
        layers += [inline] if named is None else [named, inline]
    if under:
        layers.insert(0, from_python(under))
    return bind(TrainMonitorConfig, *[_without(layer, "config") for layer in (*layers, code)])


def files_of(source: Source, overrides: Mapping[str, Any]) -> list[str]:
    """The files that `load_config` reads for these, as far as they can be read."""
    files: list[str] = []
    paths = source if isinstance(source, tuple) else (source,)
    code = from_python(dict(overrides))
    for path in paths:
        try:
            if isinstance(path, str | os.PathLike):
                files.append(_original(path))
            for inline in _inline(path):
                named = _named_file(inline, code)
                if named is not None and named.place.file:
                    files.append(named.place.file)
        except ConfigError:
            continue
    return files


def stands_for(copy: str, original: str, keys: Iterable[object]) -> None:
    """Whoever is given `copy`, or a mapping with these keys that was read from it, is to read `original`."""
    _originals[os.path.realpath(copy)] = original
    if left := frozenset(keys):
        _by_keys[left] = original


def _original(path: str | os.PathLike[str]) -> str:
    file = os.path.expanduser(os.fspath(path))
    return _originals.get(os.path.realpath(file), file) if _originals else file


def _inline(source: Source) -> list[Value]:
    """What is ours in each source, without what its `config:` names.

    Raises:
        ConfigError: a source can't be read, or of several files the problems of all.
    """
    if source is None:
        return [Value({})]
    if isinstance(source, TrainMonitorConfig):
        return [from_python(source)]
    if isinstance(source, str | os.PathLike):
        return [_locate(read_file(_original(source)))]
    if isinstance(source, Mapping):
        # Of a host's whole configuration only these may be ours; the rest can hold objects of any kind.
        ours = {key: source[key] for key in ("callbacks", "trainmon") if key in source}
        original = _by_keys.get(frozenset(source)) if _by_keys else None
        if original is not None and not ("trainmon" in ours or entries_of(from_python(ours))):
            return _inline(original)
        return [_locate(from_python(ours or source))]
    if not isinstance(source, tuple):
        _stop(Value(None), f"expected a path or a mapping, found {Value(source).found()}")
    found: list[Value] = []
    problems: list[Problem] = []
    for path in source:
        try:
            found += _inline(path)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def load_rules(path: str | os.PathLike[str]) -> HealthConfig:
    """The rules of a file: of a configuration's section `health`, or of a file that has `rules` at its top.

    What rules need beside them (a gate, a webhook) is not asked for in the latter.

    Raises:
        ConfigError: with every problem.
    """
    root = read_file(path)
    if isinstance(root.data, dict) and "rules" in root.data:
        bare = bind(RulesFile, root)
        return HealthConfig(defaults=bare.defaults, rules=bare.rules)
    section = load_config(path).health
    if section is None:
        _stop(root, "the section health is off, so there are no rules")
    return section


def load_labels(path: str | os.PathLike[str]) -> list[tuple[int, int, str]]:
    """Labelled steps: a list of steps, or of mappings with `start`, `stop` and `name`; first, last step, name.

    Raises:
        ConfigError: with every problem.
    """
    root = read_file(path)
    if not isinstance(root.data, list):
        _stop(root, f"expected a list of steps, found {root.found()}")
    entries = [
        replace(item, data={"start": item}) if isinstance(item.data, int) else item for item in root.data
    ]
    labels = [bind(LabelConfig, entry) for entry in entries]
    return [(one.start, one.start if one.stop is None else one.stop, one.name or "") for one in labels]


def _stop(value: Value, message: str) -> NoReturn:
    raise ConfigError([Problem(value.place, value.path, message)])


# ---- which part of a host's file is ours ----


def _locate(root: Value) -> Value:
    """The mapping that configures the monitor; its `type` is checked and gone."""
    if root.data is None:
        _stop(root, "holds no configuration; write {} for all defaults")
    if not isinstance(root.data, dict):
        _stop(root, f"expected a mapping, found {root.found()}")
    entries = entries_of(root)
    section = root.child("trainmon") if "trainmon" in root.data else None
    if len(entries) > 1:
        first = entries[0].place.line
        also = f" (the first is in line {first})" if first else ""
        _stop(entries[1], f"a second entry of type {_TYPE}{also}; keep one")
    if entries and section is not None and _has_keys(entries[0]):
        _stop(section, f"the entry {entries[0].path} configures the monitor, too; keep one of them")
    if section is not None:
        if section.data is None or section.data is True:
            return replace(section, data={})
        if not isinstance(section.data, dict):
            _stop(section, f"expected a mapping, found {section.found()}")
        return section
    if entries:
        return _without(entries[0], "type", *_HOST_KEYS)
    if "callbacks" in root.data:
        _stop(root.child("callbacks"), none_found(root.child("callbacks")))
    if "type" in root.data and root.child("type").data != _TYPE:
        _stop(root.child("type"), f"expected {_TYPE!r}, found {root.child('type').found()}")
    return _without(root, "type")


def entries_of(root: Value) -> list[Value]:
    """The entries of a mapping's `callbacks:` that are ours."""
    assert isinstance(root.data, dict)
    callbacks = root.data.get("callbacks")
    if callbacks is None or not isinstance(callbacks.data, list):
        return []
    return [entry for entry in callbacks.data if _type_of(entry) == _TYPE]


def _has_keys(entry: Value) -> bool:
    """Whether an entry says more than that there is a monitor."""
    return isinstance(entry.data, dict) and not set(entry.data) <= {"type", *_HOST_KEYS}


def _type_of(entry: Value) -> object:
    return entry.child("type").data if isinstance(entry.data, dict) and "type" in entry.data else None


def none_found(callbacks: Value) -> str:
    """What to say where there are `callbacks:` and none of them is ours."""
    if not isinstance(callbacks.data, list):
        return f"expected a list with an entry of type {_TYPE}, found {callbacks.found()}"
    types = [name for name in map(_type_of, callbacks.data) if isinstance(name, str)]
    close = nearest(_TYPE, types)
    hint = f"; did you mean {_TYPE!r} where {close!r} stands?" if close else f"; add `- type: {_TYPE}`"
    return f"no entry of type {_TYPE}{hint}"


def _without(value: Value, *names: str) -> Value:
    assert isinstance(value.data, dict)
    return replace(value, data={key: child for key, child in value.data.items() if key not in names})


# ---- files ----


def _named_file(inline: Value, code: Value) -> Value | None:
    """What the file holds that `config:` names, if one is named; a keyword names before the entry does."""
    assert isinstance(code.data, dict) and isinstance(inline.data, dict)
    name = code.data.get("config") or inline.data.get("config")
    if name is None or name.data is None:
        return None
    if not isinstance(name.data, str) or not name.data:
        _stop(name, f"expected the path of a file, found {name.found()}")
    folder = os.path.dirname(name.place.file) if name.place.file else ""
    named = _locate(read_file(os.path.join(folder, os.path.expanduser(name.data)), name))
    assert isinstance(named.data, dict)
    if named.data.get("config") is not None:
        _stop(
            named.child("config"), "a file that is named by 'config' can't name another; move its keys here"
        )
    return named
