"""The black box's reading side: of a live, ended or killed run, with the records that were being written left out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from trainmon.sinks.blackbox.host import boot_id, process_start
from trainmon.sinks.blackbox.layout import (
    CRC,
    EVENT,
    FORMAT,
    FRAME,
    HEADER,
    HOST,
    LENGTH,
    LEVELS,
    MAGIC,
    MESSAGE,
    NAME,
    Ring,
    faults_of,
)
from trainmon.sinks.blackbox.phases import PHASES, STEP_END

__all__ = ["Box", "Frame", "HostLook", "Mark", "Said", "find_boxes", "read_box", "read_description"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A phase that was reached. ``time`` is Unix seconds, by the process's own clocks."""

    number: int
    phase: str
    code: int
    step: int
    micro: int
    time: float


@dataclass(frozen=True, slots=True)
class Frame:
    """The published values of a step; ``None`` is null."""

    number: int
    step: int
    time: float
    total_steps: int | None
    values: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class HostLook:
    """The host at some moment; ``None`` is unknown. Memory in bytes."""

    number: int
    step: int
    time: float
    threads: int | None
    resident: int | None
    available: int | None
    used: int | None
    limit: int | None
    load: float | None


@dataclass(frozen=True, slots=True)
class Said:
    """A message."""

    number: int
    level: str
    step: int
    time: float
    text: str


