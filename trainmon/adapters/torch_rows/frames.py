"""The stack of a call, as msProbe spells it: ``path[line]   function``, a line a frame, outermost first."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType

__all__ = ["stack"]


def stack(without: Collection[str] = ()) -> str:
    """The caller's frames but for those of some files."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in without:
            lines.append(f"{code.co_filename}[{frame.f_lineno}]   {code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines))
