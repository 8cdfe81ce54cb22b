"""grad/align over ranks against the gradients of each rank by themselves, however they are reduced and spread."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.gloo import on_ranks

MICROS = 3


def _align(gradients: list[Any]) -> float:
    """Of each rank's whole gradient, in float64."""
    table = np.array(gradients, np.float64)
    return float(np.sum(table.mean(axis=0) ** 2) / np.mean(np.sum(table**2, axis=1)))


def _train(kind: str, directory: str) -> dict[str, Any]:
    """Two steps; what rank 0's files say, and what each data-parallel rank's gradients would give."""
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    rank, world = distributed.get_rank(), distributed.get_world_size()
    tensor_parallel = 2 if kind.startswith("tp") else 1
    data_rank, data_world = rank // tensor_parallel, world // tensor_parallel
    torch.manual_seed(0)

    class Model(nn.Sequential):
        def forward(self, x: Any, idle: bool = False) -> Any:
            return self[3](x[:, :4]) if idle else super().forward(x)

    model: Any = Model(nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    alone = copy.deepcopy(model)
    data_group = None
    if kind.startswith("ddp"):
        unused = kind == "ddp unused"
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=kind == "ddp views", find_unused_parameters=unused
        )
    elif kind in ("tp", "fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if kind == "tp":
            mesh = init_device_mesh("cpu", (data_world, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
            data_group = mesh["dp"].get_group()
        elif kind == "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (data_world // 2, 2), mesh_dim_names=("r", "s")))
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    summed = kind.startswith("sum")
    config = {
        "output_dir": directory,
        "run_name": "r",
        "sinks": {"log": False},
        "gradients": {"align": True, "reduction": "sum" if summed else "mean"},
    }
    truth = []
    with trainmon.attach(model, optimizer, config, data_rank=data_rank) as monitor:
        for step in (1, 2):
            mine = [torch.zeros_like(p) for p in alone.parameters()]
            tokens = 5 + data_rank  # ranks have batches of different sizes
            total = sum(5 + other for other in range(data_world))
            for micro in range(MICROS):
                torch.manual_seed(100 * step + 10 * micro + data_rank)
                x = torch.randn(tokens, 6)
                # A sum of tokens' losses over all tokens: averaged over ranks it must be scaled up first.
                weight = (1 if summed else data_world) / (total * MICROS)
                idle = kind == "ddp unused" and data_rank == 1 and step == 2

                def loss(module: Any, x: Any = x, weight: float = weight, idle: bool = idle) -> Any:
                    return (module(x, idle=idle) - 1).square().mean(-1).sum() * weight

                own = torch.autograd.grad(loss(alone), list(alone.parameters()), allow_unused=True)
                mine = [a if b is None else a + b for a, b in zip(mine, own, strict=True)]
                waits = kind.startswith("ddp") and kind != "ddp each" and micro < MICROS - 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss(model).backward()
                monitor.micro_end()
            if kind.startswith(("sum", "tp")):
                for p in model.parameters():
                    grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    distributed.all_reduce(grad, group=data_group)
                    if not summed:
                        grad /= data_world
            everybody = [torch.empty(sum(g.numel() for g in mine)) for _ in range(world)]
            distributed.all_gather(everybody, torch.cat([g.flatten() for g in mine]))
            truth.append(_align([g.numpy() for g in everybody[::tensor_parallel]]))
            monitor.grads_ready()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step_end()
            weights = {
                name.removeprefix("module."): tensor.full_tensor()
                if hasattr(tensor, "full_tensor")
                else tensor
                for name, tensor in model.state_dict().items()
            }
            alone.load_state_dict(weights)
    if rank:
        return {}
    place = Path(directory) / "r/rank_0"
    events = read_jsonl(place / "events.jsonl")
    return {
        "truth": truth,
        "values": [one["grad/align"] for one in read_jsonl(place / "scalars.jsonl") if "step" in one],
        "said": [event["text"] for event in events if event.get("kind") == "alignment_unknown"],
        "wrong": [event for event in events if event.get("level") in ("warning", "error")],
    }


@pytest.mark.parametrize(
    ("kind", "ranks"), [("ddp", 2), ("ddp views", 4), ("sum", 2), ("sum", 4), ("tp", 2), ("tp", 4)]
)
def test_the_ratio_of_each_ranks_gradient_by_itself(kind: str, ranks: int, tmp_path: Path) -> None:
    found = on_ranks(ranks, _train, kind, str(tmp_path), timeout=60)[0]
    assert found["values"] == pytest.approx(found["truth"], rel=1e-5)
    if (kind, ranks) == ("tp", 2):
        assert found["truth"] == [1.0, 1.0], "one rank of data"
    else:
        assert all(0 < value < 0.99 for value in found["truth"])
    assert not found["said"] and not found["wrong"]


def test_a_rank_that_leaves_a_parameter_out_has_a_gradient_of_zero(tmp_path: Path) -> None:
    found = on_ranks(2, _train, "ddp unused", str(tmp_path), timeout=60)[0]
    assert found["values"] == pytest.approx(found["truth"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [
        ("fsdp2", 2, "was never seen before its reduction"),
        ("hsdp", 4, "was never seen before its reduction"),
        ("ddp each", 2, "no_sync()"),
    ],
)
def test_what_is_reduced_before_it_is_seen_is_null_and_that_is_said(
    kind: str, ranks: int, reason: str, tmp_path: Path
) -> None:
    found = on_ranks(ranks, _train, kind, str(tmp_path), timeout=60)[0]
    assert found["values"] == [None, None]
    (said,) = found["said"]
    assert said.startswith("grad/align is null: ") and reason in said
