"""Which sinks a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainmon.config import ConfigError, Place, Problem, TrainMonitorConfig
from trainmon.sinks.base import Sink
from trainmon.sinks.csv import CsvSink
from trainmon.sinks.jsonl import JsonlSink
from trainmon.sinks.log import LogSink

__all__ = ["build_bridge", "build_sinks"]


def build_sinks(config: TrainMonitorConfig) -> list[Sink]:
    """The sinks that are on, but for the bridge.

    Raises:
        ConfigError: a sink needs a package that is not installed.
    """
    options, sinks = config.sinks, list[Sink]()
    if options.log is not None:
        sinks.append(_log(config))
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
    if options.parquet is not None:
        sinks.append(_extra("parquet", lambda: _parquet(config)))
    if options.tensorboard is not None:
        sinks.append(_extra("tensorboard", lambda: _tensorboard(config)))
    if options.prometheus is not None:
        sinks.append(_extra("prometheus", lambda: _prometheus(config)))
    return sinks


def build_bridge(config: TrainMonitorConfig, given: Any = None) -> Sink | None:
    """The bridge, if one is asked for.

    Args:
        given: the object that code gave; beats the one that the configuration names.

    Raises:
        ConfigError: there is no such object, or it has no ``log``.
    """
    options = config.sinks.bridge
    if given is None and options is None:
        return None
    from trainmon.sinks.bridge import TRACKERS, BridgeSink, find_target

    to = None if options is None else options.to
    if given is None and to is None:
        problem = (
            f"names no target: one of {', '.join(TRACKERS)}, or package.module:name; or give bridge= in code"
        )
        raise ConfigError([Problem(Place(), "sinks.bridge.to", problem)])
    try:
        if given is None and to is not None:
            given = to if to in TRACKERS else find_target(to)
        if options is None:
            return BridgeSink(given, every=config.every)
        every = config.cadence("sinks.bridge").every
        return BridgeSink(given, every=every, project=options.project, online=options.online)
    except Exception as error:  # an object that is made here may fail in any way
        where = "bridge" if to is None else "sinks.bridge.to"
        raise ConfigError([Problem(Place(), where, f"{type(error).__name__}: {error}")]) from error


def _log(config: TrainMonitorConfig) -> Sink:
    options = config.sinks.log
    assert options is not None
    every = config.cadence("sinks.log").every
    return LogSink(every=every, progress=options.progress, file=options.file, series=options.series)


def _extra(name: str, make: Callable[[], Sink]) -> Sink:
    """A sink whose package is an extra."""
    try:
        return make()
    except ImportError as error:
        raise ConfigError([Problem(Place(), f"sinks.{name}", str(error))]) from error


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
    every = config.cadence("sinks.tensorboard").every
    return TensorBoardSink(every=every, worst=options.worst, exclude=options.exclude)


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
