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
            monitor._list._age = 1000  # and the model is listed anew just then
            monitor.step_end()
    if distributed.get_rank():
        return {}
    place = Path(directory) / "r/rank_0"
    scalars = [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]
    names = sorted(monitor._list.names)
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
