"""Prometheus: a file for the textfile collector and an endpoint to scrape, through ``prometheus_client`` (an extra).

Series ``group/metric`` is the gauge ``trainmon_group_metric`` with the labels ``run`` and ``rank``; seconds and bytes
stand at the end of the name. A series with subjects says so in its name and carries them as labels, as in
``trainmon_optim_lr_by_group{group="0"}``, so that each metric has one set of labels. Of per-tensor values there are
quantiles; each value is a time series of its own only if that is asked for.

A gauge shows the last published value; a null takes it away.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmon.frame import Snapshot, Table
from trainmon.series import SeriesSpec, catalogue
from trainmon.sinks.base import QUANTILES, Cadence, Message, RunInfo, at_least, ordered, publish, quantiles
from trainmon.spread import RankSpread

__all__ = ["Metric", "PrometheusSink", "metric_of"]

_MISSING = "the prometheus sink needs the package prometheus_client: pip install trainmon[prometheus]"
_PLACEHOLDER = re.compile(r"<([a-z_]+)>")
#: Labels that say more than the catalogue's short placeholders.
_LABELS = {"p": "parameter", "name": "part", "b": "bucket"}
_UNITS = {"s": "seconds", "B": "bytes"}

_logger = logging.getLogger("trainmon")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, what it is, and the labels beside ``run`` and ``rank``."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


#: For a name that the catalogue lacks: no two of those can collide.
_OTHER = Metric("trainmon_value", "series by name", ("name",))


@functools.cache
def metric_of(series: str) -> Metric:
    """The metric of a series of the catalogue, by its name there."""
    spec = catalogue()[series]
    kinds = _PLACEHOLDER.findall(series)
    words = [word for word in series.split("/") if not _PLACEHOLDER.fullmatch(word)]
    labels = tuple(_LABELS.get(kind, kind) for kind in kinds)
    name = "_".join(("trainmon", *words, *(("by", *labels) if labels else ())))
    if spec.unit in _UNITS:
        name += f"_{_UNITS[spec.unit]}"
    return Metric(name, f"{series} in {spec.unit}: {spec.derive}", labels)


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], SeriesSpec]]:
    """What names with a subject look like, the longest first."""
    found = []
    for spec in catalogue().values():
        pieces = re.split(r"<[a-z_]+>", spec.name)
        if len(pieces) > 1:
            subjects = ["([^/]+)"] * (len(pieces) - 2) + ["(.+)"]
            text = "".join(
                re.escape(piece) + subject for piece, subject in zip(pieces, [*subjects, ""], strict=True)
            )
            found.append((re.compile(text, re.DOTALL), spec))
    return sorted(found, key=lambda entry: (-len(_PLACEHOLDER.sub("", entry[1].name)), entry[1].name))


@functools.lru_cache(maxsize=4096)
def _place(name: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric and the label values of a scalar."""
    if name in catalogue():
        return metric_of(name), ()
    for pattern, spec in _patterns():
        match = pattern.fullmatch(name)
        if match:
            return metric_of(spec.name), match.groups()
    return _OTHER, (name,)


