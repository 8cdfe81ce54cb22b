"""Finished frames as ``TrainingStateMonitor`` shows them: its lines in the host's log, its tags in event files.

``Epoch:[  1/  2], step:[    3/   10] local_norm/<p>: 0.1234``. Steps are counted as the host counts them; a metric is
shown when ``step_interval`` steps have passed since it was, or the step has gone back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trainmon.adapters.mindformers.graph.settings import HostSettings
from trainmon.frame import Snapshot

__all__ = ["StateLines"]

#: Series of single parameters: whose format says where, and the host's tag before the name.
_TABLES: Mapping[str, tuple[str, str]] = {
    "grad/norm_local/<p>": ("local_norm", "local_norm"),
    "moment/norm/exp_avg/<p>": ("optimizer_state", "adam_m_norm"),
    "moment/norm/exp_avg_sq/<p>": ("optimizer_state", "adam_v_norm"),
    "spectral/stable_rank/<p>": ("stable_rank", "weight_stable_rank"),
    "spectral/eigenvalue/<p>": ("stable_rank", "weight_eigenvalue"),
}
_SCALARS: Mapping[str, tuple[str, str]] = {
    "grad/norm_device": ("device_local_norm", "device_local_norm"),
    "weight/norm": ("weight_state", "weight_norm"),
    "attention/max_logit_mean": ("max_attention_logit", "max_attention_logit/mean"),
    "attention/max_logit": ("max_attention_logit", "max_attention_logit/max"),
}
_DEVICE_LOSS = "loss/part/device_accum_local_"
Shown = tuple[str, str, Any]  # metric, tag, value


class _Due:
    """Whether a metric is shown, counted from when it was."""

    def __init__(self, interval: int) -> None:
        self._interval, self._last = interval, 0

    def __call__(self, step: int) -> bool:
        passed = step - self._last
        if 0 < passed < self._interval:
            return False
        self._last = step
        return True


class StateLines:
    """A reader of frames.

    Args:
        settings: of ``monitor_config``.
        epochs, steps_per_epoch: as lines name them.
        writer: the host's TensorBoard writer; without one everything goes to the log.
        logger: the host's.
        logits: by step, largest ones by layer: this rank's heads.
        local_losses: by step, those of micro-batches by part.
        samples: of a step of one device; None: no throughput is shown.
        first_head: of this rank among a layer's heads.
    """

    def __init__(
        self,
        settings: HostSettings,
        epochs: int,
        steps_per_epoch: int,
        writer: Any,
        logger: logging.Logger,
        *,
        logits: Mapping[int, Mapping[str, Any]],
        local_losses: Mapping[int, Mapping[str, list[float]]],
        samples: float | None,
        first_head: Callable[[int], int],
    ) -> None:
        self._settings, self._epochs, self._per_epoch = settings, epochs, max(steps_per_epoch, 1)
        self._writer, self._logger = writer, logger
        self._logits, self._local_losses = logits, local_losses
        self._samples, self._first_head = samples, first_head
        self._due, self._ranks_due = _Due(settings.step_interval), _Due(settings.stable_rank_interval)

    def __call__(self, snapshot: Snapshot) -> None:
        step = snapshot.step
        due, ranks_due = self._due(step), self._ranks_due(step)
        for metric, tag, value in self._shown(snapshot):
            if ranks_due if metric == "stable_rank" else due:
                self._put(step, tag, value, self._settings.formats.get(metric, frozenset()))
        if due:
            self._put_logits(step)
            self._put_local_losses(step)
            self._put_throughput(snapshot)

    def _shown(self, snapshot: Snapshot) -> Iterator[Shown]:
        for table in snapshot.tables:
            series = table.series
            metric, tag = _TABLES.get(series, ("", ""))
            if metric not in self._settings.formats:
                continue
            pairs = zip(table.subjects, table.values.tolist(), table.valid.tolist(), strict=True)
            known = {name: value for name, value, valid in pairs if valid}
            if metric == "stable_rank":
                yield from self._spectra(tag, known)
            else:
                yield from ((metric, f"{tag}/{name}", value) for name, value in known.items())
        for series, (metric, tag) in _SCALARS.items():
            value = snapshot.scalars.get(series)
            if metric in self._settings.formats and value is not None:
                yield metric, tag, value
        for series, value in snapshot.scalars.items():
            if series.startswith(_DEVICE_LOSS) and value is not None:
                yield "device_local_loss", f"{series.removeprefix('loss/part/')}_loss", value

    def _spectra(self, tag: str, values: Mapping[str, float]) -> Iterator[Shown]:
        """Of matrices; of the experts of a parameter each one, their extremes and mean, or both."""
        experts: dict[str, list[float]] = {}
        for name, value in values.items():
            parameter, bracket, number = name.partition("[")
            if not bracket:
                yield "stable_rank", f"{tag}/{name}", value
                continue
            experts.setdefault(parameter, []).append(value)
            if self._settings.show_mode in ("all", "full"):
                yield "stable_rank", f"{tag}/{parameter}/expert_{number.rstrip(']')}", value
        if self._settings.show_mode in ("all", "statistics"):
            for parameter, of_all in experts.items():
                yield "stable_rank", f"{tag}/{parameter}/expert_max", max(of_all)
                yield "stable_rank", f"{tag}/{parameter}/expert_min", min(of_all)
                yield "stable_rank", f"{tag}/{parameter}/expert_mean", sum(of_all) / len(of_all)

    def _put_logits(self, step: int) -> None:
        places = self._settings.formats.get("max_attention_logit", frozenset())
        for layer, values in self._logits.get(step, {}).items():
            tag, known = f"max_attention_logit/{layer}", np.where(values == 0, np.nan, values)
            if "log" in places or self._writer is None:
                self._line(step, tag, known.tolist())
            if "tensorboard" in places and self._writer is not None:
                first = self._first_head(len(values))
                heads = {f"head_{first + i}": v for i, v in enumerate(known.tolist()) if v == v}
                self._writer.add_scalars(tag, heads, global_step=step)

    def _put_local_losses(self, step: int) -> None:
        places = self._settings.formats.get("local_loss")
        for part, losses in self._local_losses.get(step, {}).items() if places else ():
            if "log" in (places or ()) or self._writer is None:
                for loss in losses:
                    self._line(step, f"micro_local_{part}_loss", loss)
            if "tensorboard" in (places or ()) and self._writer is not None:
                mean = sum(losses) / len(losses)
                self._writer.add_scalar(f"local_{part}_loss", mean, global_step=step)

    def _put_throughput(self, snapshot: Snapshot) -> None:
        baseline, seconds = self._settings.throughput_baseline, snapshot.scalars.get("time/step")
        if baseline is not None and self._samples and seconds:
            value = self._samples / seconds / baseline
            self._put(snapshot.step, "throughput_linearity", value, ("log", "tensorboard"))

    def _put(self, step: int, tag: str, value: Any, places: Iterable[str]) -> None:
        places = set(places)
        if "tensorboard" in places and self._writer is not None:
            self._writer.add_scalar(tag, value, global_step=step)
        if "log" in places or ("tensorboard" in places and self._writer is None):
            self._line(step, tag, value)

    def _line(self, step: int, tag: str, value: Any) -> None:
        epoch, within = divmod(step - 1, self._per_epoch)
        self._logger.info(
            "Epoch:[%3d/%3d], step:[%5d/%5d] %s: %s",
            epoch + 1,
            self._epochs,
            within + 1,
            self._per_epoch,
            tag,
            value,
        )
