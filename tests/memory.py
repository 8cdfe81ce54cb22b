"""The peak of a process's memory."""

from __future__ import annotations

import re
from pathlib import Path


def peak() -> int:
    """KiB of resident memory at the most. Unlike ru_maxrss it knows nothing of the process that this one was forked
    from, which a test that measures a child must not: it would see no growth below the parent's peak."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None, "needs Linux"
    return int(found[1])
