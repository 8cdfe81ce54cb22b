"""Whether code is being compiled, in a form that MindSpore's compiler understands.

A hook that begins with ``if is_compiling():  # @jit.cond: True`` and returns is compiled as far as that; the comment is
a directive. Without it a hook's Python is an error of the user's ``@jit``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from mindspore.ops.primitive import constexpr

__all__ = ["compiled", "forget", "is_compiling", "key_of"]

_numbers = count()
_told: dict[int, Callable[[], None]] = {}


def key_of(tell: Callable[[], None]) -> int:
    """For :func:`compiled`: ``tell`` is called once a compiler comes there."""
    key = next(_numbers)
    _told[key] = tell
    return key


def forget(key: int) -> None:
    """Nobody is told any more."""
    _told.pop(key, None)


@constexpr(check=False)  # type: ignore[untyped-decorator]
def compiled(key: Any) -> Any:
    """To be returned where :func:`is_compiling`: runs in Python while the compiler works, and is None."""
    tell = _told.pop(key, None)
    if tell is not None:
        tell()


@constexpr(check=False)  # type: ignore[untyped-decorator]
def _is_none(value: Any) -> Any:
    """A compiler can't hand over a function and gives None."""
    return value is None


def _function() -> int:
    return 0


def is_compiling() -> Any:
    return _is_none(_function)
