#!/usr/bin/env python3
"""Writes docs/metrics.md from the catalogue of series: name, unit, formula, phase, scope, section, whether it is built.

``metrics_page.py`` writes the page; ``metrics_page.py --check`` only says whether it is up to date (exit status
1 if not).

A series is built when a probe registers it with everything in the configuration switched on; or, where a probe first
has to see a model, when the probe's code registers it by this name.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainmon.backend.host import HostBackend  # noqa: E402  (needs the path above)
from trainmon.config import TrainMonitorConfig, load_config  # noqa: E402
from trainmon.config.fields import yaml_key  # noqa: E402
from trainmon.config.words import members  # noqa: E402
from trainmon.events import TrainBegin  # noqa: E402
from trainmon.frame import Registry  # noqa: E402
from trainmon.health.health import SERIES as HEALTH_SERIES  # noqa: E402
from trainmon.probes.base import ProbeContext  # noqa: E402
from trainmon.series import SeriesSpec, catalogue  # noqa: E402
from trainmon.slots import build_slots  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"

#: Title and section of the configuration by group of series.
_GROUPS = {
    "loss": ("Loss", "loss"),
    "optim": ("Optimizer", "loss, gradients"),
    "grad": ("Gradients", "gradients"),
    "weight": ("Weights", "weights"),
    "moment": ("Optimizer moments", "moments"),
    "update": ("Updates", "updates"),
    "spectral": ("Spectra", "spectral"),
    "activation": ("Activations", "activations"),
    "attention": ("Attention", "attention"),
    "moe": ("Mixture of experts", "moe"),
    "perf": ("Throughput", "throughput"),
    "time": ("Times", "timing"),
    "memory": ("Memory", "memory"),
    "comm": ("Collectives", "collectives"),
    "data": ("Data", "throughput"),
    "ckpt": ("Checkpoints", "checkpoint"),
    "health": ("Health", "health"),
}
#: The engine's own series are published whatever is configured.
_ALWAYS = "always"

_INTRODUCTION = """\
# Metrics

<!-- Written by scripts/metrics_page.py from trainmon/series.tsv and the code: change those, not this page. -->

Every series that trainmon publishes, or will. `<...>` in a name stands for the subject: a parameter (`p`), a layer, a
group. *From* are the numbers that merge over micro-batches and ranks, and how; the formula is applied once, after the
merging, so a mean of ratios never stands for a ratio of sums. [formulas.md](formulas.md) has the exact definitions, edge
cases and sources. The unit `1` is a ratio, `tensor` the unit of the tensor's elements.

Phase: of gradients, `unreduced` before the reduction over ranks, `reduced` after it and before clipping, `clipped` as the
optimizer sees them. Scope: what one value speaks of. Section: the key of the configuration that publishes the series
([config.md](config.md)). Series that are not built yet are listed, so that names don't change when they come.

Prometheus spells `loss/global` as `trainmon_loss_global`; TensorBoard and the bridge follow `tag_style`
([outputs.md](outputs.md)).
"""


@cache
def built() -> dict[str, str]:
    """The section that publishes it, by name of series, for all that are built."""
    found = dict.fromkeys(HEALTH_SERIES, "health")
    found |= dict.fromkeys(_registered(ROOT / "trainmon" / "own.py"), _ALWAYS)
    for path in sorted((ROOT / "trainmon" / "probes").glob("*.py")):
        found |= {name: _GROUPS[name.split("/", 1)[0]][1] for name in _registered(path)}
    for slot in build_slots(load_config(_everything(TrainMonitorConfig))):
        slot.probe.begin(ProbeContext(TrainBegin(), HostBackend(), _ignore, _ignore, lambda: 0))
        registry = Registry()
        slot.probe.register(registry)
        found |= dict.fromkeys(registry.series, slot.probe.name)
    # Not a section of its own: shown when one of these is.
    return {name: "loss, gradients" if section == "optim" else section for name, section in found.items()}


def _ignore(*_arguments: object, **_facts: object) -> None:
    """Probes have nothing to say here."""


def _everything(section: type) -> dict[str, Any]:
    """A configuration with every section and every switch on, and a number wherever null would mean off."""
    hints, values = get_type_hints(section), {}
    for field in dataclasses.fields(section):
        for kind in members(hints[field.name]):
            if dataclasses.is_dataclass(kind) and field.metadata.get("off") and field.name != "health":
                values[yaml_key(field)] = _everything(kind)
            elif kind in (int, float) and field.default is None and field.name != "every":
                values[yaml_key(field)] = 1
            elif kind is bool and field.name != "invert":
                values[yaml_key(field)] = True
    return values


def _registered(path: Path) -> list[str]:
    """The names in calls of ``registry.add`` in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and first.value in catalogue():
                found.append(str(first.value))
    return found


def _section(spec: SeriesSpec) -> str:
    return built().get(spec.name) or _GROUPS[spec.name.split("/", 1)[0]][1]


def page() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    names = catalogue()
    count = sum(name in built() for name in names)
    lines.append(f"Built: {count} of {len(names)}.\n")
    for group, (title, _) in _GROUPS.items():
        specs = [spec for spec in names.values() if spec.name.split("/", 1)[0] == group]
        lines += [
            f"## {title}\n",
            "| series | unit | formula | from | phase | scope | section | built |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for spec in specs:
            parts = ", ".join(f"{name} ({reduce})" for name, reduce in spec.parts) or "-"
            cells = (
                f"`{spec.name}`",
                spec.unit,
                f"`{spec.derive}`",
                parts,
                spec.phase,
                spec.scope,
                _section(spec),
                "yes" if spec.name in built() else "no",
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != page():
            print(f"{PAGE.relative_to(ROOT)} is out of date; run {Path(__file__).name}", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
