"""Tells a webhook: one POST of a JSON object a message, from a thread of its own.

Training never waits for it: messages wait in a short queue, posts keep a distance, and what fails is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

__all__ = ["Webhook"]

#: Messages that may wait.
_WAITING = 64
#: Seconds that close() gives what still waits.
_LAST = 5.0


class Webhook:
    """Posts messages to one address.

    Args:
        url: http or https.
        every: seconds between two posts at least; of what comes sooner the first waits, the rest is counted, and the next
            post says how many (``left_out``).
        timeout: seconds that a post may take.

    Attributes:
        sent, failed, left_out: how many messages.
        error: what went wrong last.
    """

    def __init__(self, url: str, *, every: float = 60.0, timeout: float = 10.0) -> None:
        self._url, self._every, self._timeout = url, every, timeout
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._unsaid = 0
        self._next = -float("inf")
        self.sent = self.failed = self.left_out = 0
        self.error: str | None = None

    def put(self, message: Mapping[str, Any], *, urgent: bool = False) -> None:
        """Hands over a message; microseconds. ``urgent``: it is posted whatever the distance to the last."""
        if os.getpid() != self._process or self._closing.is_set():
            return
        now = time.monotonic()
        if not urgent and now < self._next:
            self._leave_out()
            return
        try:
            self._queue.put_nowait({**message, "left_out": self._unsaid})
        except queue.Full:
            self._leave_out()
            return
        self._unsaid, self._next = 0, now + self._every
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trainmon-webhook", daemon=True)
            self._thread.start()

    def close(self, timeout: float = _LAST) -> None:
        """Posts what waits, for at most so many seconds. Idempotent."""
        if self._closing.is_set() or os.getpid() != self._process:
            return
        self._closing.set()
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the thread looks at _closing, too
                self._queue.put_nowait(None)
            self._thread.join(timeout)

    def _leave_out(self) -> None:
        self.left_out += 1
        self._unsaid += 1

    def _work(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            message = self._queue.get()
            if message is not None:
                self._post(message)

    def _post(self, message: Mapping[str, Any]) -> None:
        try:
            body = json.dumps(message, default=str).encode()
            request = urllib.request.Request(
                self._url, body, {"Content-Type": "application/json", "User-Agent": "trainmon"}
            )
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                answer.read(1024)
            self.sent += 1
        except Exception as error:  # whatever it is, the thread goes on
            self.failed += 1
            self.error = _reason(error)


def _reason(error: Exception) -> str:
    """In words, without the address, which may be a secret."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return f"{type(error).__name__}: {error}"
