"""Lines of the host's log, as its manual writes them, with values that are right.

They go where the host's own go: through its logger, into ``output/log/rank_<r>/info.log``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trainmon.adapters.mindformers.pynative.experts import ExpertCounts
from trainmon.adapters.mindformers.pynative.settings import HostSettings, Layers, Names
from trainmon.frame import Snapshot, Table

__all__ = ["Tell", "expert_lines", "logit_lines", "state_lines", "teller"]

Tell = Callable[[str], None]


def teller() -> Tell:
    """The host's logger; Python's own where it can't be had."""
    try:
        from mindformers.tools.logger import logger
    except ImportError:
        return logging.getLogger("trainmon.mindformers").info
    return lambda line: logger.info("%s", line)


def number(value: float) -> str:
    """Six places, as the host prints norms; with an exponent where these would be none."""
    return f"{value:10.6f}" if value == 0 or not abs(value) < 5e-7 else f"{value:10.6e}"


def state_lines(
    snapshot: Snapshot, settings: HostSettings, accumulation: int, *, losses: bool, increments: bool
) -> Iterator[str]:
    """Of ``monitor.train_state``: micro-batches in groups, then the step.

    Args:
        accumulation: micro-batches of the step: the host's ``local_loss`` is divided by it already.
        losses: whether losses are told.
        increments: whether the growth of accumulated norms is told.
    """
    step, tables = snapshot.step, {table.series: table for table in snapshot.tables}
    if losses and settings.local_loss:
        for index, loss in sorted(_values(tables.get("loss/micro")).items(), key=lambda item: int(item[0])):
            yield json.dumps({"step": step, "micro_step": int(index) + 1, "local_loss": loss / accumulation})
    if losses and settings.device_loss and snapshot.scalars.get("loss/global") is not None:
        yield json.dumps(
            {"step": step, "micro_step": accumulation, "device_loss": snapshot.scalars["loss/global"]}
        )
    norms = [("local_norm", settings.local_norm, _by_micro(tables.get("grad/norm_micro/<p>")))]
    if increments:
        norms.append(("local_norm_increment", Names(), _by_micro(tables.get("grad/norm_increment/<p>"))))
    for micro in sorted({micro for _, _, found in norms for micro in found}):
        group = [line for key, names, found in norms for line in _lines(key, names, found.get(micro, {}))]
        yield from _headed(f'{{ "step": {step}, "micro_step": {micro + 1} }}', group)
    device = _lines("device_norm", settings.device_norm, _values(tables.get("grad/norm_local/<p>")))
    yield from _headed(f'{{ "step": {step} }}', device)


def _headed(header: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield header
        yield from lines


def _lines(key: str, names: Names | None, norms: Mapping[str, float]) -> list[str]:
    return [
        f'{{ "{key}": {name}: {number(norm)} }}' for name, norm in norms.items() if names and name in names
    ]


def _values(table: Table | None) -> dict[str, float]:
    if table is None:
        return {}
    return {
        name: float(value)
        for name, value, valid in zip(table.subjects, table.values, table.valid, strict=True)
        if valid
    }


def _by_micro(table: Table | None) -> dict[int, dict[str, float]]:
    """Rows are named ``<parameter>@<micro-batch>``."""
    found: dict[int, dict[str, float]] = {}
    for subject, value in _values(table).items():
        name, _, micro = subject.rpartition("@")
        found.setdefault(int(micro), {})[name] = value
    return found


def expert_lines(step: int, first: int, records: Layers, counts: Iterable[ExpertCounts]) -> Iterator[str]:
    """Tokens of each expert as JSON, in Megatron's layout.

    Args:
        first: number of the step's first micro-batch in the run, from 1.
    """
    placed = [(one.place, one) for one in counts if one.place is not None and one.place in records]
    for place, one in sorted(placed, key=lambda pair: (pair[0], pair[1].micro)):
        if (first + one.micro) % records.every:
            continue
        record: dict[str, Any] = {
            "iter": first + one.micro,
            "step": step,
            "micro_step": one.micro + 1,
            "block": place.block,
        }
        if place.block == "mtp":
            record["mtp_idx"] = place.mtp
        record |= {"layer": place.layer, "tpe": [[round(float(count)) for count in one.counts]]}
        yield json.dumps(record)


def logit_lines(step: int, total: int, logits: Mapping[str, Any]) -> Iterator[str]:
    """Of the host's ``MaxLogitsMonitor``: each layer's heads, then mean and largest of all."""
    start = f"step:[{step:5d}/{total:5d}] max_attention_logit/"
    everything = [np.asarray(values, np.float64).reshape(-1) for values in logits.values()]
    for name, values in zip(logits, everything, strict=True):
        yield f"{start}{name}: [{', '.join(f'{value:.4g}' for value in values)}]"
    if everything:
        flat = np.concatenate(everything)
        yield f"{start}mean: {flat.mean():.4g}"
        yield f"{start}max: {flat.max():.4g}"
