"""Snapshots, messages and sinks for the tests of sinks, and a way to run a script in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.frame import Snapshot, Table
from trainmon.sinks.base import Message, RunInfo

ROOT = Path(__file__).resolve().parents[2]

#: What the scripts of :func:`start` begin with.
PRELUDE = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.sinks.make import message, run_info, snapshot
from trainmon.sinks.jsonl import JsonlSink
from trainmon.sinks.log import LogSink
from trainmon.sinks.writer import Writer
directory = Path(sys.argv[1])
"""


def snapshot(
    step: int, *tables: Table, total: int | None = None, wall_time: float = 1.7e9, **scalars: Any
) -> Snapshot:
    """A snapshot; scalars are given as ``loss__global=1.0``. Without any, the loss is the step."""
    values = {name.replace("__", "/"): value for name, value in scalars.items()}
    return Snapshot(step, wall_time, float(step), values or {"loss/global": float(step)}, tables, total)


def table(values: dict[str, float | None], series: str = "grad/norm/<p>", probe: str = "gradients") -> Table:
    """A table; None is null."""
    numbers = np.array([0.0 if v is None else v for v in values.values()])
    valid = np.array([v is not None for v in values.values()], np.bool_)
    return Table(series, probe, "tensor", tuple(values), numbers, valid)


def message(text: str = "hello", step: int = 1, level: Any = "warning", **data: Any) -> Message:
    return Message(level, "test", text, step, 1.7e9, data)


def run_info(directory: Path | None, **facts: Any) -> RunInfo:
    return RunInfo(directory, facts.pop("name", "demo"), **facts)


class Memory:
    """A sink that keeps what it is shown, waits for ``gate`` at each write, and raises what it is told."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.items: list[int | str] = []
        self.messages: list[Message] = []
        self.calls: list[str] = []
        self.errors: list[BaseException | None] = []
        self.open_error: Exception | None = None
        self.thread: threading.Thread | None = None

    def open(self, run: RunInfo) -> None:
        self.thread = threading.current_thread()
        self.calls.append("open")
        if self.open_error is not None:
            raise self.open_error

    def write(self, shown: Snapshot) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.items.append(shown.step)

    def message(self, shown: Message) -> None:
        self.items.append(shown.kind if shown.kind != "test" else shown.text)
        self.messages.append(shown)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    def kinds(self) -> list[str]:
        return [shown.kind for shown in self.messages if shown.kind != "test"]


def start(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts ``PRELUDE`` and ``script`` in a fresh interpreter; its output goes to pipes by default."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options}
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **options)


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    """Exit status and output; a process that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err
