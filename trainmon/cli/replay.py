"""``trainmon replay``: what rules would have said of a run that is over."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainmon.config import ConfigError, load_labels, load_rules
from trainmon.health.replay import Label, Replayed, every_detector, replay
from trainmon.health.rules import rules_of
from trainmon.sinks.jsonl import read_jsonl

__all__ = ["replay_run"]

#: Steps and labels that a cell of the table names.
_NAMED = 6


def replay_run(
    path: str, rules: str | None, labels: str | None, *, before: int, after: int, as_json: bool
) -> int:
    """Prints a table, or JSON.

    Args:
        path: a ``scalars.jsonl``, or the directory of a run.
        rules: a file of rules; None: every detector of spikes at its defaults, on loss and gradient norm.
        labels: a file of labelled steps.

    Returns:
        2 for input that can't be used, with the reason on standard error; else 0.
    """
    try:
        watch = every_detector() if rules is None else rules_of(load_rules(rules))
        known = [] if labels is None else [Label(*one) for one in load_labels(labels)]
        file = Path(path)
        file = file / "rank_0" / "scalars.jsonl" if file.is_dir() else file
        records = [record for record in read_jsonl(file, latest=True) if "step" in record]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if not records:
        print(f"{file}: holds no steps", file=sys.stderr)
        return 2
    found = replay(records, watch, known, before=before, after=after)
    if as_json:
        print(json.dumps([one.to_dict() for one in found], indent=2))
    else:
        _show(found, records[0]["step"], records[-1]["step"], known)
    return 0


def _show(found: Sequence[Replayed], first: int, last: int, labels: Sequence[Label]) -> None:
    """Every name literally."""
    table = Table(title=f"Steps {first} to {last}", title_justify="left", title_style="bold")
    for name in ("rule", "series"):
        table.add_column(name, overflow="fold")
    for name in ("alarms", "per 1,000"):
        table.add_column(name, justify="right")
    if labels:
        for name in ("caught", "lead", "elsewhere"):
            table.add_column(name, justify="right")
        table.add_column("missed", overflow="fold")
    table.add_column("at steps", overflow="fold")
    for one in found:
        cells = [one.rule, one.series, str(len(one.alarms)), f"{one.per_thousand:.3g}"]
        if labels:
            lead = "-" if one.lead is None else f"{one.lead:+g}"
            cells += [f"{len(one.caught)}/{len(labels)}", lead, str(one.elsewhere), _some(one.missed)]
        cells.append(_some([str(step) for step in one.alarms]))
        table.add_row(*(Text(cell) for cell in cells))
    console = Console()
    console.print(table)
    if not found:
        console.print(Text("No rule watches a series of this run."))


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more
