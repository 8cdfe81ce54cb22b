"""Long campaigns: a test that has a long form takes its size from here and carries the marker `soak`.

`make soak` runs the marked tests with TRAINMON_SOAK=1, in their long form; every other run takes the short one.
"""

from __future__ import annotations

import os

LONG = os.environ.get("TRAINMON_SOAK", "0") not in ("", "0")


def size(short: int, long: int) -> int:
    """How much to do in this run."""
    return long if LONG else short
