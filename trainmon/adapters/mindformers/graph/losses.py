"""Losses beside the one that a step returns: the separate ones, and those of this rank alone.

The graph adds them up in parameters that somebody has to set back. ``MFLossMonitor`` does so each step if it prints them;
where nobody does, they grow, and a step's own is the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from trainmon.adapters.mindspore_parts.outputs import number

__all__ = ["SeparateLosses"]

_REGISTER = "mindformers.utils.parameter_register"
_LOCAL = "mindformers.parallel_core.training_graph.loss_func"
#: In the host's register, and ours.
_PARTS = {"lm_loss": "lm", "aux_loss": "aux", "mtp_loss": "mtp", "indexer_loss": "indexer"}


class SeparateLosses:
    """Reads them once a step.

    Args:
        divisor: of the losses over the step; those of this rank alone have none.
        undefined: parts that the graph divides by zero.
        resets: whether the losses of this rank are set back here, in place of the host's own callback.
    """

    def __init__(self, divisor: int, undefined: Collection[str] = (), *, resets: bool = False) -> None:
        self._divisor, self._undefined, self._resets = divisor, undefined, resets
        self._before: dict[str, float] = {}
        self.read()  # what an earlier run left is no step's

    def read(self) -> dict[str, float]:
        """``lm``, ``aux``, ``mtp``, ``indexer`` as far as the graph has them, and ``device_accum_local_<part>``: the sum
        over this rank's micro-batches."""
        found = {}
        for name, parameter in _registered().items():
            grown = self._grown(name, parameter)
            if grown is not None and _PARTS[name] not in self._undefined:
                found[_PARTS[name]] = grown / self._divisor
        for tag, parameter in _local().items():
            grown = self._grown(f"local {tag}", parameter)
            if grown is not None:
                found[f"device_accum_local_{tag}"] = grown
        return found

    def _grown(self, name: str, parameter: Any) -> float | None:
        value = number(parameter)
        if value is None:
            return None
        before, self._before[name] = self._before.get(name, 0.0), value
        return value - before

    def after(self) -> None:
        """The step's callbacks are through: what was set back begins at zero."""
        if self._resets and _local():
            sys.modules[_LOCAL].reset_device_local_loss()
        local = {f"local {tag}": parameter for tag, parameter in _local().items()}
        for name, parameter in {**_registered(), **local}.items():
            value = number(parameter)
            if value is not None:
                self._before[name] = value


def _registered() -> Mapping[str, Any]:
    register = getattr(sys.modules.get(_REGISTER), "parameter_register", None)
    if register is None:
        return {}
    return {name: parameter for name, parameter in register.items() if name in _PARTS}


def _local() -> Mapping[str, Any]:
    table = getattr(sys.modules.get(_LOCAL), "_device_local_loss", None)
    return dict(table) if isinstance(table, dict) else {}
