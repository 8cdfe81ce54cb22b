"""Ranks, groups and data parallelism of the fake HyperParallel trainers (gloo, pure data parallel, or two stages)."""

from __future__ import annotations

import os
import sys
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
        hook = sys.excepthook  # torch puts one before it that names the rank, each time
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            distributed.init_process_group("gloo")
        else:
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        sys.excepthook = hook
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


class ShardedModule:
    """Mixed into a module's class by `fsdp2`: the switch of all its sharded children."""

    def set_requires_gradient_sync(self, on: bool) -> None:
        for child in self.children():  # type: ignore[attr-defined]
            child.set_requires_gradient_sync(on)


def fsdp2(model: nn.Module) -> nn.Module:
    """torch's `fully_shard` on each child: parameters and gradients are DTensors, sharded over all ranks.

    The host shards by its own DTensor; what callbacks use of it (`placements`, `device_mesh`, `to_local()`) is the same.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("dp",))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    model.__class__ = type(f"Sharded{type(model).__name__}", (ShardedModule, type(model)), {})
    return model


class MainGradModule:
    """Mixed into a module's class by `main_grads`: gradients add up in float32 `main_grad`s, and `.grad` stays None."""

    _sync = True

    def set_requires_gradient_sync(self, on: bool) -> None:
        self._sync = on

    def _move(self, parameter: Any) -> None:
        had = getattr(parameter, "main_grad", None)
        parameter.main_grad = parameter.grad.float() if had is None else had + parameter.grad.float()
        parameter.grad = None
        if self._sync and distributed.get_world_size() > 1:
            distributed.all_reduce(parameter.main_grad)
            parameter.main_grad /= distributed.get_world_size()

    @staticmethod
    def lend(optimizer: torch.optim.Optimizer) -> None:
        """A torch optimizer looks at `.grad`: it gets the main gradients for its step. zero_grad drops them."""
        parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        zero_grad = optimizer.zero_grad

        def give(*_: Any) -> None:
            for parameter in parameters:
                parameter.grad = parameter.main_grad.to(parameter.dtype)

        def drop(set_to_none: bool = True) -> None:
            zero_grad(set_to_none=set_to_none)
            for parameter in parameters:
                parameter.main_grad = None

        optimizer.register_step_pre_hook(give)
        optimizer.zero_grad = drop  # type: ignore[method-assign]


def main_grads(model: nn.Module) -> nn.Module:
    model.__class__ = type(f"MainGrad{type(model).__name__}", (MainGradModule, type(model)), {})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(model._move)
    return model


class CheckpointWrapper(nn.Module):
    """Activation recompute: a second forward in the backward pass; names get `_checkpoint_wrapped_module.`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)


def tensor_parallel(model: Any) -> nn.Module:
    """The MLP cut over all ranks, which see the same data: DTensors beside parameters that each rank has whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class ExpertParallelModule(HSDPModule):
    """Mixed in by `expert_parallel`: the gradients of this rank's experts come from all ranks' tokens."""

    def _reduce(self, parameter: torch.Tensor) -> None:
        if parameter is not self.moe.experts:  # type: ignore[attr-defined]
            super()._reduce(parameter)
        elif self._sync and parameter.grad is not None:
            parameter.grad /= distributed.get_world_size(self._group)


def expert_parallel(model: Any, group: Any, whole: bool) -> nn.Module:
    """Each rank has its part of the experts and data of its own; `whole`: as a DTensor, else as a plain tensor.

    Counters are as long as on one rank, and count this rank's tokens.
    """
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    mine = model.moe.experts.detach().chunk(size)[rank].clone()
    if whole:
        from torch.distributed.tensor import DTensor, Shard

        mesh = distributed.init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
        mine = DTensor.from_local(mine, mesh, [Shard(0)])
    model.moe.experts = nn.Parameter(mine)
    if not whole:
        model.moe.experts.expert_group = group
    model.moe.spread = Spread(group)
    model.__class__ = type(f"EP{type(model).__name__}", (ExpertParallelModule, type(model)), {})
    model._group = group
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(model._reduce)
    return model


class Spread:
    """All ranks' tokens through this rank's experts, and the sum over ranks for this rank's tokens."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __call__(self, weights: torch.Tensor, x: torch.Tensor, experts: Any) -> torch.Tensor:
        from torch.distributed.nn.functional import all_gather, all_reduce

        rank, size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        experts = experts.to_local() if hasattr(experts, "to_local") else experts
        weights = torch.cat(all_gather(weights.contiguous(), group=self.group))
        x = torch.cat(all_gather(x.contiguous(), group=self.group))
        weights = weights.chunk(size, dim=-1)[rank]
        y = all_reduce(torch.einsum("ble,bld,edo->blo", weights, x, experts), group=self.group)
        return y.chunk(size)[rank]


WRAPS = ("hsdp", "ddp", "fsdp2", "main_grad", "tp", "ep", "ep_plain")


def data_parallel(model: nn.Module, how: str, world: int, group: Any = None) -> nn.Module:
    """`how` is one of `WRAPS`. One rank needs none of the first two."""
    if how not in WRAPS:
        raise ValueError(f"wrap: {how!r} is none of {WRAPS}")
    if how == "tp":
        return tensor_parallel(model)
    if how in ("ep", "ep_plain"):
        return expert_parallel(model, group or distributed.group.WORLD, how == "ep")
    if how == "fsdp2":
        return fsdp2(model)
    if how == "main_grad":
        return main_grads(model)
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
