"""docs/config.md, made from the schema: ``python -m trainmon.config.page`` prints it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

from .fields import not_built, plain, yaml_key
from .schema import TrainMonitorConfig
from .words import members

__all__ = ["page"]

_HEAD = """# Configuration

Made from the schema by `python -m trainmon.config.page`. The keys stand under `callbacks: - type: TrainMonitor`, in the
file that its `config:` key names, or are keyword arguments. Inline beats file, code beats both. `false` turns a section
off, `true` turns it on with its defaults. `trainmon check FILE` shows what a file comes to, or all that is wrong with it.
"""


def page() -> str:
    """The Markdown text."""
    return _HEAD + "\n".join(_section(TrainMonitorConfig, "", set()))


def _section(cls: type, path: str, seen: set[str]) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    nested: list[tuple[type, str]] = []
    yield f"\n## {f'`{path}`' if path else 'Top level'}\n\n{(cls.__doc__ or '').strip()}\n"
    yield "| key | default | meaning |\n| --- | --- | --- |"
    for field in dataclasses.fields(cls):
        key = yaml_key(field)
        inner = [kind for kind in members(hints[field.name]) if dataclasses.is_dataclass(kind)]
        default = "on" if inner and field.default is not None else f"`{_text(field.default)}`"
        aliases = "".join(f" Also `{alias}`." for alias in field.metadata.get("aliases", ()))
        yield f"| `{key}` | {default} | {field.metadata['doc']}{aliases} |"
        nested += [(typing.cast(type, kind), f"{path}.{key}".lstrip(".")) for kind in inner]
    if not_built(cls):
        yield "\nNot built yet, and an error unless off: " + ", ".join(f"`{n}`" for n in not_built(cls)) + "."
    for kind, name in nested:
        if kind.__name__ == "Window" and "Window" in seen:
            continue
        seen.add(kind.__name__)
        yield from _section(kind, name, seen)


def _text(value: object) -> str:
    found = plain(value)
    if isinstance(found, list):
        return "[]"
    if found is None or isinstance(found, bool):
        return {None: "null", True: "true", False: "false"}[found]
    return str(found)


if __name__ == "__main__":
    print(page())
