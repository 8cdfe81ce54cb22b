"""The boxes of many ranks side by side: how far each came, who stopped first, who is behind.

Ranks are ordered by what they reached, (step, micro-batch, phase), never by clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmon.sinks.blackbox.phases import PHASES, WAITING
from trainmon.sinks.blackbox.reader import Box, Mark

__all__ = ["RankView", "Verdict", "merge_boxes"]

#: Available memory, or the room left in a control group, below this share when a process vanished: likely that was why.
_SCARCE = 0.05
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank.

    Attributes:
        state: ``running``, ``ended`` (it said how), ``gone`` (no word, and no process), ``unknown`` (another machine's).
        place: where it is, in the order of a step.
        doing: the same in words.
        likely: what probably ended it, if anything speaks for it.
    """

    box: Box
    state: str
    place: Place
    doing: str
    likely: str | None


@dataclass(slots=True)
class Verdict:
    """What the boxes say together.

    Attributes:
        lives: the lives for which there are boxes.
        missing: ranks without a box of this life.
        first: ranks that stopped first, or that the others wait for; empty if all ended well.
        behind: ranks that are behind the furthest one.
        summary: the same in a sentence or two.
    """

    run: str
    life: int
    lives: list[int]
    world: int
    ranks: list[RankView]
    missing: list[int]
    first: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    summary: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``--json`` prints it."""
        return {
            "run": self.run,
            "life": self.life,
            "lives": self.lives,
            "world": self.world,
            "missing_ranks": self.missing,
            "stopped_first": self.first,
            "behind": self.behind,
            "summary": self.summary,
            "ranks": [_rank_dict(view) for view in self.ranks],
        }


def merge_boxes(boxes: Sequence[Box], life: int | None = None) -> Verdict:
    """Takes the boxes of one life of one run together.

    Args:
        life: which; None: the newest.

    Raises:
        ValueError: there are none, none of that life, or they are of several runs.
    """
    if not boxes:
        raise ValueError("no black box found")
    runs = sorted({box.run for box in boxes})
    if len(runs) > 1:
        raise ValueError(
            f"boxes of {len(runs)} runs ({', '.join(runs[:5])}): name the directory of one of them"
        )
    lives = sorted({box.life for box in boxes})
    chosen = lives[-1] if life is None else life
    if chosen not in lives:
        raise ValueError(f"no box of life {chosen}; there are boxes of {', '.join(map(str, lives))}")
    latest: dict[int, Box] = {}
    for box in boxes:
        if box.life == chosen:
            known = latest.get(box.rank)
            if known is None or float(box.facts["started"]) > float(known.facts["started"]):
                latest[box.rank] = box
    views = [_view(latest[rank]) for rank in sorted(latest)]
    world = max(int(view.box.facts.get("world", 1)) for view in views)
    missing = [rank for rank in range(world) if rank not in latest]
    verdict = Verdict(runs[0], chosen, lives, world, views, missing)
    _judge(verdict)
    return verdict


def _view(box: Box) -> RankView:
    state = box.state()
    return RankView(box, state, _place(box), _doing(box.last_mark), _likely(box) if state == "gone" else None)


def _place(box: Box) -> Place:
    """(step, micro-batch, phase); what belongs to no micro-batch lies before or behind all of them."""
    if not box.marks:
        return int(box.facts.get("resumed_step", 0)), -1, -1
    last = box.marks[-1]
    order = PHASES[last.code].order if last.code in PHASES else -1
    if order >= 100:
        return last.step, 1 << 30, order
    if order >= 3:
        return last.step, last.micro, order
    # Data and the begin of a step: for the micro-batch after the last one of this step.
    done = [mark.micro for mark in box.marks if mark.step == last.step and mark.phase == "micro_end"]
    return last.step, max(done, default=-1) + 1, order


def _doing(mark: Mark | None) -> str:
    if mark is None:
        return "nothing yet"
    phase = PHASES.get(mark.code)
    text = mark.phase if phase is None else phase.text.format(mark.micro)
    return f"step {mark.step}: {text}"


def _likely(box: Box) -> str | None:
    look = box.last_look
    if look is None:
        return None
    if look.limit and look.used is not None and look.used > (1 - _SCARCE) * look.limit:
        return "out of memory: its control group was at its limit"
    if (
        look.available is not None
        and look.resident
        and look.available < _SCARCE * (look.available + look.resident)
    ):
        return "out of memory: the machine had hardly any left"
    return None


def _judge(verdict: Verdict) -> None:
    views = verdict.ranks
    furthest = max(view.place for view in views)
    verdict.behind = [view.box.rank for view in views if view.place < furthest]
    well = [
        view for view in views if view.state == "ended" and (view.box.end or {}).get("status") == "completed"
    ]
    rest = [view for view in views if view not in well]
    parts = []
    if not rest:
        parts.append(f"all {len(views)} ranks completed" if len(views) > 1 else "the run completed")
    else:
        least = min(view.place for view in rest)
        last = [view for view in rest if view.place == least]
        # Of ranks at one place, those that left no word went before those that could still say something.
        wordless = [view for view in last if view.state == "gone"]
        first = wordless or last
        verdict.first = [view.box.rank for view in first]
        parts.append(_first_said(first, rest, len(views)))
        waiting = [
            view
            for view in rest
            if view not in first and view.box.marks and view.box.marks[-1].code in WAITING
        ]
        if waiting:
            parts.append(f"{_ranks(waiting)} {_verb(waiting, 'waits', 'wait')} for the others' values")
        likely = sorted({view.likely for view in rest if view.likely is not None})
        parts += [f"likely {text}" for text in likely]
    if verdict.missing:
        shown = ", ".join(map(str, verdict.missing[:8])) + (", ..." if len(verdict.missing) > 8 else "")
        parts.append(f"no box of rank {shown}")
    verdict.summary = "; ".join(parts)


def _first_said(first: list[RankView], rest: list[RankView], ranks: int) -> str:
    where = first[0].doing
    if all(view.state == "running" for view in rest):
        if ranks == 1:
            return f"running: {where}"
        if len(first) == ranks:
            return f"running, all at the same place ({where})"
        return f"running; {_ranks(first)} {_verb(first, 'is', 'are')} behind ({where})"
    words = " or ".join(sorted({_ending(view) for view in first}))
    if ranks == 1:
        return f"stopped at {where} ({words})"
    if len(first) == ranks:
        return f"all ranks stopped at the same place, {where} ({words})"
    return f"{_ranks(first)} stopped first, at {where} ({words})"


def _ending(view: RankView) -> str:
    """How a rank ended, as far as it is known."""
    if view.state == "running":
        return "still running"
    if view.state == "ended":
        end = view.box.end or {}
        reason = f": {end['reason']}" if end.get("reason") else ""
        return f"ended as {end.get('status')}{reason}"
    return view.box.fault or "left no word"


def _ranks(views: list[RankView]) -> str:
    numbers = [view.box.rank for view in views]
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _verb(views: list[RankView], one: str, many: str) -> str:
    return one if len(views) == 1 else many


def _rank_dict(view: RankView) -> dict[str, Any]:
    box = view.box
    mark, frame, look = box.last_mark, box.last_frame, box.last_look
    return {
        "rank": box.rank,
        "path": str(box.path),
        "host": box.facts.get("host"),
        "pid": box.facts.get("pid"),
        "state": view.state,
        "end": box.end,
        "fault": box.fault,
        "likely": view.likely,
        "last_complete_step": box.last_complete_step,
        "doing": view.doing,
        "last_mark": None
        if mark is None
        else {"step": mark.step, "phase": mark.phase, "micro": mark.micro, "time": mark.time},
        "values": None if frame is None else {"step": frame.step, "time": frame.time, "values": frame.values},
        "host_state": None
        if look is None
        else {name: getattr(look, name) for name in look.__slots__ if name != "number"},
        "messages": [
            {"level": said.level, "step": said.step, "time": said.time, "text": said.text}
            for said in box.messages[-5:]
        ],
        "torn": box.torn,
    }
