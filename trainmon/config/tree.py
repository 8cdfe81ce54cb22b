"""One tree for all doors: values from a YAML or JSON text, or from Python, each with its place and key path."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .errors import ConfigError, Place, Problem

if TYPE_CHECKING:
    from .._config import Node

__all__ = ["Value", "from_node", "from_python", "join", "overlay"]

MAX_DEPTH = 64  # of what comes from Python; a text is bounded by its reader


@dataclasses.dataclass(slots=True)
class Value:
    """A value of the configuration.

    `data` is None, bool, int, float, str, a list of Values, a dict from key to Value, or any other Python object
    (which no key accepts). `text` is a scalar as it stands in a file, None from Python. `keys` says where each key
    of a mapping stands.
    """

    data: object
    path: str = ""
    place: Place = Place()
    text: str | None = None
    keys: Mapping[object, Place] = dataclasses.field(default_factory=dict)

    def found(self) -> str:
        """The value in the words of an error message."""
        data = self.data
        if data is None:
            return "nothing"
        if isinstance(data, bool):
            return "true" if data else "false"
        if isinstance(data, int):
            # Python refuses to print integers of thousands of digits.
            return f"the integer {data}" if data.bit_length() <= 128 else "an integer too large"
        if isinstance(data, float):
            return f"the number {self.text or repr(data)}"
        if isinstance(data, str):
            return f"the text {shorten(data)}"
        if isinstance(data, list):
            return "a list"
        if isinstance(data, dict):
            return "a mapping"
        return f"a Python object of type {type(data).__name__}"

    def child(self, key: object) -> Value:
        """The value of a key of this mapping."""
        assert isinstance(self.data, dict)
        value = self.data[key]
        assert isinstance(value, Value)
        return value


def shorten(text: str, width: int = 60) -> str:
    """The text in quotes, control characters escaped, cut in the middle of nowhere but marked so."""
    return repr(text if len(text) <= width else text[: width - 3] + "...")


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def from_node(node: Node, file: str, path: str = "") -> Value:
    """A Value from what the YAML reader returned."""
    place = Place(file, node.line, node.column)
    data = node.value
    if isinstance(data, dict):
        children = {key: from_node(child, file, join(path, key)) for key, child in data.items()}
        keys: dict[object, Place] = {key: Place(file, *where) for key, where in (node.keys or {}).items()}
        return Value(children, path, place, keys=keys)
    if isinstance(data, tuple):
        items = [from_node(item, file, f"{path}[{i}]") for i, item in enumerate(data)]
        return Value(items, path, place)
    return Value(data, path, place, node.text)


def from_python(data: object, path: str = "", depth: int = 0) -> Value:
    """A Value from plain Python data: what a YAML parser gave to a host, or keyword arguments.

    NumPy scalars become Python numbers, path objects text, and dataclasses of the schema what `to_dict` gives.
    """
    if depth > MAX_DEPTH:
        raise ConfigError([Problem(Place(), path, f"nested deeper than {MAX_DEPTH} levels")])
    if data is None or isinstance(data, bool | str):
        return Value(str(data) if isinstance(data, str) else data, path)
    if isinstance(data, numbers.Integral):
        return Value(int(data), path)
    if isinstance(data, numbers.Real):
        return Value(float(data), path)
    if isinstance(data, os.PathLike):
        return Value(os.fspath(data), path)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        from .fields import plain

        return from_python(plain(data), path, depth + 1)
    if isinstance(data, Mapping):
        return Value({key: from_python(item, join(path, key), depth + 1) for key, item in data.items()}, path)
    if isinstance(data, list | tuple):
        return Value([from_python(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(data)], path)
    return Value(data, path)


def overlay(base: Value, top: Value) -> Value:
    """`top` over `base`: mappings are joined key by key, everything else is replaced.

    `true` over a mapping leaves the mapping: it switches a section on as it is configured. A null replaces, too:
    it asks for the default.
    """
    if not isinstance(base.data, dict):
        return top
    if top.data is True:
        return base
    if not isinstance(top.data, dict):
        return top
    joined = dict(base.data)
    for key, value in top.data.items():
        joined[key] = overlay(base.child(key), value) if key in joined else value
    return Value(joined, top.path, top.place, keys={**base.keys, **top.keys})
