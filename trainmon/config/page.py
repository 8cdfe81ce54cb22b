"""docs/config.md, made from the schema: ``python -m trainmon.config.page`` prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from .fields import not_built, plain, yaml_key
from .schema import TrainMonitorConfig
from .words import describe, members

__all__ = ["page"]

_HEAD = """\
# Configuration

Made from the schema by `python -m trainmon.config.page`. Everything has a default; the shortest configuration is

```yaml
callbacks:
  - type: TrainMonitor
```

`trainmon check FILE` shows what a file comes to, or all that is wrong with it.

**Doors.** `load_config(source, **overrides)` takes the path of a YAML or JSON file, a mapping, or nothing. In a file
or mapping the entry `type: TrainMonitor` under `callbacks:` is the configuration, else what stands under `trainmon:`,
else the whole. The entry may name another file: `config: monitor.yaml`, relative to the file that says so. Keys beside
`config:` beat that file, keyword arguments beat both; mappings are joined key by key.

**Changes under way.** Rank 0 looks at the files once a step. A change is checked, told to all ranks with the next
report, and taken by all at the same step; sections that it doesn't touch keep their state. A wrong one is said, with its
place, and the old one goes on. `output_dir`, `run_name`, `ranks`, `sinks` and `tag_style` hold until the next start.

**Values.** Scalars are those of YAML 1.1 as PyYAML reads them, dates stay text. Where a number with a fraction is
expected, `1e-5` is one, also as text; where an integer is expected, text is an error. A key that expects text takes an
integer as it is written. `null` asks for the default. `false` switches a section off, `true` on. Anchors, aliases and
merge keys (`<<`) are understood; a key that is written twice in one mapping is an error. A file has at most 1 MiB, 64
levels and 100,000 values, aliases expanded.

**Errors** come all at once, each with file, line, column and key. A key that is known but not built yet is an error,
too, unless it is `false` or `null`.

**Inheritance.** `every`, `window`, `target`, `exclude` and `invert` of a section default to those at the top level. A
section fires at the first step and at multiples of `every`, inside its window.
"""


def page() -> str:
    """The Markdown text."""
    return _HEAD + "\n".join(_section(TrainMonitorConfig, ""))


def _section(cls: type, path: str) -> Iterator[str]:
    hints = get_type_hints(cls)
    yield f"\n## {f'`{path}`' if path else 'Top level'}\n\n{(cls.__doc__ or '').strip()}\n"
    yield "| key | expects | default | meaning |\n| --- | --- | --- | --- |"
    nested: dict[type, str] = {}
    for field in dataclasses.fields(cls):
        name = yaml_key(field)
        hint = hints[field.name]
        aliases = "".join(f" Also `{alias}`." for alias in field.metadata.get("aliases", ()))
        expects = describe(hint, field.metadata)
        yield f"| `{name}` | {expects} | {_default(field)} | {field.metadata['doc']}{aliases} |"
        for kind in [item for member in members(hint) for item in (member, *get_args(member)[:1])]:
            # A section's window has the keys of the top-level one.
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and not (path and name == "window"):
                nested.setdefault(kind, f"{path}.{name}".lstrip("."))
    if not_built(cls):
        yield "\nNot built yet, and an error unless off: " + ", ".join(f"`{n}`" for n in not_built(cls)) + "."
    for kind, below in nested.items():
        yield from _section(kind, below)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.metadata.get("off"):
        return "off" if field.default is None else "on"
    value = plain(field.default)
    if isinstance(value, dict):
        return "see below"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{value}`"


if __name__ == "__main__":
    print(page())
