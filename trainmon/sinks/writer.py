"""The writer thread: takes finished frames from the training thread and shows them to every sink.

The training thread only appends to a bounded queue; it never waits for a disk or a terminal (unless
``on_full`` is ``block``) and never sees an exception of a sink. A slow sink loses the oldest frames, with a
counter. No lock is shared between the two sides, so that ``say`` and ``close`` may be called from a signal
handler at any point, and a forked child can't inherit one that is held.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainmon.frame import Snapshot
from trainmon.sinks.base import Message, RunInfo, Sink, at_least, literal

__all__ = ["Writer"]

#: Failures in a row after which a sink is switched off.
PATIENCE = 3
#: Messages that may wait; later ones are refused with a counter, because the first ones name the cause.
MESSAGES = 4096
#: Bytes of tables that may wait; the newest step may be larger by itself.
WAITING = 32 << 20
#: What a full disk, a quota or a file size limit answers: it may pass, so the sink stays on.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_logger = logging.getLogger("trainmon")


@dataclass(slots=True)
class _Slot:
    """A sink and what became of it."""

    sink: Sink
    opened: bool = False
    off: bool = False
    full: bool = False
    in_a_row: int = 0
    failed: int = 0
    lost: int = 0


class Writer:
    """Drives sinks from one daemon thread.

    Args:
        sinks: shown everything, in this order.
        run: what they may know of the run.
        capacity: snapshots that may wait.
        on_full: ``drop`` discards the oldest waiting snapshots, also those whose tables are more than 32 MiB in all;
            ``block`` makes :meth:`put` wait for room.
        tell: takes what is to be said about the sinks; None: they show it themselves.

    Raises:
        ValueError: ``capacity`` is below 1, or ``on_full`` is neither of the two.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        run: RunInfo,
        capacity: int = 256,
        on_full: Literal["drop", "block"] = "drop",
        tell: Callable[[Message], None] | None = None,
    ) -> None:
        at_least("capacity", capacity, 1)
        if str(on_full) not in ("drop", "block"):
            raise ValueError(f"on_full must be 'drop' or 'block', not {on_full!r}")
        self._run = run
        self._tell = tell
        self._slots = [_Slot(sink) for sink in sinks]
        self._capacity = capacity
        self._room = threading.Semaphore(capacity) if on_full == "block" else None
        self._order = itertools.count()
        self._snapshots: deque[tuple[int, Snapshot]] = deque()
        self._others: deque[tuple[int, Message | threading.Event]] = deque()
        self._head: tuple[int, Snapshot] | None = None
        # Bytes of tables that came in, and that went out: each is counted by one of the two threads.
        self._came = self._went = 0
        # One token an item wakes the thread; SimpleQueue.put may be interrupted by a signal handler that
        # puts too.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._step = run.resumed_step
        self._closing = False
        self._finished = False
        self._overflow_said = False
        self._early: list[tuple[_Slot | None, Message]] | None = []
        self.dropped = 0
        self.refused = 0
        self.unwritten = 0
        self._thread = threading.Thread(target=self._work, name="trainmon-writer", daemon=True)
        atexit.register(self._at_exit)
        try:
            self._thread.start()
        except RuntimeError as error:
            # No thread can be had (the interpreter is going down, or the process limit is reached): close()
            # works the queue off in the caller's thread, and the bound holds until then.
            _logger.warning("the writer thread could not be started: %s", error)
            self._room = None

    # -- the training thread's side
    # ---------------------------------------------------------------------------------

    def put(self, snapshot: Snapshot) -> None:
        """Hands over one finished frame: microseconds with ``drop``; a no-op in a forked child."""
        if self._closing or os.getpid() != self._process:
            return
        if self._room is not None:
            while not self._room.acquire(timeout=0.5):
                if self._gone():
                    self.dropped += 1
                    return
        else:
            self._make_room(snapshot.waiting_bytes)
        self._came += snapshot.waiting_bytes
        self._step = snapshot.step
        self._snapshots.append((next(self._order), snapshot))
        self._tokens.put(None)

    def _make_room(self, size: int) -> None:
        while self._snapshots and (
            len(self._snapshots) >= self._capacity or self._came - self._went + size > WAITING
        ):
            try:
                _, oldest = self._snapshots.popleft()
            except IndexError:
                return  # the thread took the last one in between
            self._came -= oldest.waiting_bytes
            self.dropped += 1

    def say(self, message: Message) -> None:
        """Hands over one message; never dropped in favour of a snapshot. A no-op in a forked child."""
        if self._closing or os.getpid() != self._process:
            return
        if len(self._others) >= MESSAGES:
            self.refused += 1
            return
        self._others.append((next(self._order), message))
        self._tokens.put(None)

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until what was handed over is written; False if ``timeout`` seconds were not enough."""
        if self._closing or os.getpid() != self._process:
            return self._finished
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return False
        done = threading.Event()
        self._others.append((next(self._order), done))
        self._tokens.put(None)
        return done.wait(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Writes what waits, reports losses, closes the sinks; may be called again, from anywhere.

        Args:
            timeout: seconds after which a sink that hangs is given up; the rest of the queue is lost then.

        Returns:
            Whether everything was written.
        """
        if os.getpid() != self._process:
            return False
        first = not self._closing
        self._closing = True
        if first:
            self._tokens.put(None)
            atexit.unregister(self._at_exit)
        if self._finished or threading.current_thread() is self._thread:
            return self._finished
        if self._thread.is_alive():
            self._thread.join(timeout)
        elif first:
            self._drain()
        finished = self._is_finished()
        if not finished and first:
            self.unwritten = len(self._snapshots) + (self._head is not None)
            text = (
                f"{self._names()} did not finish within {timeout:g} s; {self.unwritten} steps and {len(self._others)} "
                "messages were not written"
            )
            _logger.warning("%s", text)
            if self._tell is not None:
                self._tell(Message("warning", "sink_hangs", text, self._step, time.time()))
        return finished

    def losses(self) -> dict[str, Any]:
        """What was not written, by kind and sink; only what there is."""
        found: dict[str, Any] = {
            "steps_dropped": self.dropped,
            "messages_refused": self.refused,
            "steps_unwritten": self.unwritten,
            "lost_to_full_disk": dict(self.lost),
            "failed_calls": dict(self.failed),
            "switched_off": list(self.switched_off),
        }
        return {key: value for key, value in found.items() if value}

    def _names(self) -> str:
        return ", ".join(slot.sink.name for slot in self._slots if not slot.off) or "a sink"

    @property
    def failed(self) -> Mapping[str, int]:
        """Number of failed calls by sink name."""
        return {slot.sink.name: slot.failed for slot in self._slots if slot.failed}

    @property
    def lost(self) -> Mapping[str, int]:
        """Number of records lost to a full disk by sink name."""
        return {slot.sink.name: slot.lost for slot in self._slots if slot.lost}

    @property
    def switched_off(self) -> tuple[str, ...]:
        """Names of the sinks that were switched off."""
        return tuple(slot.sink.name for slot in self._slots if slot.off)

    # Both change in another thread, which a type checker that reads the attribute twice does not expect.
    def _gone(self) -> bool:
        return self._closing or not self._thread.is_alive()

    def _is_finished(self) -> bool:
        return self._finished

    def _at_exit(self) -> None:
        self.close()

    # -- the writer thread's side
    # -----------------------------------------------------------------------------------

    def _work(self) -> None:
        self._open_all()
        while not self._closing:
            self._tokens.get()
            self._take()
        self._drain()

    def _open_all(self) -> None:
        for slot in self._slots:
            self._open(slot)
        # A sink that failed is said through the ones that opened after it, too.
        early, self._early = self._early, None
        for about, message in early or ():
            self._deliver(about, message)

    def _drain(self) -> None:
        """Everything that waits, the report of losses, and the end of all sinks."""
        if self._finished:
            return
        if self._early is not None:
            self._open_all()
        while self._take():
            pass
        for slot in self._slots:
            if slot.opened:
                self._call(slot, slot.sink.flush, record=False)
        self._report()
        for slot in self._slots:
            if slot.opened:
                self._call(slot, slot.sink.close, record=False)
        self._finished = True

    def _take(self) -> bool:
        """Handles the oldest waiting item; False if there was none."""
        if self._head is None:
            with contextlib.suppress(IndexError):
                self._head = self._snapshots.popleft()
                self._went += self._head[1].waiting_bytes
        if self._others and (self._head is None or self._others[0][0] < self._head[0]):
            self._handle(self._others.popleft()[1])
            return True
        if self._head is None:
            return False
        (_, snapshot), self._head = self._head, None
        try:
            for slot in self._slots:
                if self._open(slot):
                    self._call(slot, lambda slot=slot: slot.sink.write(snapshot))  # type: ignore[misc]
        finally:
            if self._room is not None:
                self._room.release()
        if self.dropped and not self._overflow_said:
            self._overflow_said = True
            self._announce(
                None, "sinks_slow", "the sinks can't keep up: the oldest waiting steps are dropped"
            )
        return True

    def _handle(self, item: Message | threading.Event) -> None:
        if isinstance(item, threading.Event):
            for slot in self._slots:
                if slot.opened:
                    self._call(slot, slot.sink.flush, record=False)
            item.set()
            return
        for slot in self._slots:
            if self._open(slot):
                self._call(slot, lambda slot=slot: slot.sink.message(item))  # type: ignore[misc]

    def _open(self, slot: _Slot) -> bool:
        """Whether the sink can be written to, opening it if it is not open yet (again, after a full disk)."""
        if slot.off or slot.opened:
            return not slot.off
        slot.opened = self._call(slot, lambda: slot.sink.open(self._run), opening=True)
        return slot.opened

    def _call(
        self, slot: _Slot, action: Callable[[], None], *, record: bool = True, opening: bool = False
    ) -> bool:
        """Runs one call of a sink; whatever it raises ends here."""
        if slot.off:
            return False
        name = slot.sink.name
        try:
            action()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                slot.lost += getattr(error, "records", int(record))
                if not slot.full:
                    slot.full = True
                    where = f" ({error.filename})" if error.filename else ""
                    text = (
                        f"{name}: no room on disk{where}: {error.strerror}; records are lost until there is"
                    )
                    self._announce(slot, "disk_full", text)
                return False
            slot.failed += 1
            slot.in_a_row += 1
            cause = f"{type(error).__name__}: {error}"
            _logger.debug("sink %s failed", name, exc_info=True)
            if opening or slot.in_a_row >= PATIENCE:
                slot.off = True
                reason = "could not be opened" if opening else f"failed {slot.in_a_row} times in a row"
                self._announce(slot, "sink_off", f"{name} {reason} and is switched off: {cause}")
                self._abandon(slot)
            return False
        slot.in_a_row = 0
        if slot.full and record:
            slot.full = False
            self._announce(
                slot, "disk_room", f"{name}: there is room on disk again; {slot.lost} records were lost"
            )
        return True

    def _abandon(self, slot: _Slot) -> None:
        """Lets a sink that is switched off release what it holds; its further failure is no news."""
        try:
            slot.sink.close()
        except Exception:
            _logger.debug("closing %s failed too", slot.sink.name, exc_info=True)

    def _announce(self, about: _Slot | None, kind: str, text: str, **data: object) -> None:
        """Says something about the sinks through all the others, and through logging."""
        message = Message("warning", kind, literal(text), self._step, time.time(), data)
        if self._early is not None:
            self._early.append((about, message))
        else:
            self._deliver(about, message)

    def _deliver(self, about: _Slot | None, message: Message) -> None:
        if self._tell is not None:
            self._tell(message)
            return
        shown = False
        for slot in self._slots:
            if slot is about or slot.off or not slot.opened:
                continue
            try:
                slot.sink.message(message)
                shown = True
            except Exception as error:
                # Counted, but not announced in turn: two failing sinks must not talk about each other for
                # ever.
                if isinstance(error, OSError) and error.errno in _FULL:
                    slot.lost += 1
                else:
                    slot.failed += 1
                _logger.debug("%s could not show a message", slot.sink.name, exc_info=True)
        # Without handlers logging writes to the terminal, where the log sink has just said the same.
        if not shown or _logger.hasHandlers():
            _logger.warning("%s", message.text)

    def _report(self) -> None:
        """One message about everything that was lost, if anything was."""
        parts = []
        if self.dropped:
            parts.append(f"{self.dropped} steps dropped because sinks were slow")
        if self.refused:
            parts.append(f"{self.refused} messages refused because too many waited")
        parts += [f"{name}: {count} records lost to a full disk" for name, count in self.lost.items()]
        parts += [f"{name}: {count} calls failed" for name, count in self.failed.items()]
        if parts:
            self._announce(
                None,
                "sink_losses",
                "output is incomplete: " + "; ".join(parts),
                dropped=self.dropped,
                refused=self.refused,
                lost=dict(self.lost),
                failed=dict(self.failed),
                switched_off=list(self.switched_off),
            )
