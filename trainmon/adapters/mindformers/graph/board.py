"""The trainer's own TensorBoard writer, which is there before callbacks are made: trainmon's numbers go there, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["HostBoard", "host_writer"]

_MODULE = "mindformers.utils.tensorboard"
#: Tags that MFLossMonitor writes to the same files.
_TAKEN = frozenset(
    {
        *("loss", "learning-rate", "batch-size", "grad-norm", "loss-scale", "iteration-time", "throughput"),
        *("load-balancing-loss", "indexer-loss", "lm-loss", "mtp-loss", "model-flops-throughput-per-npu"),
    }
)


def host_writer() -> Any:
    """The writer of top-level ``tensorboard:``; None without one."""
    ask = getattr(sys.modules.get(_MODULE), "get_tensorboard_writer", None)
    return None if ask is None else ask()


class HostBoard:
    """An object for the bridge: numbers by tag, those that the trainer writes itself left out."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hands a step's numbers to the writer, which has a thread of its own."""
        for tag, value in values.items():
            if tag not in _TAKEN:
                self._writer.add_scalar(tag, value, global_step=step)
