"""Where ranks speak to each other in torch, and the tensors of a call.

torch.distributed's functions; the functional ones, whose results are waited for when they are used; the methods of
process groups, by which libraries reach C++ themselves. What C++ issues by itself (the reducer of
DistributedDataParallel) passes none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

__all__ = [
    "BY_IDENTITY",
    "COVERED",
    "FUNCTIONAL",
    "METHODS",
    "MORE",
    "WITHIN",
    "functional",
    "key_of",
    "tensors_of",
    "unwrapped",
    "works_of",
]

#: What msProbe looks at.
COVERED = (
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "broadcast", "all_reduce", "reduce", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor", "all_gather", "gather"),
    *("_all_gather_base", "all_gather_into_tensor"),
)
#: What it passes over.
MORE = (
    *("all_to_all", "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced"),
    *("all_gather_single", "reduce_scatter_single"),
)
#: What torch makes of a call, which msProbe counts as well.
WITHIN = {
    "send": "isend",
    "recv": "irecv",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
BY_IDENTITY = ("isend", "irecv")

#: Of torch.distributed._functional_collectives; rows have them with `functional.` before.
FUNCTIONAL = (
    *("broadcast", "all_reduce", "all_gather_tensor", "all_gather_tensor_autograd", "reduce_scatter_tensor"),
    *("reduce_scatter_tensor_autograd", "all_to_all_single", "all_to_all_single_autograd", "permute_tensor"),
    *(
        "all_gather_single",
        "all_gather_single_autograd",
        "reduce_scatter_single",
        "reduce_scatter_single_autograd",
    ),
    *("all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
)
#: Of ProcessGroup, by the name that torch.distributed has for the same.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "recv_anysource": "recv",
} | {
    name: name
    for name in (
        *(
            "all_gather_single",
            "all_gather_single_coalesced",
            "all_to_all_single",
            "broadcast",
            "gather",
            "recv",
        ),
        *(
            "reduce",
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "scatter",
            "send",
        ),
        "reduce_scatter_tensor_coalesced",
    )
}

_DEPTH = 3  # of lists in lists


def functional() -> Any:
    """torch.distributed._functional_collectives; None where there is none."""
    try:
        return importlib.import_module("torch.distributed._functional_collectives")
    except ImportError:
        return None


def tensors_of(arguments: Sequence[Any], keywords: Any) -> list[list[torch.Tensor]]:
    """Those of each argument that is a tensor or a list with any; of batched operations theirs."""
    found = []
    for value in (*arguments, *keywords.values()):
        tensors = _inside(value, 0)
        if tensors:
            found.append(tensors)
    return found


def _inside(value: Any, depth: int) -> list[torch.Tensor]:
    value = getattr(value, "tensor", value) if isinstance(value, distributed_c10d.P2POp) else value
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple) and depth < _DEPTH:
        return [tensor for one in value for tensor in _inside(one, depth + 1)]
    return []


def works_of(result: Any) -> list[Any]:
    """What has to be waited for before a call is over: works, and tensors of functional calls."""
    results = result if isinstance(result, list | tuple) else [result]
    works = [one for one in results if isinstance(one, distributed_c10d.Work)]
    works = [one for one in works if type(one).__name__ != "_IllegalWork"]  # a manager has it
    return works + [one.elem for one in results if _is_on_its_way(one) and not one.completed]


def unwrapped(result: Any) -> list[list[torch.Tensor]]:
    """The tensors of a functional call's result, readable once it is over."""
    results = result if isinstance(result, list | tuple) else [result]
    tensors = [one.elem if _is_on_its_way(one) else one for one in results]
    tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
    return [tensors] if tensors else []


def _is_on_its_way(value: Any) -> bool:
    return type(value).__name__ == "AsyncCollectiveTensor"


def key_of(awaited: Any) -> int:
    """By which it is known when it is waited for: a tensor may be waited for by a view of it."""
    if isinstance(awaited, torch.Tensor):
        return int(awaited.untyped_storage()._cdata)
    return id(awaited)
