"""Anomalies as facts: what an alert says of a row, the files it goes to, and which of those of all ranks came first.

The order is that of the computation: step, micro-batch, forward before backward before optimizer, place in the pipeline
(descending once gradients come back), call. Clocks have no say.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainmon.sinks.base import RecordFile, at_least, publish

__all__ = ["Anomaly", "AnomalyFiles", "analyse_anomalies", "order", "tag_of"]

logger = logging.getLogger("trainmon.msprobe")

#: What a tag ends with, by monitor and scope; msProbe's ordering tool goes by it.
_ENDINGS = {
    ("module", "forward"): "actv",
    ("module", "backward"): "actv_grad",
    ("weight_grad", "unreduced"): "pre_grad",
    ("weight_grad", "reduced"): "post_grad",
}
_STAGES = {
    "actv": 0,
    **dict.fromkeys(("actv_grad", "pre_grad", "post_grad", "acc_grad", "comm"), 1),
}
#: Moments, parameters and whatever else the optimizer's step shows.
_LAST_STAGE = 2
#: Records a rank keeps at most.
_MOST = 100_000
FOLDER = "anomaly_detected"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One record, with the fields that msProbe's older monitor gives it.

    Attributes:
        micro_step: from 0; of what is seen once a step the last.
        vpp_stage: 0 where the model is no list of chunks.
        call_id: order within step and rank.
    """

    rank: int
    step: int
    micro_step: int
    pp_stage: int
    vpp_stage: int
    call_id: int
    tag_name: str
    message: str
    group_mates: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.tag_name}_step_{self.step}_call_{self.call_id}"


def tag_of(monitor: str, name: str, scope: str) -> str:
    """A tensor's name and what of it is meant."""
    return f"{name}/{_ENDINGS.get((monitor, scope), scope)}"


def order(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Where an anomaly stands in the computation; smaller is earlier."""
    stage = _STAGES.get(str(record["tag_name"]).rpartition("/")[2], _LAST_STAGE)
    place = int(record["vpp_stage"]), int(record["pp_stage"])
    virtual, pipeline = place if stage == 0 else (-place[0], -place[1])
    return int(record["step"]), int(record["micro_step"]), stage, virtual, pipeline, int(record["call_id"])


class AnomalyFiles:
    """``<directory>/anomaly.jsonl``, a line an anomaly as they come, and ``anomaly.json``, one object of all of them.

    The object is written anew whenever there are twice as many, and at the end: a run that is killed has the lines.

    Args:
        directory: ``<out>/anomaly_detected/rank<r>``; what an earlier run left there is removed.
        goes_on: the run has begun before: what is there is kept.
    """

    def __init__(self, directory: Path, *, goes_on: bool = False) -> None:
        self._lines = directory / "anomaly.jsonl"
        self._object = directory / "anomaly.json"
        self._count = 0
        self._shown = 0
        if goes_on and self._lines.exists():
            self._count = self._shown = sum(1 for _ in _lines_of(self._lines))
            return
        for path in (self._lines, self._object):
            path.unlink(missing_ok=True)

    def add(self, anomalies: Collection[Anomaly]) -> None:
        """Appends; beyond 100,000 nothing more.

        Raises:
            OSError: they can't be written.
        """
        rest = _MOST - self._count
        if rest <= 0 or not anomalies:
            return
        kept = list(anomalies)[:rest]
        file = RecordFile(self._lines)
        try:
            file.write(b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in kept))
        finally:
            file.close()
        self._count += len(kept)
        if self._count >= _MOST:
            logger.warning("[monitor_v2] %s has %d anomalies; no more are kept", self._lines, _MOST)
        if self._count >= 2 * self._shown:
            self.finish()

    def finish(self) -> None:
        """Brings ``anomaly.json`` up to date."""
        if self._count == self._shown:
            return
        shown = {key_of(record): record for record in _lines_of(self._lines)}
        publish(self._object, json.dumps(shown, indent=1).encode())
        self._shown = self._count


def key_of(record: Mapping[str, Any]) -> str:
    return f"{record['tag_name']}_step_{record['step']}_call_{record['call_id']}"


def analyse_anomalies(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    top_k: int = 8,
    steps: Iterable[int] | None = None,
) -> list[dict[str, Any]]:
    """The earliest anomalies of all ranks, by what computes when; also written to ``anomaly_analyse.json``.

    Args:
        path: the output directory, its ``anomaly_detected``, or that of msProbe's older monitor.
        output: directory for ``anomaly_analyse.json``; None: ``path``.
        top_k: how many.
        steps: of these steps alone.

    Raises:
        ValueError: ``top_k`` below 1, or no records there.
        FileNotFoundError: there is no such path.
    """
    at_least("top_k", top_k, 1)
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"there is no {root}")
    folder = root / FOLDER if (root / FOLDER).is_dir() else root
    ranks = sorted(one for one in folder.glob("rank*") if one.is_dir())
    records = [record for one in ranks for record in _records(one)]
    if not records:
        raise ValueError(f"{folder} holds no rank*/anomaly.json or anomaly.jsonl with records")
    chosen = None if steps is None else frozenset(steps)
    found = [one for one in records if chosen is None or one["step"] in chosen]
    found.sort(key=lambda record: (order(record), record["rank"]))
    found = found[:top_k]
    into = root if output is None else Path(output)
    into.mkdir(parents=True, exist_ok=True)
    shown = {f"rank{record['rank']}:{key_of(record)}": record for record in found}
    publish(into / "anomaly_analyse.json", json.dumps(shown, indent=1).encode())
    return found


def _records(directory: Path) -> Iterator[dict[str, Any]]:
    """A rank's: the lines where there are any, else the object."""
    lines, whole = directory / "anomaly.jsonl", directory / "anomaly.json"
    if lines.exists():
        yield from _lines_of(lines)
    elif whole.exists():
        try:
            loaded = json.loads(whole.read_bytes())
            yield from (one for one in loaded.values() if _is_record(one))
        except (ValueError, AttributeError) as error:
            logger.warning("%s is left out, it is no object of anomalies: %s", whole, error)


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Records; a line that was cut off is left out."""
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if _is_record(record):
            yield record


def _is_record(record: Any) -> bool:
    numbers = ("rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id")
    return (
        isinstance(record, dict)
        and "tag_name" in record
        and all(isinstance(record.get(name), int) for name in numbers)
    )
