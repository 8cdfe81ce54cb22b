"""Ends of a training of which the host tells nobody: an exception leaves its loop, and no hook is called."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["leave_the_last", "when_the_program_ends"]


class Watched(Protocol):
    """What is asked of a watched training."""

    over: bool

    def exception(self, error: BaseException) -> None: ...

    def abandon(self) -> None: ...


_last: list[weakref.ref[Watched]] = []


def leave_the_last(session: Watched) -> None:
    """Another training begins: one that was left by an exception has ended before."""
    for kept in _last:
        earlier = kept()
        if earlier is not None:
            earlier.abandon()
    _last[:] = [weakref.ref(session)]


def when_the_program_ends(session: Watched) -> Callable[[], None]:
    """The interpreter knows the exception, if that ends the program; returns what is registered with ``atexit``."""
    kept = weakref.ref(session)

    def close() -> None:
        found = kept()
        if found is not None and not found.over:
            error = getattr(sys, "last_value", None)
            if isinstance(error, BaseException):
                found.exception(error)

    atexit.register(close)
    return close
