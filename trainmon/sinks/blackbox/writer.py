"""The black box's writing side: a memory-mapped file that survives its process, whatever kills it.

The training thread writes: a store of 32 bytes a mark, a copy of the published values a step, a look at the host about
once a second. What is in the mapping belongs to the kernel: a kill -9 or the out-of-memory killer takes the process, not
the pages. The whole file is allocated before it is mapped, so that a full disk can't turn a store into a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import mmap
import os
import re
import socket
import struct
import time
import weakref
from pathlib import Path
from typing import IO, Any
from zlib import crc32

from trainmon.frame import Snapshot
from trainmon.sinks.base import Message, RunInfo
from trainmon.sinks.blackbox.host import HostState, boot_id, process_start
from trainmon.sinks.blackbox.layout import (
    BOX,
    END,
    EVENT,
    FAULTS,
    FORMAT,
    FRAME,
    HEADER,
    HOST,
    LENGTH,
    LEVELS,
    MAGIC,
    MESSAGE,
    NAME,
    NAMES,
    WIDTH,
    Ring,
    faults_of,
    rings,
)
from trainmon.sinks.blackbox.phases import PHASES, code_of

__all__ = ["BOX", "BlackBox"]

#: Boxes of earlier lives that stay.
_KEPT = 8
_ABSENT, _NULL, _KNOWN = 0, 1, 2

_logger = logging.getLogger("trainmon")


def _allocate(file: int, size: int) -> None:
    """Makes room on the disk for all of a file.

    Raises:
        OSError: there is none.
    """
    try:
        os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:
        # Not every system, and not every file system, can promise room; written bytes have it.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        written = 0
        while written < size:
            written += os.pwrite(file, bytes(size - written), written)


#: Boxes of this process; a forked child must not write into its parent's.
_OPEN: weakref.WeakSet[BlackBox] = weakref.WeakSet()


def _forget() -> None:
    for box in _OPEN:
        box._map = None


os.register_at_fork(after_in_child=_forget)


class BlackBox:
    """The box of one rank; made once, then written by the training thread. Nothing but the constructor raises.

    Args:
        directory: where ``blackbox.bin`` is made; the box of an earlier life is renamed to ``blackbox_life<n>.bin``.
        run: what is known of the run.
        frames, events: how many are kept.
        host_every: seconds between two looks at the host.
        faults: let Python's fault handler write the stacks of a fatal signal to ``faults.txt`` beside the box, unless it
            is in use already.

    Attributes:
        path: the file.
        problem: why nothing is written any more; None while all is well.

    Raises:
        OSError: the file can't be made, or the disk has no room for all of it.
    """

    def __init__(
        self,
        directory: Path,
        run: RunInfo,
        *,
        frames: int = 64,
        events: int = 4096,
        host_every: float = 1.0,
        faults: bool = False,
        version: str = "",
    ) -> None:
        self.path = directory / BOX
        self.problem: str | None = None
        self._rings = rings(events, frames)
        self._events, self._frames = self._rings["events"], self._rings["frames"]
        self._size = max(ring.end for ring in self._rings.values())
        self._host_every = int(host_every * 1e9)
        self._pid = os.getpid()
        self._numbers = dict.fromkeys(self._rings, 0)
        self._event = 0
        self._looked = -(1 << 62)
        self._names: dict[str, int] = {}
        self._names_end = HEADER + END
        self._chosen: dict[tuple[str, ...], tuple[list[str], bytes, struct.Struct]] = {}
        self._host: HostState | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._map: mmap.mmap | None = self._make(self._describe(run, version))
        self._host = HostState()
        self._faults: IO[bytes] | None = None
        if faults and not faulthandler.is_enabled():
            self._faults = (directory / FAULTS).open("wb")
            faulthandler.enable(self._faults)
        _OPEN.add(self)

    def _describe(self, run: RunInfo, version: str) -> bytes:
        facts: dict[str, Any] = {
            "format": FORMAT,
            "run": run.name,
            "rank": run.rank,
            "world": run.world,
            "life": run.life,
            "resumed_step": run.resumed_step,
            "total_steps": run.total_steps,
            "trainmon": version,
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": self._pid,
            "process_start": process_start(self._pid),
            "started": time.time(),
            "started_ns": time.perf_counter_ns(),
            "end": {"offset": HEADER, "size": END},
            "names": {"offset": HEADER + END, "size": NAMES, "fields": "<H name crc:I"},
            "rings": {
                "events": self._events.as_dict(f"{EVENT.format} crc:I"),
                "frames": self._frames.as_dict(f"{FRAME.format} values:d* states:B* names:H* crc:I"),
                "host": self._rings["host"].as_dict(f"{HOST.format} crc:I"),
                "messages": self._rings["messages"].as_dict(f"{MESSAGE.format} text crc:I"),
            },
            "phases": {code: phase.name for code, phase in PHASES.items()},
        }
        text = json.dumps(facts, ensure_ascii=True).encode()
        if len(text) > HEADER - len(MAGIC) - LENGTH.size:
            text = json.dumps({**facts, "run": run.name[:200]}, ensure_ascii=True).encode()
        return MAGIC + LENGTH.pack(len(text), crc32(text)) + text

    def _make(self, description: bytes) -> mmap.mmap:
        """The file appears whole, with its description, in place of the one of an earlier life."""
        temporary = self.path.with_name(f".{BOX}.{self._pid}.tmp")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _allocate(file, self._size)
            mapped = mmap.mmap(file, self._size)
            mapped[: len(description)] = description
            self._set_aside()
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(file)
        return mapped

    def _set_aside(self) -> None:
        """Renames the box that is there by the life it says it is of, and forgets all but the newest few."""
        from trainmon.sinks.blackbox.reader import read_description

        if self.path.exists():
            try:
                life = int(read_description(self.path)["life"])
            except (OSError, ValueError, KeyError, TypeError):
                life = 0
            number, aside = 1, self.path.with_name(f"blackbox_life{life}.bin")
            while aside.exists():
                number += 1
                aside = self.path.with_name(f"blackbox_life{life}_{number}.bin")
            os.replace(self.path, aside)
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path.with_name(FAULTS), faults_of(aside))
        earlier = [
            path
            for path in self.path.parent.iterdir()
            if re.fullmatch(r"blackbox_life\d+(_\d+)?\.bin", path.name)
        ]
        for path in sorted(earlier, key=lambda path: path.stat().st_mtime_ns)[:-_KEPT]:
            path.unlink()
            faults_of(path).unlink(missing_ok=True)

    # -- the training thread ----------------------------------------------------------------------------------------

    def see(self, kind: type, event: Any, step: int) -> None:
        """An event of the run."""
        code = code_of.get(kind)
        if code is not None:
            self.mark(code, step, event.micro if 4 <= code <= 6 else 0)

    def mark(self, code: int, step: int, argument: int = 0) -> None:
        """The rank has reached a phase (:data:`PHASES`)."""
        mapped = self._map
        if mapped is None:
            return
        try:
            now = time.perf_counter_ns()
            self._event = number = self._event + 1
            body = EVENT.pack(number & 0xFFFFFFFF, code, 0, step, now, argument)
            ring = self._events
            at = ring.offset + (number - 1) % ring.count * 32
            mapped[at : at + 32] = body + crc32(body).to_bytes(4, "little")
            if now - self._looked >= self._host_every:
                self._look(now, step)
        except Exception as error:
            self._stop(error)

    def frame(self, snapshot: Snapshot) -> None:
        """The published values of a step."""
        if self._map is None:
            return
        try:
            scalars = snapshot.scalars
            key = tuple(scalars)
            chosen = self._chosen.get(key)
            if chosen is None:
                chosen = self._choose(key)
            names, indices, packer = chosen
            values = [scalars[name] for name in names]
            known = [0.0 if value is None else value for value in values]
            states = bytes([_NULL if value is None else _KNOWN for value in values])
            head = FRAME.pack(
                self._next("frames"),
                len(names),
                snapshot.step,
                time.perf_counter_ns(),
                snapshot.wall_time,
                -1 if snapshot.total_steps is None else snapshot.total_steps,
            )
            self._put(self._frames, head + packer.pack(*known) + states + indices)
        except Exception as error:
            self._stop(error)

    def message(self, message: Message) -> None:
        """Something was said."""
        if self._map is None:
            return
        try:
            ring = self._rings["messages"]
            text = f"{message.kind}: {message.text}".encode("utf-8", "backslashreplace")
            text = text[: ring.size - MESSAGE.size - 4]
            head = MESSAGE.pack(
                self._next("messages"),
                LEVELS.index(message.level),
                len(text),
                message.step,
                time.perf_counter_ns(),
            )
            self._put(ring, head + text)
        except Exception as error:
            self._stop(error)

    def end(self, status: str, *, step: int, reason: str | None = None) -> None:
        """The run has ended, and how; idempotent."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        try:
            facts = {
                "status": status,
                "reason": None if reason is None else reason[:100],
                "step": step,
                "time": time.time(),
            }
            text = json.dumps(facts).encode()
            mapped[HEADER : HEADER + LENGTH.size + len(text)] = LENGTH.pack(len(text), crc32(text)) + text
            mapped.close()
            if not self.path.exists():
                self.problem = f"{self.path} was removed while the run went on"
        except Exception as error:
            self._stop(error)
        finally:
            if self._host is not None:
                self._host.close()
            if self._faults is not None:
                faulthandler.disable()
                self._faults.close()
                if not os.path.getsize(self._faults.name):
                    os.unlink(self._faults.name)

    def _choose(self, key: tuple[str, ...]) -> tuple[list[str], bytes, struct.Struct]:
        """Of these names those that have, or get, a place among the box's names; cached."""
        names = [name for name in key if self._index(name) >= 0][:WIDTH]
        indices = b"".join(NAME.pack(self._names[name]) for name in names)
        if len(self._chosen) > 256:
            self._chosen.clear()
        chosen = self._chosen[key] = names, indices, struct.Struct(f"<{len(names)}d")
        return chosen

    def _index(self, name: str) -> int:
        index = self._names.get(name, -1)
        if index < 0:
            text = name.encode("utf-8", "backslashreplace")[:1000]
            body = NAME.pack(len(text)) + text
            record = body + crc32(body).to_bytes(4, "little")
            at = self._names_end
            if at + len(record) <= HEADER + END + NAMES and self._map is not None:
                self._map[at : at + len(record)] = record
                self._names_end += len(record)
                index = self._names[name] = len(self._names)
        return index

    def _look(self, now: int, step: int) -> None:
        self._looked = now
        assert self._host is not None
        threads, resident, available, used, limit, load = self._host.look()
        number = self._next("host")
        body = HOST.pack(number, threads & 0xFFFFFFFF, step, now, resident, available, used, limit, load)
        self._put(self._rings["host"], body)

    def _next(self, ring: str) -> int:
        self._numbers[ring] = number = (self._numbers[ring] + 1) & 0xFFFFFFFF
        return number

    def _put(self, ring: Ring, body: bytes) -> None:
        """Copies a record and its CRC into its slot."""
        mapped = self._map
        if mapped is not None:
            at = ring.at(int.from_bytes(body[:4], "little"))
            mapped[at : at + len(body) + 4] = body + crc32(body).to_bytes(4, "little")

    def _stop(self, error: Exception) -> None:
        """Gives up; a box must not cost the training anything."""
        self._map = None
        if self.problem is None:
            self.problem = f"{type(error).__name__}: {error}"
            _logger.warning("the black box %s stops: %s (training goes on)", self.path, self.problem)
