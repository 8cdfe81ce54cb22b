"""``trainmon blackbox``: what each rank did last, who stopped first, who is behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainmon.sinks.base import literal, plain, short_number, short_time, significant
from trainmon.sinks.blackbox import Box, RankView, Verdict, find_boxes, merge_boxes, read_box

__all__ = ["show_boxes"]

_STATES = {"ended": "", "running": "green", "gone": "bold red", "unknown": "yellow"}
#: Ranks in the overview.
_ROWS = 32
#: Values of the overview.
_VALUES = ("loss/global", "grad/norm")


def show_boxes(places: Sequence[str], *, life: int | None, rank: int | None, as_json: bool) -> int:
    """Prints what the boxes hold; 2 and one sentence on standard error if there are none that can be read."""
    boxes, spoilt = [], []
    try:
        for path in find_boxes(list(places)):
            try:
                boxes.append(read_box(path))
            except ValueError as error:
                spoilt.append(str(error))
        if not boxes:
            raise ValueError("; ".join(spoilt) or f"no black box in {', '.join(places)}")
        verdict = merge_boxes(boxes, life)
        views = [view for view in verdict.ranks if rank is None or view.box.rank == rank]
        if not views:
            raise ValueError(f"no box of rank {rank} of life {verdict.life}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for text in spoilt:
        print(f"left out: {text}", file=sys.stderr)
    if as_json:
        facts = verdict.as_dict()
        facts["ranks"] = [entry for entry in facts["ranks"] if rank is None or entry["rank"] == rank]
        print(json.dumps(plain(facts), indent=2, allow_nan=False))
        return 0
    console = Console()
    _overview(console, verdict, views)
    if rank is not None:
        for view in views:
            _details(console, view.box)
    return 0


def _overview(console: Console, verdict: Verdict, views: Sequence[RankView]) -> None:
    lives = f" of {len(verdict.lives)}" if len(verdict.lives) > 1 else ""
    console.print(Text(f"{literal(verdict.run)}, life {verdict.life}{lives}"))
    console.print(Text(literal(verdict.summary), style="bold"))
    table = Table(header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    table.add_column("last step", justify="right")
    table.add_column("doing", overflow="fold", min_width=14)
    for title in ("loss", "grad norm", "memory", "seen"):
        table.add_column(title, justify="right", no_wrap=title not in ("grad norm", "seen"))
    table.add_column("host", overflow="fold")
    newest = max((view.box.last_mark.time for view in verdict.ranks if view.box.last_mark), default=0.0)
    shown = _choice(verdict, views)
    for view in shown:
        table.add_row(*_row(view, newest))
    console.print(table)
    if len(shown) < len(views):
        console.print(Text(f"{len(views) - len(shown)} more ranks; --rank R shows one of them, --json all"))
    for view in shown:
        for said in view.box.messages[-3:]:
            line = f"rank {view.box.rank}, step {said.step}: {said.level}: {literal(said.text)}"
            console.print(Text(line, style="yellow" if said.level == "warning" else ""))


def _choice(verdict: Verdict, views: Sequence[RankView]) -> list[RankView]:
    """All ranks, or of many those that stopped first, those that are behind, and the lowest of the others."""
    special = {*verdict.first, *verdict.behind}
    ranked = sorted(views, key=lambda view: (view.box.rank not in special, view.box.rank))
    return sorted(ranked[:_ROWS], key=lambda view: view.box.rank)


def _row(view: RankView, newest: float) -> list[str | Text]:
    box = view.box
    mark, frame, look = box.last_mark, box.last_frame, box.last_look
    end = box.end or {}
    state = f"{end.get('status')}" if view.state == "ended" else view.state
    if view.state == "ended" and end.get("reason"):
        state += f": {literal(str(end['reason']))}"
    if view.state in ("gone", "unknown") and box.fault is not None:
        state += f": {literal(box.fault)}"
    values = [_value(frame.values.get(name)) if frame is not None else "-" for name in _VALUES]
    return [
        str(box.rank),
        Text(state, style=_STATES[view.state]),
        _text(box.last_complete_step),
        Text(view.doing),
        *values,
        "-" if look is None or look.resident is None else f"{short_number(look.resident)}B",
        "-" if mark is None else _before(newest - mark.time),
        Text(f"{literal(str(box.facts.get('host')))}:{box.facts.get('pid')}"),
    ]


def _details(console: Console, box: Box) -> None:
    if box.last_frame is not None:
        table = Table(title=f"values of step {box.last_frame.step}", show_header=False, title_justify="left")
        for name, value in box.last_frame.values.items():
            table.add_row(Text(literal(name)), _value(value))
        console.print(table)
    table = Table("time", "step", "phase", "micro", title="last marks", title_justify="left")
    for mark in box.marks[-40:]:
        table.add_row(_clock(mark.time), str(mark.step), mark.phase, str(mark.micro))
    console.print(table)
    titles = ("time", "step", "resident", "available", "group", "limit", "threads", "load")
    table = Table(*titles, title="host", title_justify="left")
    for look in box.host[-20:]:
        memory = (look.resident, look.available, look.used, look.limit)
        shown = ["-" if size is None else f"{short_number(size)}B" for size in memory]
        load = "-" if look.load is None else f"{look.load:.2f}"
        table.add_row(_clock(look.time), str(look.step), *shown, _text(look.threads), load)
    console.print(table)
    for said in box.messages:
        console.print(Text(f"{_clock(said.time)} step {said.step}: {said.level}: {literal(said.text)}"))
    if box.faults:
        for line in box.faults.splitlines():
            console.print(Text(literal(line)))
    if box.torn:
        torn = ", ".join(f"{count} of {ring}" for ring, count in box.torn.items())
        console.print(Text(f"records that were not whole: {torn}"))


def _before(seconds: float) -> str:
    """How long before the newest mark of all."""
    return "last" if seconds < 1e-6 else f"-{short_time(seconds)}"


def _value(value: float | None) -> str:
    return "-" if value is None else significant(value)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f"{seconds % 1:.3f}"[1:]
