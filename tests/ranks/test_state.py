"""State under FSDP2: evaluations and reloads between steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import on_ranks


def _reload(directory: str) -> dict[str, Any]:
    import torch
    import torch.distributed as distributed
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Linear(5, 1)
    )  # 5 and 1 rows on two ranks: uneven, and an empty piece
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every = {"every": 1, "per_parameter": True}
    config = {
        "output_dir": directory,
        "run_name": "r",
        "sinks": {"log": False},
        "weights": every,
        "moments": every,
        "updates": every,
    }
    truth: list[dict[str, float]] = []

    def whole() -> dict[str, Any]:
        return {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}

    with trainmon.attach(model, optimizer, config) as monitor:
        for step in range(1, 6):
            if step == 3:
                half = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
                model.load_state_dict(half)
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            before = whole()
            torch.manual_seed(step)
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = whole()
            moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
            truth.append(
                {
                    "update/norm": math.hypot(*(float((after[n] - before[n]).norm()) for n in after)),
                    "weight/norm": math.hypot(*(float(tensor.norm()) for tensor in after.values())),
                    "moment/norm/exp_avg": math.hypot(*(float(tensor.norm()) for tensor in moments)),
                }
            )
            with torch.no_grad():
                model(torch.randn(4, 6))  # leaves the root's parameters gathered
            monitor._watch.parameters._age = 1000  # and the model is listed anew just then
            monitor.step_end()
    if distributed.get_rank():
        return {}
    place = Path(directory) / "r/rank_0"
    scalars = [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]
    names = sorted(monitor._watch.parameters.names)
    events = [
        event for event in read_jsonl(place / "events.jsonl") if event.get("level") in ("warning", "error")
    ]
    return {"scalars": scalars, "truth": truth, "names": names, "events": events}


def test_evaluations_and_reloads_between_steps_of_fsdp(tmp_path: Path) -> None:
    found = on_ranks(2, _reload, str(tmp_path))[0]
    assert found["names"] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    for record, truth in zip(found["scalars"], found["truth"], strict=True):
        for name, value in truth.items():
            assert record[name] == pytest.approx(value, rel=1e-5), (record["step"], name)
    assert found["events"] == []


def _grow(directory: str) -> Any:
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "output_dir": directory,
        "run_name": "r",
        "sinks": {"log": False},
        "weights": {"every": 1},
        "updates": {"every": 1},
    }
    truth = []
    with trainmon.attach(model, optimizer, config) as monitor:
        for step in range(1, 7):
            if step == 2:
                model.append(nn.Linear(3, 3))
                optimizer.param_groups[0]["params"].extend(model[1].parameters())
            if step == 5:
                model[0].weight.requires_grad_(False)
                model[0].weight.grad = None
            before = [p.detach().clone() for p in model.parameters()]
            model(torch.ones(2, 3)).square().mean().backward()
            monitor.grads_ready()
            counted = [p for p in model.parameters() if p.requires_grad]
            gradient = math.hypot(*(float(p.grad.norm()) for p in counted))
            optimizer.step()
            optimizer.zero_grad()
            moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
            truth.append(
                {
                    "grad/norm": gradient,
                    "weight/norm": math.hypot(*(float(p.detach().norm()) for p in counted)),
                    "update/norm": math.hypot(*(float(one.norm()) for one in moved)),
                }
            )
            monitor.step_end()
    if distributed.get_rank():
        return None
    scalars = read_jsonl(Path(directory) / "r/rank_0/scalars.jsonl")
    return [record for record in scalars if "step" in record], truth


def test_parameters_that_come_or_are_frozen_under_way_count_soon_on_many_ranks(tmp_path: Path) -> None:
    scalars, truth = on_ranks(2, _grow, str(tmp_path))[0]
    for record, expected in zip(scalars, truth, strict=True):
        if record["step"] in (2, 3, 5):
            continue  # on their way into the layout: a report, and the step in which it is merged
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=1e-5), (record["step"], name)
