"""What users are told: through logging, or collected where wrong values are reasons to refuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["heard", "logger", "warn"]

logger = logging.getLogger("trainmon.msprobe")

_heard: ContextVar[list[str] | None] = ContextVar("_heard", default=None)


def warn(text: str) -> None:
    """Says what the user should know."""
    collected = _heard.get()
    if collected is None:
        logger.warning("[monitor_v2] %s", text)
    else:
        collected.append(text)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Inside nothing is said; what would be is in the list."""
    texts: list[str] = []
    token = _heard.set(texts)
    try:
        yield texts
    finally:
        _heard.reset(token)
