"""torch's switches of deterministic computation, and its seeds."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["settings", "switch_on"]


def switch_on(seed: int | None, warn_only: bool) -> list[str]:
    """Sets them; returns what may still differ."""
    problems = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        problems.append("results of cuBLAS: CUDA was in use already; call deterministic() before, or set ")
        problems[-1] += f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']} in the environment"
    if seed is not None:
        torch.manual_seed(seed)  # the generators of all devices
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if warn_only:
        problems.append("operations without a deterministic form: torch only warns of them (warn_only)")
    return problems


def settings() -> dict[str, Any]:
    """By their names in torch."""
    return {
        "torch.__version__": torch.__version__,
        "torch.version.cuda": torch.version.cuda,
        "torch.initial_seed": torch.initial_seed(),
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "torch.is_deterministic_algorithms_warn_only_enabled": (
            torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.get_num_threads": torch.get_num_threads(),
    }
