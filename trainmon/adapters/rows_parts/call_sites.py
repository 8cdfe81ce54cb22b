"""Where calls come from."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Collection, Sequence

from trainmon.adapters.rows_parts.kinds import Say

__all__ = ["CallSites", "stack_of_call"]


class CallSites:
    """Which operations are looked at, by the stack of their call.

    Args:
        codelines: only calls whose stack has one of these patterns; all if there are none. A stack is a line a frame:
            ``path[line]   function``.
        say: is told each operation's distinct stacks once the first step that is looked at is over, and nothing is
            chosen; None: nobody is.
        inner: files whose frames are not the user's.
    """

    def __init__(self, codelines: Sequence[str], say: Say | None, inner: Collection[str]) -> None:
        self._patterns = [re.compile(one) for one in codelines]
        self._say, self._inner = say, {__file__, *inner}
        self._stacks: dict[str, dict[str, None]] = {}
        self._told = False

    def arm(self) -> bool:
        """A step begins. Whether there is anything left to look at."""
        if self._say is not None and self._stacks:
            for name, stacks in self._stacks.items():
                self._say(f"{name} is called from\n" + "\n--\n".join(stacks))
            self._stacks.clear()
            self._told = True
        return not self._told

    def choose(self, name: str) -> bool:
        """Whether rows of this call are wanted; notes where it comes from."""
        if self._say is None and not self._patterns:
            return True
        stack = stack_of_call(self._inner)
        if self._patterns and not any(one.search(stack) for one in self._patterns):
            return False
        if self._say is None:
            return True
        self._stacks.setdefault(name, {})[stack] = None
        return False


def stack_of_call(without: Collection[str] = ()) -> str:
    """The caller's frames but for those of some files, as msProbe spells them: ``path[line]   function``, a line a frame,
    outermost first."""
    lines = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in without:
            lines.append(f"{code.co_filename}[{frame.f_lineno}]   {code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines))
