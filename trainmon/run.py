"""A run's outputs: its directory, run.json, the sinks that the configuration asks for, and their writer.

Nothing here may stop a training: a directory that can't be written is said once, and the run goes on with the console
alone.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainmon.config import ConfigError, Place, Problem, TrainMonitorConfig
from trainmon.events import TrainBegin
from trainmon.sinks.base import Message, RunInfo, Sink
from trainmon.sinks.csv import CsvSink
from trainmon.sinks.jsonl import JsonlSink
from trainmon.sinks.log import LogSink
from trainmon.sinks.run_file import RunFile
from trainmon.sinks.writer import Writer

__all__ = ["Run"]

_logger = logging.getLogger("trainmon")


class Run:
    """Opens a run's outputs.

    Attributes:
        info: what sinks know of the run.
        writer: takes snapshots and messages.
        writes: whether this rank has outputs at all.

    Raises:
        ConfigError: a sink needs a package that is not installed.
    """

    def __init__(
        self, config: TrainMonitorConfig, begin: TrainBegin, units: Mapping[str, str], host: str
    ) -> None:
        sinks = self._sinks(config)
        rank = begin.layout.rank
        writes = rank == 0 or config.ranks == "all" or (config.ranks is not None and rank in config.ranks)
        self.writes = writes
        name = config.run_name or time.strftime("%Y%m%d-%H%M%S")
        self._file: RunFile | None = None
        problem: OSError | None = None
        directory: Path | None = None
        if writes:
            folder = _folder(name)
            directory, problem = self._directory(
                Path(config.output_dir), folder, fresh=config.run_name is None
            )
        if directory is not None and rank == 0:
            try:
                self._file = RunFile.begin(
                    directory,
                    name=name,
                    resumed_step=begin.resumed_step,
                    config=config.to_dict(),
                    versions=_versions(host),
                    units=units,
                    reproduction=begin.reproduction,
                )
            except OSError as error:
                problem, directory = error, None
        self.info = RunInfo(
            directory=directory,
            name=name,
            rank=rank,
            world=begin.layout.world,
            life=1 if self._file is None else self._file.life,
            resumed_step=begin.resumed_step,
            total_steps=begin.total_steps,
            tag_style=config.tag_style,
            units=units,
        )
        self.writer = Writer(
            sinks if writes else [], self.info, capacity=config.sinks.queue, on_full=config.sinks.on_full
        )
        if problem is not None:
            self.say(
                "error",
                "output_unwritable",
                f"output_dir {config.output_dir!r} can't be written ({problem.strerror or problem}): training goes on, "
                "but this run leaves no files; give a directory that this user may write",
                step=begin.resumed_step,
            )

    @staticmethod
    def _directory(parent: Path, name: str, *, fresh: bool) -> tuple[Path | None, OSError | None]:
        """Makes the run's directory and proves that it can be written; with ``fresh`` never one that exists."""
        directory, number = parent / name, 1
        try:
            while fresh and directory.exists():
                number += 1
                directory = parent / f"{name}-{number}"
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".write_test_{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            return None, error
        return directory, None

    @staticmethod
    def _sinks(config: TrainMonitorConfig) -> list[Sink]:
        options, sinks = config.sinks, list[Sink]()
        if options.log is not None:
            log = options.log
            sinks.append(
                LogSink(every=config.cadence("sinks.log").every, progress=log.progress, file=log.file)
            )
        if options.jsonl is not None:
            sinks.append(JsonlSink(every=config.cadence("sinks.jsonl").every))
        if options.csv is not None:
            csv = options.csv
            sinks.append(
                CsvSink(
                    every=config.cadence("sinks.csv").every,
                    steps_per_file=csv.steps_per_file,
                    rows_per_file=csv.rows_per_file,
                )
            )
        extras: list[tuple[str, Callable[[], Sink]]] = []
        if options.parquet is not None:
            extras.append(("parquet", lambda: _parquet(config)))
        if options.tensorboard is not None:
            extras.append(("tensorboard", lambda: _tensorboard(config)))
        if options.prometheus is not None:
            extras.append(("prometheus", lambda: _prometheus(config)))
        for name, make in extras:
            try:
                sinks.append(make())
            except ImportError as error:
                raise ConfigError([Problem(Place(), f"sinks.{name}", str(error))]) from error
        return sinks

    def say(
        self, level: Any, kind: str, text: str, *, step: int, data: Mapping[str, Any] | None = None
    ) -> None:
        """Hands a message to the sinks; to Python's logging when there is none to show it."""
        self.writer.say(Message(level, kind, text, step, time.time(), data or {}))

    def end(self, status: str, *, last_step: int, reason: str | None, counters: Mapping[str, Any]) -> None:
        """Writes everything that waits, then how the run ended. Bounded in time; may be called again."""
        self.writer.close()
        if self._file is not None:
            try:
                self._file.end(status, last_step=last_step, reason=reason, counters=counters)
            except OSError as error:
                _logger.warning("run.json could not be written at the end of the run: %s", error)


def _parquet(config: TrainMonitorConfig) -> Sink:
    from trainmon.sinks.parquet import ParquetSink

    options = config.sinks.parquet
    assert options is not None
    return ParquetSink(
        every=config.cadence("sinks.parquet").every,
        steps_per_file=options.steps_per_file,
        rows_per_file=options.rows_per_file,
        compression=options.compression,
    )


def _tensorboard(config: TrainMonitorConfig) -> Sink:
    from trainmon.sinks.tensorboard import TensorBoardSink

    options = config.sinks.tensorboard
    assert options is not None
    return TensorBoardSink(every=config.cadence("sinks.tensorboard").every, worst=options.worst)


def _prometheus(config: TrainMonitorConfig) -> Sink:
    from trainmon.sinks.prometheus import PrometheusSink

    options = config.sinks.prometheus
    assert options is not None
    return PrometheusSink(
        every=config.cadence("sinks.prometheus").every,
        textfile=options.textfile,
        directory=options.directory,
        interval=options.interval,
        port=options.port,
        address=options.address,
        per_tensor=options.per_tensor,
    )


def _folder(name: str) -> str:
    """The name as one folder inside the output directory, whatever it holds: no separators, not hidden, not long."""
    plain = re.sub(r"[/\\\x00-\x1f]", "_", name)
    plain = plain.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return "_" + plain[1:] if plain.startswith(".") else plain or "_"


def _versions(host: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("trainmon", "numpy", "rich", "tensorboard", host):
        try:
            found[package] = version(package)
        except (PackageNotFoundError, ValueError):
            continue
    return found
