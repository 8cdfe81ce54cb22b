"""Whether a run can be repeated bit by bit: what decides that, set in one call and recorded with every run.

What one machine with one layout computes twice comes out alike: same program, data, seeds, versions, number of threads
and ranks. Another number of ranks, device or version may add in another order; no switch changes that.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["Determinism", "deterministic", "reproduction"]

Framework = Literal["torch", "mindspore"]

#: What libraries read from the environment. Set by :func:`deterministic` where there is a value.
_ENVIRONMENT: Mapping[str, str | None] = {
    "PYTHONHASHSEED": None,  # read when Python starts, so too late to be set
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HCCL_DETERMINISTIC": "true",
    "NCCL_ALGO": None,
    "NCCL_PROTO": None,
}


@dataclass(frozen=True, slots=True)
class Determinism:
    """What holds after :func:`deterministic`.

    Attributes:
        seed: what all generators were set to; None: they were left alone.
        settings: every setting that was looked at, by its name in the framework or environment.
        problems: sentences on what may still differ from run to run, and what to do about it.
    """

    seed: int | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"seed {'unchanged' if self.seed is None else self.seed}"]
        lines += [f"{name}: {value}" for name, value in self.settings.items()]
        lines += [f"may differ: {problem}" for problem in self.problems]
        return "\n".join(lines)


def deterministic(
    seed: int | None = None,
    *,
    frameworks: tuple[Framework, ...] | None = None,
    warn_only: bool = False,
) -> Determinism:
    """Seeds every generator and asks every framework for deterministic computation and communication.

    Call it first in the program, on every rank, before a device is used. Sets the seeds of Python, NumPy and the
    frameworks; torch's deterministic algorithms and cuDNN's (without benchmarking); MindSpore's deterministic mode;
    the environment of cuBLAS and HCCL. Slower kernels and filled memory are the price.

    Args:
        seed: 0 to 2^32 - 1, the same on every rank; None: leave the generators alone.
        frameworks: which to set; None: those that the program has imported.
        warn_only: torch warns of an operation that has no deterministic form instead of raising.

    Raises:
        TypeError: a seed that is no integer.
        ValueError: a seed out of range, or an unknown framework.
        ImportError: a named framework is not installed.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an integer from 0 to {2**32 - 1} or None, not {seed!r}")
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to {2**32 - 1}, not {seed}")
    names = _loaded() if frameworks is None else frameworks
    for name in names:
        if name not in ("torch", "mindspore"):
            raise ValueError(f"frameworks are 'torch' and 'mindspore', not {name!r}")
    problems: list[str] = []
    for variable, value in _ENVIRONMENT.items():
        if value is not None:
            os.environ.setdefault(variable, value)
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        problems.append("the order of sets of strings: start Python with PYTHONHASHSEED=0 in the environment")
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
    if "torch" in names:
        from trainmon.backend.torch_determinism import switch_on as switch_torch_on

        problems += switch_torch_on(seed, warn_only)
    if "mindspore" in names:
        from trainmon.backend.mindspore_determinism import switch_on as switch_mindspore_on

        problems += switch_mindspore_on(seed)
    return Determinism(seed, reproduction(), tuple(problems))


def reproduction() -> dict[str, Any]:
    """What must be alike for a run to come out alike: settings and seeds of the frameworks in use, and the environment.
    Plain values, for run.json; nothing is changed."""
    found: dict[str, Any] = {name: os.environ.get(name) for name in _ENVIRONMENT}
    loaded = _loaded()
    if "torch" in loaded:
        from trainmon.backend.torch_determinism import settings as torch_settings

        found |= torch_settings()
    if "mindspore" in loaded:
        from trainmon.backend.mindspore_determinism import settings as mindspore_settings

        found |= mindspore_settings()
    return found


def _loaded() -> tuple[Framework, ...]:
    return tuple(name for name in ("torch", "mindspore") if name in sys.modules)
