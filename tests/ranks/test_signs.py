"""grad/sign_agreement over ranks: every element of a gradient once, wherever it and its momentum lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import on_ranks

STEPS = 4


def _train(kind: str, directory: str) -> dict[str, Any]:
    """What rank 0's file says, and what a copy of the optimizer on this rank says that is given whole gradients."""
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    alone = copy.deepcopy(model)
    make: Any = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731
    if kind in ("ddp", "zero"):
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("one", "two"))
        if kind == "tp":
            parallelize_module(model, mesh["two"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        elif kind == "hsdp":
            fully_shard(model, mesh=mesh)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = make(model.parameters())
    reference = make(alone.parameters())
    config = {"output_dir": directory, "run_name": "r", "sinks": {"log": False}, "gradients": {"signs": True}}
    truth: list[float | None] = []
    with trainmon.attach(model, optimizer, config) as monitor:
        for step in range(STEPS):
            torch.manual_seed(10 * step + (0 if kind == "tp" else rank))
            (model(torch.randn(4, 7)) - 1).square().mean().backward()
            products = []
            for parameter, twin in zip(model.parameters(), alone.parameters(), strict=True):
                gradient = parameter.grad
                twin.grad = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
                if reference.state:
                    momentum = reference.state[twin]["exp_avg"]
                    products.append((torch.sign(twin.grad) * torch.sign(momentum)).flatten())
            truth.append(float((torch.cat(products).double().mean() + 1) / 2) if products else None)
            monitor.grads_ready()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            monitor.step_end()
    if rank:
        return {}
    place = Path(directory) / "r/rank_0"
    return {
        "truth": truth,
        "values": [
            one["grad/sign_agreement"] for one in read_jsonl(place / "scalars.jsonl") if "step" in one
        ],
        "wrong": [
            one for one in read_jsonl(place / "events.jsonl") if one.get("level") in ("warning", "error")
        ],
    }


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("zero", 2), ("fsdp2", 2), ("hsdp", 4), ("tp", 2)])
def test_each_element_once(kind: str, ranks: int, tmp_path: Path) -> None:
    found = on_ranks(ranks, _train, kind, str(tmp_path), timeout=60)[0]
    assert found["values"] == [None, *(pytest.approx(value, rel=1e-9) for value in found["truth"][1:])]
    assert len(set(found["values"])) > 2 and not found["wrong"]
