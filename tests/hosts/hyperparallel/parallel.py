"""Ranks, groups and data parallelism of the fake HyperParallel trainers (gloo, pure data parallel, or two stages)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn


@dataclass
class GroupInfo:
    """A process group as the platform's collectives take it; `group` may be None (the default group)."""

    group_name: str
    group: Any
    rank_size: int


class DeviceMesh:
    """As much of HyperParallel's mesh as callbacks use: one data-parallel axis, a second one with stages."""

    def __init__(self, sizes: dict[str, int], groups: dict[str, Any]) -> None:
        self._sizes, self._groups = sizes, groups
        self.mesh_dim_names = tuple(sizes)

    def __getitem__(self, name: str) -> DeviceMesh:
        return DeviceMesh({name: self._sizes[name]}, {name: self._groups[name]})

    def get_group(self, name: str | None = None) -> Any:
        return self._groups[name or self.mesh_dim_names[0]]

    def size(self, name: str | None = None) -> int:
        return self._sizes[name or self.mesh_dim_names[0]]


@dataclass
class ParallelDims:
    dp_size: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1


class TorchPlatform:
    """The collectives' door of G1 and G2 (contract 3.4)."""

    def get_rank(self) -> int:
        return distributed.get_rank()

    def get_world_size(self) -> int:
        return distributed.get_world_size()

    def all_reduce(self, data: torch.Tensor, group_info: GroupInfo) -> tuple[torch.Tensor, Any]:
        handle = distributed.all_reduce(data, group=group_info.group)
        return data, handle

    def broadcast(self, data: torch.Tensor, src: int, group: Any = None) -> None:
        distributed.broadcast(data, src, group=group)

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def get_platform() -> TorchPlatform:
    """The torch platform, if `HYPER_PARALLEL_PLATFORM` asks for it; the real one tries MindSpore first."""
    if os.environ.get("HYPER_PARALLEL_PLATFORM") != "torch":
        raise RuntimeError("set HYPER_PARALLEL_PLATFORM=torch: the fakes know no other platform")
    return TorchPlatform()


def init_distributed() -> tuple[int, int]:
    """(rank, world size); joins the launcher's group, or makes one of this process alone."""
    if not distributed.is_initialized():
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            distributed.init_process_group("gloo")
        else:
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return distributed.get_rank(), distributed.get_world_size()


def destroy_distributed() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class HSDPModule:
    """Mixed into a module's class by `hsdp`, as `fully_shard` does: the names of the parameters stay what they were.

    Gradients stay this rank's until synchronisation is on for a backward pass; then they are the ranks' mean.
    """

    _sync = True
    _group: Any = None

    def set_requires_gradient_sync(self, on: bool) -> None:
        self._sync = on

    def _reduce(self, parameter: torch.Tensor) -> None:
        if self._sync and parameter.grad is not None:
            distributed.all_reduce(parameter.grad, group=self._group)
            parameter.grad /= distributed.get_world_size(self._group)


def hsdp(model: nn.Module, group: Any = None) -> nn.Module:
    """The model itself, now data parallel over the ranks of `group`; parameters are kept whole."""
    model.__class__ = type(f"HSDP{type(model).__name__}", (HSDPModule, type(model)), {})
    model._group = group
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(model._reduce)
    return model


class DDPModule(nn.parallel.DistributedDataParallel):
    """torch's DDP under the host's name for the switch; parameters are named `module....` then."""

    def set_requires_gradient_sync(self, on: bool) -> None:
        self.require_backward_grad_sync = on


def data_parallel(model: nn.Module, how: str, world: int, group: Any = None) -> nn.Module:
    """`how`: "hsdp" (default), or "ddp". One rank needs neither."""
    if world == 1:
        return model
    if how == "ddp":
        return DDPModule(model, process_group=group, broadcast_buffers=False)
    return hsdp(model, group)


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Switches the model's gradient synchronisation, if it is parallel at all."""
    switch = getattr(model, "set_requires_gradient_sync", None)
    if switch is not None:
        switch(on)
