"""From a tree of values to dataclasses, guided by annotations alone. Knows no key of the schema.

Every problem is collected; nothing is raised before all of the tree was looked at.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .errors import ConfigError, Place, Problem
from .fields import built_keys, not_built, yaml_key
from .tree import Value, join, overlay
from .words import describe, homes, members, nearest, unknown_key

__all__ = ["bind"]

T = TypeVar("T")

# A number as any host may hand it over: PyYAML takes 1e-5 and 5e4 for text, since their exponent has no point or sign.
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_INT_LIMIT = 1 << 63


class _Bad:
    """The result of a value that could not be bound: a problem was noted."""


_BAD = _Bad()


def bind(cls: type[T], *layers: Value) -> T:
    """An instance of the dataclass `cls` from mappings, later ones over earlier ones.

    Raises ConfigError with all problems.
    """
    binder = _Binder(cls)
    value = Value({})
    for layer in layers:
        if not isinstance(layer.data, dict):
            raise ConfigError(
                [Problem(layer.place, layer.path, f"expected a mapping, found {layer.found()}")]
            )
        value = overlay(value, binder.canonical(cls, layer))
    result = binder.section(cls, value)
    if binder.problems:
        raise ConfigError(binder.problems)
    assert isinstance(result, cls)
    return result


class _Binder:
    def __init__(self, root: type) -> None:
        self.problems: list[Problem] = []
        self.homes = homes(root)

    def complain(self, value: Value, message: str) -> _Bad:
        self.problems.append(Problem(value.place, value.path, message))
        return _BAD

    def mismatch(self, hint: Any, value: Value, metadata: Mapping[str, Any], advice: str = "") -> _Bad:
        return self.complain(value, f"expected {describe(hint, metadata)}, found {value.found()}{advice}")

    # One spelling: before layers are laid over each other, aliases and short forms become the keys they stand for.

    def canonical(self, cls: type, value: Value) -> Value:
        if getattr(cls, "list_form", False):
            value = self.from_list(cls, value)
        if not isinstance(value.data, dict):
            return value
        hints = get_type_hints(cls)
        fields = {yaml_key(field): field for field in dataclasses.fields(cls)}
        aliases = {
            alias: name for name, field in fields.items() for alias in field.metadata.get("aliases", ())
        }
        data: dict[object, Value] = {}
        keys = dict(value.keys)
        for name, child in value.data.items():
            target = aliases.get(name, name)
            if target != name:
                keys[target] = value.keys.get(name, Place())
                if target in value.data or target in data:
                    self.complain(child, f"means the same as {target!r}, which is given too; keep one")
            if target in fields:
                for member in members(hints[fields[target].name]):
                    if dataclasses.is_dataclass(member) and isinstance(member, type):
                        child = self.canonical(member, child)
            data[target] = child
        return dataclasses.replace(value, data=data, keys=keys)

    def from_list(self, cls: type, value: Value) -> Value:
        """A list of names, of one-key mappings or of mappings with `type`: exactly these are on; `false`: none is."""
        if value.data is True:
            return dataclasses.replace(value, data={})
        entries = [] if value.data is False else value.data
        if not isinstance(entries, list):
            return value
        switches = [yaml_key(field) for field in dataclasses.fields(cls) if field.metadata.get("off")]
        data: dict[object, Value] = {
            name: Value(False, join(value.path, name), value.place) for name in switches
        }
        keys: dict[object, Place] = {}
        for entry in entries:
            named = _named(entry)
            if named is None:
                self.complain(entry, f"expected a name, or a mapping with 'type', found {entry.found()}")
                continue
            name, options = named
            if name in keys:
                self.complain(entry, f"{name!r} stands in the list twice")
            elif name not in switches and name not in not_built(cls):
                meant = nearest(name, switches)
                hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(switches)}"
                self.complain(entry, f"expected a name from the list, found {name!r}; {hint}")
                continue
            keys[name] = entry.place
            data[name] = options
        return dataclasses.replace(value, data=data, keys=keys)

    # Sections.

    def section(self, cls: type, value: Value) -> Any:
        assert isinstance(value.data, dict)
        before = len(self.problems)
        hints = get_type_hints(cls)
        fields = {yaml_key(field): field for field in dataclasses.fields(cls)}
        arguments: dict[str, Any] = {}
        for name, child in value.data.items():
            if name in fields:
                field = fields[name]
                if child.data is not None:  # null asks for the default
                    arguments[field.name] = self.value(hints[field.name], child, field.metadata)
            elif name in not_built(cls):
                if child.data is not None and child.data is not False:
                    self.complain(
                        dataclasses.replace(child, place=value.keys.get(name, child.place)),
                        "not built yet in this version (known, comes later); remove it or set it to false",
                    )
            else:
                self.unknown(cls, name, child, value)
        if len(self.problems) > before:
            return _BAD
        result = cls(**arguments)
        for name, message in getattr(result, "check", tuple)():
            self.complain(_at(value, name), message)
        return result

    def unknown(self, cls: type, name: object, child: Value, parent: Value) -> None:
        at = Value(None, child.path, parent.keys.get(name, child.place))
        if isinstance(name, str):
            self.complain(at, unknown_key(name, cls, self.homes))
        else:
            found = Value(name).found()
            self.complain(
                at, f"expected a key that is text, found {found}; known here: {', '.join(built_keys(cls))}"
            )

    # Values.

    def value(self, hint: Any, value: Value, metadata: Mapping[str, Any]) -> Any:
        choices = members(hint)
        if len(choices) > 1:
            return self.union(hint, choices, value, metadata)
        hint = choices[0]
        origin = get_origin(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.nested(hint, value, metadata)
        if origin is Literal:
            return self.literal(hint, value, metadata)
        if origin is tuple:
            return self.items(hint, value, metadata)
        if origin is Mapping:
            return self.mapping(hint, value, metadata)
        if origin is re.Pattern:
            return self.pattern(hint, value, metadata)
        return {bool: self.boolean, int: self.integer, float: self.number, str: self.string}[hint](
            value, metadata
        )

    def union(self, hint: Any, choices: list[Any], value: Value, metadata: Mapping[str, Any]) -> Any:
        outer, self.problems = self.problems, []
        kept: list[Problem] = []
        for choice in choices:
            self.problems = []
            result = self.value(choice, value, metadata)
            if not self.problems:
                self.problems = outer
                return result
            if isinstance(value.data, list) and get_origin(choice) is tuple:
                kept = self.problems  # the items are wrong, not the choice
        self.problems = outer
        if kept:
            self.problems += kept
            return _BAD
        words = [word for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
        return self.mismatch(hint, value, metadata, _advice(value, words))

    def nested(self, cls: type, value: Value, metadata: Mapping[str, Any]) -> Any:
        if isinstance(value.data, dict):
            return self.section(cls, value)
        if metadata.get("off") and value.data is True:
            return cls()
        if metadata.get("off") and value.data is False:
            return None
        return self.mismatch(cls, value, metadata)

    def literal(self, hint: Any, value: Value, metadata: Mapping[str, Any]) -> Any:
        choices = get_args(hint)
        for choice in choices:
            if type(choice) is type(value.data) and choice == value.data:
                return choice
        return self.mismatch(hint, value, metadata, _advice(value, choices))

    def items(self, hint: Any, value: Value, metadata: Mapping[str, Any]) -> Any:
        entries = value.data
        if metadata.get("single") and not isinstance(entries, list | dict):
            entries = [value]
        if not isinstance(entries, list):
            return self.mismatch(hint, value, metadata)
        if not entries and metadata.get("nonempty"):
            return self.complain(value, "the list is empty; remove the key to select everything")
        return tuple(self.value(get_args(hint)[0], entry, metadata) for entry in entries)

    def mapping(self, hint: Any, value: Value, metadata: Mapping[str, Any]) -> Any:
        """Any names, values of one type: true and false are the numbers 1 and 0, null stands for itself."""
        if not isinstance(value.data, dict):
            return self.mismatch(hint, value, metadata)
        result: dict[str, Any] = {}
        for name, child in value.data.items():
            if not isinstance(name, str):
                self.complain(child, f"expected a key that is text, found {Value(name).found()}")
            elif child.data is None:
                result[name] = None
            elif isinstance(child.data, bool):
                result[name] = float(child.data)
            else:
                result[name] = self.value(get_args(hint)[1], child, {})
        return result

    def pattern(self, hint: Any, value: Value, metadata: Mapping[str, Any]) -> Any:
        if not isinstance(value.data, str):
            return self.mismatch(hint, value, metadata)
        try:
            return re.compile(value.data)
        except (re.error, OverflowError, RecursionError) as error:
            return self.mismatch(hint, value, metadata, f": {error}")

    def boolean(self, value: Value, metadata: Mapping[str, Any]) -> Any:
        if isinstance(value.data, bool):
            return value.data
        quoted = isinstance(value.data, str) and value.data.lower() in (
            "true",
            "false",
            "yes",
            "no",
            "on",
            "off",
        )
        return self.mismatch(bool, value, metadata, "; write it without quotes" if quoted else "")

    def integer(self, value: Value, metadata: Mapping[str, Any]) -> Any:
        data = value.data
        if isinstance(data, bool) or not isinstance(data, int):
            digits = isinstance(data, str) and data.isascii() and data.isdigit()
            return self.mismatch(int, value, metadata, "; write it without quotes" if digits else "")
        if not _within(data, metadata) or not -_INT_LIMIT <= data < _INT_LIMIT:
            return self.mismatch(int, value, metadata)
        return data

    def number(self, value: Value, metadata: Mapping[str, Any]) -> Any:
        data = value.data
        if isinstance(data, str) and _NUMBER.fullmatch(data):
            data = float(data.replace("_", ""))
        if isinstance(data, bool) or not isinstance(data, int | float):
            return self.mismatch(float, value, metadata)
        if isinstance(data, int) and not -_INT_LIMIT <= data < _INT_LIMIT:
            return self.mismatch(float, value, metadata)
        if not math.isfinite(data):
            return self.mismatch(float, value, metadata, "; it must be finite")
        return float(data) if _within(data, metadata) else self.mismatch(float, value, metadata)

    def string(self, value: Value, metadata: Mapping[str, Any]) -> Any:
        data = value.data
        if isinstance(data, int) and not isinstance(data, bool) and -_INT_LIMIT <= data < _INT_LIMIT:
            data = str(data) if value.text is None else value.text
        elif isinstance(data, float) and value.text is not None:
            data = value.text  # `run_name: 1.10` means what was written
        if not isinstance(data, str):
            return self.mismatch(str, value, metadata, "; put text in quotes" if _scalar(data) else "")
        if not data.strip():
            return self.complain(value, "expected text, found an empty one")
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in data):
            return self.complain(value, f"expected text without control characters, found {data!r}")
        return data


def _advice(value: Value, words: Iterable[object]) -> str:
    if not isinstance(value.data, str):
        return ""
    meant = nearest(value.data, [word for word in words if isinstance(word, str)])
    return f"; did you mean {meant!r}?" if meant else ""


def _within(data: float, metadata: Mapping[str, Any]) -> bool:
    low, high = metadata.get("minimum"), metadata.get("maximum")
    return (low is None or data >= low) and (high is None or data <= high)


def _scalar(data: object) -> bool:
    return isinstance(data, bool | int | float)


def _named(entry: Value) -> tuple[str, Value] | None:
    """Name and options of an entry of a list form."""
    if isinstance(entry.data, str):
        return entry.data, Value(True, entry.path, entry.place)
    if not isinstance(entry.data, dict):
        return None
    if "type" in entry.data:
        name = entry.child("type").data
        options = {key: child for key, child in entry.data.items() if key != "type"}
        return (name, dataclasses.replace(entry, data=options)) if isinstance(name, str) else None
    if len(entry.data) == 1:
        name = next(iter(entry.data))
        return (name, entry.child(name)) if isinstance(name, str) else None
    return None


def _at(value: Value, path: str) -> Value:
    """The value at a dotted path below a section, or the nearest one above it that was written."""
    for name in path.split("."):
        if isinstance(value.data, list) and name.isdigit():
            value = value.data[int(name)]
            continue
        if not isinstance(value.data, dict):
            break
        value = (
            value.child(name)
            if name in value.data
            else dataclasses.replace(value, path=join(value.path, name))
        )
    return value
