"""What the host is doing: memory and threads of this process, load and memory of the machine and of the control group."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path

__all__ = ["HostState", "boot_id", "process_start"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNKNOWN = -1
_INACTIVE = re.compile(rb"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)


class HostState:
    """Open files of /proc, so that a look is a few reads; unknown values are -1."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        used, limit, cached = _control_group()
        for name, path in (
            ("stat", "/proc/self/stat"),
            ("meminfo", "/proc/meminfo"),
            ("used", used),
            ("limit", limit),
            ("cached", cached),
        ):
            with contextlib.suppress(OSError):
                self._files[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def look(self) -> tuple[int, int, int, int, int, float]:
        """Threads, resident bytes, available bytes, bytes in use and limit of the control group, load of a minute.

        Bytes in use are those that the kernel can't give up: without inactive pages of files.
        """
        threads = resident = available = _UNKNOWN
        # The name in brackets may hold anything.
        fields = self._read("stat").rpartition(b")")[2].split()
        if len(fields) > 21:
            threads, resident = int(fields[17]), int(fields[21]) * _PAGE
        found = self._read("meminfo").partition(b"MemAvailable:")[2].split(None, 1)
        if found:
            available = int(found[0]) * 1024
        try:
            load = os.getloadavg()[0]
        except OSError:
            load = -1.0
        used = self._number("used")
        match = _INACTIVE.search(self._read("cached"))
        if match and used >= 0:
            used = max(0, used - int(match[1]))
        return threads, resident, available, used, self._number("limit"), load

    def _read(self, name: str) -> bytes:
        file = self._files.get(name)
        if file is None:
            return b""
        try:
            return os.pread(file, 4096, 0)
        except OSError:
            return b""

    def _number(self, name: str) -> int:
        text = self._read(name).strip()
        value = int(text) if text.isdigit() else _UNKNOWN  # "max": no limit
        return value if value < 1 << 60 else _UNKNOWN

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _control_group() -> tuple[str, str, str]:
    """Files with the memory in use, its limit and what it is made of, of version 2 or 1; paths that may not exist."""
    two = Path("/sys/fs/cgroup")
    one = two / "memory"
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        for root, mine, used, limit in (
            (two, controllers == "", "memory.current", "memory.max"),
            (one, "memory" in controllers.split(","), "memory.usage_in_bytes", "memory.limit_in_bytes"),
        ):
            # Within a container the path may be the host's: then the root is our own group.
            for group in (root / place.lstrip("/"), root):
                if mine and (group / used).exists():
                    return str(group / used), str(group / limit), str(group / "memory.stat")
    return "", "", ""


def boot_id() -> str:
    """Which boot of which machine this is; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """When a process began, in clock ticks since boot, so that a number given anew is told apart; -1: no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        if platform.system() == "Linux":
            return -1
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return 0
    return -1
