"""G3's `runtime.distributed` and `runtime.device` (contract 5.3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed


def get_global_rank_safe() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def get_local_rank_safe() -> int:
    return get_global_rank_safe()


def get_world_size_safe() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def all_reduce(value: Any, op: Any = distributed.ReduceOp.SUM, group: Any = None) -> Any:
    """Of tensors in place, or of plain numbers; needs a process group."""
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(tensor, op=op, group=group)
    return tensor if isinstance(value, torch.Tensor) else tensor.item()


def get_device_type() -> str:
    return "cpu"


def get_torch_device() -> Any:
    return torch.cpu


def synchronize() -> None:
    """Nothing is asynchronous on a CPU."""
