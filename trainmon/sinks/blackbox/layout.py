"""The file of a black box: what stands where. Writer and reader share it; the file describes itself besides.

::

    magic, length and CRC-32 of the description, the description (JSON)      HEADER bytes
    length and CRC-32 of the end, the end (JSON), once the run has ended     END bytes
    the names of the values, one record after the other                     NAMES bytes
    the rings: events, frames, host, messages

A ring has ``count`` slots of ``size`` bytes; record number s (from 1) stands in slot (s - 1) % count. Every record
carries its number first and the CRC-32 of what precedes last, so that a record that was being written when the process
died, or that a sick disk spoilt, is known for what it is. Little endian throughout; times are those of
``time.perf_counter_ns()`` in the process, and the description says which wall-clock time one of them was.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "BOX",
    "END",
    "EVENT",
    "FAULTS",
    "FORMAT",
    "FRAME",
    "HEADER",
    "HOST",
    "LENGTH",
    "LEVELS",
    "MAGIC",
    "MESSAGE",
    "NAME",
    "NAMES",
    "WIDTH",
    "Ring",
    "faults_of",
    "rings",
]

BOX, FAULTS = "blackbox.bin", "faults.txt"
MAGIC = b"TMBLACK1"
FORMAT = 1
HEADER, END, NAMES = 8192, 1024, 65536

#: Length and CRC-32 of a JSON text.
LENGTH = struct.Struct("<II")
#: number, phase, unused, step, time, micro-batch or other argument
EVENT = struct.Struct("<IHHqqi")
#: number, number of values, step, time, wall time, total steps; then values (f8), states (u1), names (u2)
FRAME = struct.Struct("<IIqqdq")
#: number, threads, step, time, resident bytes, available bytes, bytes in use and limit of the control group, load
HOST = struct.Struct("<IIqqqqqqd")
#: number, level, length, step, time; then the text
MESSAGE = struct.Struct("<IHHqq")
#: length of a name; then the name
NAME = struct.Struct("<H")
CRC = struct.Struct("<I")

#: Values in a frame.
WIDTH = 512
_VALUE = 8 + 1 + 2
_TEXT = 512
LEVELS = ("info", "warning", "error")


def faults_of(box: Path) -> Path:
    """Where the stacks of a fatal signal stand that ended the process of a box."""
    return box.with_name(box.name.replace("blackbox", "faults", 1)).with_suffix(".txt")


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of records: its first byte, number of slots, bytes a slot."""

    offset: int
    count: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.count * self.size

    def at(self, number: int) -> int:
        """The first byte of record ``number`` (from 1)."""
        return self.offset + (number - 1) % self.count * self.size

    def as_dict(self, fields: str) -> dict[str, Any]:
        return {"offset": self.offset, "count": self.count, "size": self.size, "fields": fields}


def rings(events: int, frames: int, host: int = 128, messages: int = 64) -> dict[str, Ring]:
    """The rings of a box with so many records each."""
    found: dict[str, Ring] = {}
    offset = HEADER + END + NAMES
    sizes = {
        "events": (events, EVENT.size + CRC.size),
        "frames": (frames, FRAME.size + WIDTH * _VALUE + CRC.size),
        "host": (host, HOST.size + CRC.size),
        "messages": (messages, _TEXT),
    }
    for name, (count, size) in sizes.items():
        found[name] = Ring(offset, count, size)
        offset = found[name].end
    return found
