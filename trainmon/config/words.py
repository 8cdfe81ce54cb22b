"""The words of error messages: what a key expects, and which key may have been meant."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .fields import built_keys, known_keys, not_built, yaml_key

__all__ = ["describe", "homes", "members", "nearest", "unknown_key"]


def members(hint: Any) -> list[Any]:
    """The types of a union without None; a list of one for any other type."""
    if get_origin(hint) in (Union, UnionType):
        return [member for member in get_args(hint) if member is not NoneType]
    return [hint]


def describe(hint: Any, metadata: Mapping[str, Any]) -> str:
    """What a key of this type expects, as it stands after "expected"."""
    *firsts, last = [part for member in members(hint) for part in _alternatives(member, metadata)]
    return f"{', '.join(firsts)} or {last}" if firsts else last


def _alternatives(hint: Any, metadata: Mapping[str, Any]) -> list[str]:
    origin = get_origin(hint)
    if origin is Literal:
        return [repr(choice) for choice in get_args(hint)]
    if origin is tuple:
        items = _alternatives(get_args(hint)[0], metadata)
        if get_origin(get_args(hint)[0]) is Literal:
            return [*items, "a list of these"]
        several = [re.sub(r"^(?:an? )?(.*?)(?= of |$)", r"a list of \1s", item) for item in items]
        return items + several if metadata.get("single") else several
    if origin is re.Pattern:
        return ["a regular expression"]
    if origin is Mapping:
        return ["a mapping of names to numbers"]
    if hint is bool:
        return ["true", "false"]
    if hint is str:
        return ["text"]
    if dataclasses.is_dataclass(hint):
        if getattr(hint, "list_form", False):
            return ["a mapping", "a list of names"]
        return ["a mapping", "true", "false"] if metadata.get("off") else ["a mapping"]
    return [_number("an integer" if hint is int else "a number", metadata)]


def _number(noun: str, metadata: Mapping[str, Any]) -> str:
    low, high = metadata.get("minimum"), metadata.get("maximum")
    if low is not None and high is not None:
        return f"{noun} from {low} to {high}"
    if low is not None:
        return f"{noun} of at least {low}"
    return noun if high is None else f"{noun} of at most {high}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, or None."""
    import difflib

    candidates = {name.lower(): name for name in known}
    normal = word.lower().replace("-", "_")
    if normal in candidates:
        return candidates[normal]
    matches = difflib.get_close_matches(normal, candidates, 1)
    return candidates[matches[0]] if matches else None


def homes(cls: type) -> dict[str, list[str]]:
    """For every key below a section, the paths of the sections that have it; the section itself is ''."""
    found: dict[str, list[str]] = {}
    _collect(cls, "", found)
    return found


def _collect(cls: type, path: str, found: dict[str, list[str]]) -> None:
    hints = get_type_hints(cls)
    for name in not_built(cls):
        found.setdefault(name, []).append(path)
    for field in dataclasses.fields(cls):
        name = yaml_key(field)
        found.setdefault(name, []).append(path)
        for member in members(hints[field.name]):
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                _collect(member, f"{path}.{name}" if path else name, found)


def unknown_key(name: str, cls: type, where: Mapping[str, list[str]]) -> str:
    """The message for a key that the section doesn't have."""
    known = known_keys(cls)
    if name not in known and name in where:
        places = [f"under {path}" if path else "at the top level" for path in where[name][:3]]
        return f"unknown key here; it belongs {' or '.join(places)}"
    meant = nearest(name, [*where, *known])
    if meant in known:
        return f"unknown key; did you mean {meant!r}?"
    if meant is not None:
        path = where[meant][0]
        return f"unknown key; did you mean {meant!r} {f'under {path}' if path else 'at the top level'}?"
    return f"unknown key; known here: {', '.join(built_keys(cls))}"
