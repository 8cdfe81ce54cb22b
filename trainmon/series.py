"""The catalogue of every series that trainmon can publish: one packaged table, read once.

A probe registers a series by its catalogue name; unit, phase and scope come from here, so that a number means the
same wherever it is shown. ``<p>``, ``<layer>``, ``<name>`` in a catalogue name stand for the subject: a parameter,
a layer, a label.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

__all__ = ["SeriesSpec", "catalogue", "concrete_name"]


#: Groups whose values every rank has for itself before they are merged.
_RANKS_OWN = frozenset({"loss", "optim", "perf", "time", "memory", "data"})


@dataclass(frozen=True, slots=True)
class SeriesSpec:
    """One line of the catalogue.

    Attributes:
        name: ``group/metric`` or ``group/metric/<subject>``.
        unit: unit of the published value (``nat/token``, ``s``, ``token/s``, ``1`` for a ratio ...).
        parts: the mergeable numbers the value derives from, as ``(name, reduce)`` with reduce one of
            ``sum max min cat``.
        derive: the formula over the parts, as text.
        phase: gradient phase (``unreduced``, ``reduced``, ``clipped``) or ``-``.
        scope: ``global device local stage tensor layer head expert``.
        section: the requirement that the series serves.
    """

    name: str
    unit: str
    parts: tuple[tuple[str, str], ...]
    derive: str
    phase: str
    scope: str
    section: str

    @property
    def compared(self) -> bool:
        """Whether values of single ranks say something beside each other: what a rank measures of itself does, its
        share of a merged norm does not, nor the noise of trainmon's own time."""
        if self.name.startswith("perf/monitor_"):
            return False
        return self.scope == "device" or self.name.split("/", 1)[0] in _RANKS_OWN

    @property
    def subject(self) -> str | None:
        """The kind of subject (``p``, ``layer``, ``group`` ...) or None for a single value."""
        return self.name.rsplit("<", 1)[1].rstrip(">") if self.name.endswith(">") else None


@functools.cache
def catalogue() -> dict[str, SeriesSpec]:
    """All series by name, in the order of the table."""
    text = resources.files("trainmon").joinpath("series.tsv").read_text(encoding="utf-8")
    specs: dict[str, SeriesSpec] = {}
    for line in text.splitlines()[1:]:
        name, unit, parts, derive, phase, scope, section, _cost = line.split("\t")
        pairs = () if parts == "-" else tuple(tuple(part.split(":")) for part in parts.split(","))
        specs[name] = SeriesSpec(name, unit, pairs, derive, phase, scope, section)  # type: ignore[arg-type]
    return specs


def concrete_name(name: str, subject: str) -> str:
    """``grad/norm/<p>`` with subject ``wte.weight`` is ``grad/norm/wte.weight``."""
    return name[: name.rindex("<")] + subject
