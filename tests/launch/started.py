"""Starts scripts in processes of their own, under `trainmon launch` or plainly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOST = Path(__file__).parent / "host"
LAUNCH = [sys.executable, "-m", "trainmon.launch"]


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONSAFEPATH")
    }
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{HOST}", "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(words: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=120, check=False
    )


def launch(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run([*LAUNCH, *words], folder, **more)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LAUNCH, *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".trainmon-" in path.name)


def soon(true: Callable[[], Any], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
