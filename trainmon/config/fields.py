"""How a dataclass describes a section of the configuration: keys, documentation, bounds, and back to plain data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["built_keys", "key", "known_keys", "not_built", "plain", "section", "yaml_key"]


def key(
    default: object,
    doc: str,
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    single: bool = False,
    nonempty: bool = False,
) -> Any:
    """A key of a section.

    Args:
        default: what holds when the key is absent or null.
        doc: one sentence for docs/config.md.
        name: the key in the file where it can't be the attribute's name (`global` for `global_`).
        aliases: spellings of hosts that mean exactly this key.
        minimum, maximum: bounds of a number, both allowed values.
        single: one value stands for a list of it.
        nonempty: an empty list is an error.
    """
    metadata = {
        "doc": doc,
        "key": name,
        "aliases": tuple(aliases),
        "minimum": minimum,
        "maximum": maximum,
        "single": single,
        "nonempty": nonempty,
        "off": False,
    }
    return dataclasses.field(default=default, metadata=metadata)


def section(default: object, doc: str) -> Any:
    """A nested section that `false` switches off (None) and `true` switches on with its defaults."""
    return dataclasses.field(default=default, metadata={"doc": doc, "off": True})


def yaml_key(field: dataclasses.Field[Any]) -> str:
    """The key of a field as it stands in a file."""
    return field.metadata.get("key") or field.name


def built_keys(cls: type) -> list[str]:
    """The keys of a section, in order."""
    return [yaml_key(field) for field in dataclasses.fields(cls)]


def known_keys(cls: type) -> list[str]:
    """The keys of a section, in order; those that are not built yet behind them."""
    return [*built_keys(cls), *not_built(cls)]


def not_built(cls: type) -> tuple[str, ...]:
    """Keys that the section will have in a later version."""
    return getattr(cls, "not_built", ())


def plain(data: Any) -> Any:
    """A section as plain data with the keys of a file: a section that is off is False, a pattern its text."""
    if isinstance(data, tuple | list):
        return [plain(item) for item in data]
    if isinstance(data, re.Pattern):
        return data.pattern
    if not dataclasses.is_dataclass(data):
        return data
    result: dict[str, Any] = {}
    for field in dataclasses.fields(data):
        value = getattr(data, field.name)
        off = value is None and field.metadata.get("off", False)
        result[yaml_key(field)] = False if off else plain(value)
    return result
