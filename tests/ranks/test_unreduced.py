"""What a rank's hooks see of gradients under data, tensor and sharded parallelism: before the reduction, or nothing."""

from __future__ import annotations

import contextlib
import copy
import csv
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import on_ranks

MICROS = 3


def _train(kind: str, directory: str) -> dict[str, Any]:
    """Two steps of three micro-batches; what rank 0's files say, and what autograd says of this rank alone."""
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    alone = copy.deepcopy(model)
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp views")
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (world,))
        if kind == "tp":
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth: dict[str, float] = {}
    config = {
        "output_dir": directory,
        "run_name": "r",
        "sinks": {"log": False},
        "gradients": dict.fromkeys(("local", "device", "micro", "increment"), True) | {"micro_every": 1},
    }
    with trainmon.attach(model, optimizer, config) as monitor:
        for step in (1, 2):
            # The first step reduces once, the second after every micro-batch.
            for micro in range(MICROS):
                torch.manual_seed(100 * step + 10 * micro + (0 if kind == "tp" else rank))
                x = torch.randn(5, 6)
                once = step == 1 and micro < MICROS - 1 and kind.startswith("ddp")
                own = torch.autograd.grad(alone(x).square().mean(), list(alone.parameters()))
                for (name, _), gradient in zip(alone.named_parameters(), own, strict=True):
                    if kind == "tp":  # the first layer is cut by rows, the second by columns
                        gradient = gradient[:2] if name[0] == "0" else gradient[..., :2]
                    truth[f"{step} {name}@{micro}"] = float(gradient.norm())
                with model.no_sync() if once else contextlib.nullcontext():
                    model(x).square().mean().backward()
                monitor.micro_end()
            monitor.grads_ready()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step_end()
            if kind.startswith("ddp"):
                alone.load_state_dict(model.module.state_dict())
            elif kind == "tp":
                whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
                alone.load_state_dict(whole)
    place = Path(directory) / "r/rank_0"
    if rank:
        return {}
    rows: dict[str, dict[str, str]] = {}
    for path in (place / "tensors").glob("*.csv"):
        with path.open(newline="") as stream:
            rows.update({f"{row['step']} {row['name']}": row for row in csv.DictReader(stream)})
    events = read_jsonl(place / "events.jsonl")
    scalars = [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]
    return {
        "rows": rows,
        "truth": truth,
        "kinds": [event.get("kind") for event in events],
        "scalars": scalars,
    }


@pytest.mark.parametrize("kind", ["ddp", "ddp views"])
def test_under_ddp_hooks_see_this_ranks_own_gradients(kind: str, tmp_path: Path) -> None:
    found = on_ranks(2, _train, kind, str(tmp_path))[0]
    rows = found["rows"]
    for key, value in found["truth"].items():
        assert float(rows[key]["grad/norm_micro"]) == pytest.approx(value, rel=1e-5), key
    for key, row in rows.items():
        if key.startswith("1 ") and "@" not in key:
            # With no_sync the accumulated gradient is the sum of this rank's own.
            grown = [float(rows[f"{key}@{micro}"]["grad/norm_increment"]) for micro in range(MICROS)]
            assert float(row["grad/norm_local"]) == pytest.approx(math.fsum(grown), rel=1e-5)
            assert grown[0] == pytest.approx(found["truth"][f"{key}@0"], rel=1e-5)
    device = math.hypot(
        *(float(row["grad/norm_local"]) for key, row in rows.items() if key[0] == "1" and "@" not in key)
    )
    assert found["scalars"][0]["grad/norm_device"] == pytest.approx(device, rel=1e-6)
    assert "gradients_reduced_only" not in found["kinds"]


def test_under_tensor_parallel_hooks_see_this_ranks_piece(tmp_path: Path) -> None:
    found = on_ranks(2, _train, "tp", str(tmp_path))[0]
    for key, value in found["truth"].items():
        assert float(found["rows"][key]["grad/norm_micro"]) == pytest.approx(value, rel=1e-5), key


def test_under_fsdp_nothing_is_claimed_and_that_is_said(tmp_path: Path) -> None:
    found = on_ranks(2, _train, "fsdp2", str(tmp_path))[0]
    assert found["rows"] == {}
    assert [record["grad/norm_device"] for record in found["scalars"]] == [None, None]
    assert found["kinds"].count("gradients_reduced_only") == 1
