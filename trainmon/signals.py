"""A terminated run leaves whole files: the last frames are written before SIGTERM takes effect."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["TerminationHook"]


class TerminationHook:
    """Runs ``before_exit`` when SIGTERM arrives, then lets the signal do what it would have done.

    Nothing is installed outside the main thread or where the program handles SIGTERM itself: then its own way out
    closes the monitor.
    """

    def __init__(self, before_exit: Callable[[], None]) -> None:
        self._before_exit = before_exit
        self._pid = os.getpid()
        self._installed = False
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handle)
                self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._before_exit()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def remove(self) -> None:
        """Puts the default back, unless somebody else has taken the signal since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False