def _place_table(name: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric of a table, and the label values that its name gives already: `exp_avg` in `moment/norm/exp_avg/<p>`."""
    if name in catalogue():
        return metric_of(name), ()
    metric, values = _place(name)
    if metric is _OTHER:
        return metric, values
    return metric, tuple(value for value in values if not _PLACEHOLDER.fullmatch(value))


#: The ranks' own values of a series side by side: the least, the middle, the largest; which rank has it; who stands out.
_RANK_VALUE = Metric("trainmon_rank_value", "the ranks' own values of a series", ("series", "which"))
_RANK_HOLDER = Metric("trainmon_rank_holder", "the lowest rank that has the value", ("series", "which"))
_RANK_OUTLIER = Metric("trainmon_rank_outlier", "1 for a rank that stands out", ("series", "outlier"))
_RANK_NONFINITE = Metric(
    "trainmon_rank_nonfinite", "1 for a rank whose value is not finite", ("series", "outlier")
)

_Samples = dict[str, tuple[Metric, list[tuple[tuple[str, ...], float]]]]


class PrometheusSink:
    """Writes ``metrics.prom`` and answers scrapes.

    Args:
        every: shows the first step and every multiple of this.
        textfile: whether to write a file.
        directory: of the textfile collector; there the file is ``trainmon_<run>_rank<r>.prom``. None: the rank's own.
        interval: the file is written anew after so many seconds at the earliest, and at the end.
        port: rank r answers scrapes on port + r; None: no endpoint; 0: any free port.
        address: the interface of the endpoint.
        per_tensor: each per-tensor value is a time series.

    Attributes:
        bound: the port that answers; None without an endpoint.

    Raises:
        ImportError: the package ``prometheus_client`` is not installed.
        ValueError: an argument out of range.
    """

    name = "prometheus"

    def __init__(
        self,
        *,
        every: int = 1,
        textfile: bool = True,
        directory: str | None = None,
        interval: float = 5.0,
        port: int | None = None,
        address: str = "127.0.0.1",
        per_tensor: bool = False,
    ) -> None:
        if port is not None:
            at_least("port", port, 0)
        if importlib.util.find_spec("prometheus_client") is None:
            raise ImportError(_MISSING)
        self._cadence = Cadence(every)
        self._textfile, self._directory, self._interval = textfile, directory, interval
        self._port, self._address = port, address
        self._per_tensor = per_tensor
        self.bound: int | None = None
        self._path: Path | None = None
        self._server: Any = None
        self._registry: Any = None
        self._written = -float("inf")
        # Replaced, never changed: the endpoint's threads read them.
        self._samples: _Samples = {}
        self._messages: dict[tuple[str, str], int] = {}
        self._facts: dict[str, float] = {}

    def open(self, run: RunInfo) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(f"{_MISSING} ({error})") from error
        self._run = run
        self._base = (_utf8(run.name), str(run.rank))
        self._facts = {"running": 1.0, "life": float(run.life)}
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        if self._textfile and self._directory is not None:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", run.name)
            self._path = Path(self._directory) / f"trainmon_{name}_rank{run.rank}.prom"
        elif self._textfile and run.rank_directory is not None:
            self._path = run.rank_directory / "metrics.prom"
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._publish()
        if self._port is not None and self._server is None:
            self._serve()

    def _serve(self) -> None:
        assert self._port is not None
        from prometheus_client import start_http_server

        port = self._port + self._run.rank if self._port else 0
        try:
            if port > 65535:
                raise OSError(f"port {self._port} + rank {self._run.rank} is no port")
            self._server, self._thread = start_http_server(port, self._address, self._registry)
            self.bound = self._server.server_port
        except OSError as error:
            if self._path is None:
                raise
            # The file goes on: an earlier run that still holds the port must not cost it.
            _logger.warning("prometheus: %s:%d can't be opened (%s): no endpoint", self._address, port, error)
            self._port = None

    def write(self, snapshot: Snapshot) -> None:
        if not self._cadence.due(snapshot.step):
            return
        samples = dict(self._samples)
        for name, value in snapshot.scalars.items():
            if value is None:
                samples.pop(name, None)
            else:
                metric, labels = _place(name)
                samples[name] = metric, [(labels, float(value))]
        for table in snapshot.tables:
            self._condense(table, samples)
        if snapshot.ranks:
            samples.update(_ranks(snapshot.ranks))
        self._samples = samples
        self._facts = {
            **self._facts,
            "step": float(snapshot.step),
            "step_timestamp_seconds": snapshot.wall_time,
        }
        if self._path is not None and time.monotonic() - self._written >= self._interval:
            self._publish()

    def _condense(self, table: Table, samples: _Samples) -> None:
        metric, given = _place_table(table.series)
        order = ordered(table)
        shown = {label: float(table.values[index]) for label, index in quantiles(order).items()}
        named = metric.labels[: len(given)]
        samples[f"{table.series} quantiles"] = (
            Metric(f"{metric.name}_quantile", f"quantiles of {metric.help}", (*named, "quantile")),
            [((*given, f"{QUANTILES[label]:g}"), value) for label, value in shown.items()],
        )
        if self._per_tensor and len(metric.labels) == len(given) + 1:
            samples[table.series] = (
                metric,
                [((*given, table.subjects[index]), float(table.values[index])) for index in order],
            )

    def message(self, message: Message) -> None:
        key = (message.level, message.kind)
        self._messages = {**self._messages, key: self._messages.get(key, 0) + 1}

    def describe(self) -> list[Any]:
        """Nothing is known before the first step; asked by the client's registry."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics; asked by the client's registry, in any thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        base = ("run", "rank")
        for name, value in self._facts.items():
            family = GaugeMetricFamily(f"trainmon_{name}", _FACTS[name], labels=base)
            family.add_metric(self._base, value)
            yield family
        counter = CounterMetricFamily(
            "trainmon_messages", "messages said, by level and kind", labels=(*base, "level", "kind")
        )
        for key, count in self._messages.items():
            counter.add_metric((*self._base, *key), count)
        yield counter
        families: dict[str, Any] = {}
        for metric, values in self._samples.values():
            known = families.get(metric.name)
            if known is None:
                known = GaugeMetricFamily(metric.name, metric.help, labels=(*base, *metric.labels))
                families[metric.name] = known
            for labels, value in values:
                known.add_metric((*self._base, *map(_utf8, labels)), value)
        yield from families.values()

    def _publish(self) -> None:
        from prometheus_client import generate_latest

        assert self._path is not None
        publish(self._path, generate_latest(self._registry), durable=False)
        self._written = time.monotonic()

    def flush(self) -> None:
        if self._path is not None:
            self._publish()

    def close(self) -> None:
        """The last values stay in the file, marked as those of a run that is over."""
        server, self._server = self._server, None
        self.bound = None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(1.0)
        self._facts = {**self._facts, "running": 0.0}
        if self._path is not None:
            self._publish()
            self._path = None


_FACTS = {
    "running": "1 while the run lasts, 0 at its end",
    "life": "number of this life of the run",
    "step": "last step shown",
    "step_timestamp_seconds": "when the last step shown ended",
}


def _ranks(spreads: Mapping[str, RankSpread]) -> _Samples:
    """What the ranks' own values say, for all series that were compared."""
    values, holders, outliers, bad = [], [], [], []
    for series, spread in spreads.items():
        if spread.low_rank >= 0:
            shown = (("low", spread.low), ("median", spread.median), ("high", spread.high))
            values += [((series, which), value) for which, value in shown]
            holders += [
                ((series, "low"), float(spread.low_rank)),
                ((series, "high"), float(spread.high_rank)),
            ]
        outliers += [((series, str(rank)), 1.0) for rank in spread.outliers]
        bad += [((series, str(rank)), 1.0) for rank in spread.nonfinite]
    rows = ((_RANK_VALUE, values), (_RANK_HOLDER, holders), (_RANK_OUTLIER, outliers), (_RANK_NONFINITE, bad))
    return {metric.name: (metric, list(samples)) for metric, samples in rows}


def _utf8(text: str) -> str:
    """Lone surrogates (from undecodable file names) can't be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