@dataclass(slots=True)
class Box:
    """What a black box holds, each list in order of time.

    Attributes:
        facts: the file's own description.
        end: how the run ended, as it said; None if it left no word.
        torn: records that were being written when the process died, or are spoilt, by ring.
        faults: what Python's fault handler wrote beside the box; empty if nothing.
    """

    path: Path
    facts: dict[str, Any]
    marks: list[Mark] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    host: list[HostLook] = field(default_factory=list)
    messages: list[Said] = field(default_factory=list)
    end: dict[str, Any] | None = None
    torn: dict[str, int] = field(default_factory=dict)
    faults: str = ""

    @property
    def fault(self) -> str | None:
        """The fatal signal in words ("Segmentation fault"); None if none is known."""
        _, found, rest = self.faults.partition("Fatal Python error: ")
        return rest.split("\n", 1)[0] if found else None

    @property
    def run(self) -> str:
        return str(self.facts["run"])

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    @property
    def life(self) -> int:
        return int(self.facts["life"])

    @property
    def last_complete_step(self) -> int | None:
        """The last step that ended; None if none did, or their marks are gone."""
        return max((mark.step for mark in self.marks if mark.code == STEP_END), default=None)

    @property
    def last_mark(self) -> Mark | None:
        return self.marks[-1] if self.marks else None

    @property
    def last_frame(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    @property
    def last_look(self) -> HostLook | None:
        return self.host[-1] if self.host else None

    def state(self) -> Literal["ended", "running", "gone", "unknown"]:
        """``gone``: left no word and its process is no more; ``unknown``: that can't be seen from this machine."""
        if self.end is not None:
            return "ended"
        facts = self.facts
        if facts.get("host") != socket.gethostname():
            return "unknown"
        if facts.get("boot") != boot_id():
            return "gone"
        start = process_start(int(facts.get("pid", -1)))
        return "running" if start >= 0 and start == facts.get("process_start") else "gone"


def read_description(path: str | Path) -> dict[str, Any]:
    """What the file says of itself.

    Raises:
        OSError: it can't be read.
        ValueError: it is no black box, of another format, or spoilt.
    """
    with open(path, "rb") as file:
        return _description(file.read(HEADER), Path(path))


def _description(content: bytes, path: Path) -> dict[str, Any]:
    text = _json(content[len(MAGIC) :]) if content.startswith(MAGIC) else None
    if not isinstance(text, dict):
        raise ValueError(f"{path} is no black box, or its description is spoilt")
    if text.get("format") != FORMAT:
        raise ValueError(f"{path} has format {text.get('format')!r}; this version of trainmon reads {FORMAT}")
    return text


def read_box(path: str | Path) -> Box:
    """All records of a box that are whole.

    Raises:
        OSError: it can't be read.
        ValueError: it is no black box, of another format, or spoilt so far that nothing can be found in it.
    """
    path = Path(path)
    content = path.read_bytes()
    facts = _description(content, path)
    box = Box(path, facts)
    try:
        places = {name: _ring(place) for name, place in facts["rings"].items()}
        clock = float(facts["started"]) - int(facts["started_ns"]) * 1e-9
        end, names_at, names_size = facts["end"], int(facts["names"]["offset"]), int(facts["names"]["size"])
        box.end = _json(content[end["offset"] : end["offset"] + end["size"]])
        int(facts["rank"]), int(facts["life"])
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise ValueError(f"{path}: its description lacks something: {error}") from error
    with contextlib.suppress(OSError):
        box.faults = faults_of(path).read_text(encoding="utf-8", errors="replace")[: 1 << 20]
    names = _names(content[names_at : names_at + names_size])

    def seconds(nanoseconds: float) -> float:
        return clock + nanoseconds * 1e-9

    if "events" in places:
        for number, code, _, step, ns, micro in _fixed(content, places["events"], EVENT, "events", box):
            phase = PHASES.get(code)
            name = f"phase {code}" if phase is None else phase.name
            box.marks.append(Mark(number, name, code, step, micro, seconds(ns)))
    if "host" in places:
        for number, threads, step, ns, *rest in _fixed(content, places["host"], HOST, "host", box):
            resident, available, used, limit, load = (None if value < 0 else value for value in rest)
            count = None if threads == 0xFFFFFFFF else threads
            look = HostLook(number, step, seconds(ns), count, resident, available, used, limit, load)
            box.host.append(look)
    if "frames" in places:
        box.frames = _frames(content, places["frames"], names, box)
    if "messages" in places:
        box.messages = [
            Said(said.number, said.level, said.step, seconds(said.time), said.text)
            for said in _messages(content, places["messages"], box)
        ]
    box.marks.sort(key=lambda mark: mark.number)
    box.frames.sort(key=lambda frame: frame.number)
    box.host.sort(key=lambda look: look.number)
    box.messages.sort(key=lambda said: said.number)
    return box


def _ring(place: dict[str, Any]) -> Ring:
    ring = Ring(int(place["offset"]), int(place["count"]), int(place["size"]))
    if ring.offset < 0 or ring.size < 8 or not 0 < ring.count < 1 << 24:
        raise ValueError(f"no ring: {place}")
    return ring


def _json(content: bytes) -> Any:
    """The JSON text behind its length and CRC; None if it is not whole."""
    if len(content) < LENGTH.size:
        return None
    length, crc = LENGTH.unpack_from(content)
    text = content[LENGTH.size : LENGTH.size + length]
    if not length or len(text) != length or crc32(text) != crc:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _names(content: bytes) -> list[str]:
    found: list[str] = []
    at = 0
    while at + NAME.size <= len(content):
        (length,) = NAME.unpack_from(content, at)
        end = at + NAME.size + length
        body = content[at:end]
        if not length or content[end : end + CRC.size] != CRC.pack(crc32(body)):
            break
        found.append(body[NAME.size :].decode("utf-8", "replace"))
        at = end + CRC.size
    return found


def _slots(content: bytes, ring: Ring, name: str, box: Box, least: int) -> list[tuple[int, bytes]]:
    """The slots that hold something, each with its record's number; torn ones are for the caller to find."""
    found = []
    for index in range(ring.count):
        start = ring.offset + index * ring.size
        slot = content[start : start + ring.size]
        if len(slot) < least:
            break
        number = int.from_bytes(slot[:4], "little")
        if number and (number - 1) % ring.count == index:
            found.append((number, slot))
        elif any(slot[:least]):
            box.torn[name] = box.torn.get(name, 0) + 1
    return found


def _whole(slot: bytes, size: int) -> bool:
    return len(slot) >= size + CRC.size and slot[size : size + CRC.size] == CRC.pack(crc32(slot[:size]))


def _fixed(content: bytes, ring: Ring, fields: struct.Struct, name: str, box: Box) -> list[tuple[Any, ...]]:
    found = []
    for _, slot in _slots(content, ring, name, box, fields.size + CRC.size):
        if _whole(slot, fields.size):
            found.append(fields.unpack_from(slot))
        else:
            box.torn[name] = box.torn.get(name, 0) + 1
    return found


def _frames(content: bytes, ring: Ring, names: list[str], box: Box) -> list[Frame]:
    found = []
    for number, slot in _slots(content, ring, "frames", box, FRAME.size):
        _, count, step, _, wall, total = FRAME.unpack_from(slot)
        size = FRAME.size + count * 11
        if size > ring.size or not _whole(slot, size):
            box.torn["frames"] = box.torn.get("frames", 0) + 1
            continue
        numbers = struct.unpack_from(f"<{count}d", slot, FRAME.size)
        states = slot[FRAME.size + count * 8 :][:count]
        indices = struct.unpack_from(f"<{count}H", slot, FRAME.size + count * 9)
        values = {
            names[index]: value if state == 2 else None
            for index, value, state in zip(indices, numbers, states, strict=True)
            if index < len(names)
        }
        found.append(Frame(number, step, wall, None if total < 0 else total, values))
    return found


def _messages(content: bytes, ring: Ring, box: Box) -> list[Said]:
    found = []
    for number, slot in _slots(content, ring, "messages", box, MESSAGE.size):
        _, level, length, step, ns = MESSAGE.unpack_from(slot)
        if not _whole(slot, MESSAGE.size + length):
            box.torn["messages"] = box.torn.get("messages", 0) + 1
            continue
        text = slot[MESSAGE.size :][:length].decode("utf-8", "replace")
        found.append(Said(number, LEVELS[level] if level < len(LEVELS) else "info", step, ns, text))
    return found


def find_boxes(places: list[str | os.PathLike[str]]) -> list[Path]:
    """The boxes in these files and directories.

    Raises:
        FileNotFoundError: a place is not there.
    """
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if place.is_dir():
            paths = sorted(path for path in place.rglob("blackbox*.bin") if not path.name.startswith("."))
        elif place.exists():
            paths = [place]
        else:
            raise FileNotFoundError(f"no such file or directory: {place}")
        found.update(dict.fromkeys(path.resolve() for path in paths))
    return list(found)
