"""Runs Python code in a fresh interpreter, for what a process can do only once: import, fork, grow, crash.

SANITIZED: whether the extension here was built with the address sanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainmon.ops import build_info, cpu_info

SANITIZED = "address sanitizer" in build_info()["switches"]
ROOT = Path(__file__).resolve().parents[2]


def run(
    code: str, *options: str, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The finished child; the test's own environment plus `environment`, the repository on its path."""
    variables = {**os.environ, **environment}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
        check=False,
    )


def output(code: str, *options: str, timeout: float = 120, **environment: str) -> str:
    """What the child printed; it must end well."""
    done = run(code, *options, timeout=timeout, **environment)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def digests(code: str) -> dict[str, str]:
    """What `code` prints in each tier of this machine: its last line is print(cpu_info()["tier"], digest)."""
    printed = [output(code, TRAINMON_CPU=tier).split() for tier in cpu_info()["available"]]
    assert [tier for tier, _ in printed] == cpu_info()["available"]
    return dict(printed)
