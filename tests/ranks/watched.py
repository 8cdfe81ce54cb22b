"""A small model trained on every rank under health rules; what each rank did, and what was said."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

WIDTH, STEPS = 6, 8
STOP = {"series": ["loss/global", "grad/norm", "*/nonfinite"], "detector": "nonfinite", "name": "no NaN"}


def train(
    directory: str,
    health: dict[str, Any],
    bad: tuple[str, int, int] | None = None,
    backend: Any = "auto",
    parallel: bool = True,
    steps: int = STEPS,
    pause: float = 0.0,
) -> dict[str, Any]:
    """Trains on this rank.

    Args:
        bad: (loss, backward, gradient, weight, probe or kill; rank; step).
        parallel: under DistributedDataParallel; otherwise ranks that don't communicate.
        pause: seconds that each step takes beside.
    """
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, 2))
    inner = model
    if parallel:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = distributed.get_rank()
    kind, where, when = bad or ("", -1, -1)
    done, skipped, raised, began = 0, [], None, time.monotonic()
    keys = {"output_dir": directory, "run_name": "r", "sinks": {"log": False}, "health": health}
    keys |= {"weights": {"every": 1}, "gradients": {"device": kind == "backward"}}
    mon: Any = None
    try:
        with trainmon.attach(model, optimizer, keys, backend=backend) as mon:
            for step in range(1, steps + 1):
                hit = (rank, step) == (where, when)
                torch.manual_seed(100 * step + rank)
                # The loss is finite; what comes back through the activation is not.
                broken = hit and kind == "backward"
                hook = inner[1].register_forward_hook(_break_gradient) if broken else None
                loss = model(torch.randn(4, WIDTH)).square().mean()
                if hit and kind == "loss":
                    loss = loss * float("nan")
                loss.backward()
                if hook is not None:
                    hook.remove()
                if hit and kind == "gradient":
                    inner[2].bias.grad[1] = float("nan")
                mon.micro_end("no number" if hit and kind == "probe" else loss, tokens=4)
                if mon.grads_ready().skip:
                    skipped.append(step)
                else:
                    optimizer.step()
                optimizer.zero_grad()
                if hit and kind == "weight":
                    with torch.no_grad():
                        inner[0].weight[3, 2] = float("inf")
                if hit and kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(pause)
                mon.step_end()
                done = step
                if mon.should_stop:
                    break
    except trainmon.TrainingStopped as error:
        raised = str(error)
    return {
        "done": done,
        "skipped": skipped,
        "raised": raised,
        "reason": mon.stop_reason,
        "seconds": time.monotonic() - began,
        "finite": all(bool(parameter.isfinite().all()) for parameter in model.parameters()),
        "state": mon.state_dict()["health"],
        **(read(Path(directory)) if rank == 0 else {}),
    }


def _break_gradient(module: Any, inputs: Any, output: Any) -> None:
    output.register_hook(lambda gradient: gradient * float("nan"))


def stories(directory: str, names: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """Several trainings one after the other on the same ranks."""
    return {name: train(os.path.join(directory, name), *arguments) for name, arguments in names.items()}


def read(directory: Path) -> dict[str, Any]:
    from trainmon.sinks.jsonl import read_jsonl
    from trainmon.sinks.run_file import read_run

    place = directory / "r/rank_0"
    run = read_run(directory / "r")
    assert run is not None
    return {
        "scalars": [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record],
        "events": [event for event in read_jsonl(place / "events.jsonl") if "kind" in event],
        "life": run["lives"][-1],
    }


def maximum_loses_nan(directory: str) -> list[dict[str, Any]]:
    """Gradients [1, 2, 3] and [1, nan, 3] on two ranks, then swapped: what this rank decides, what rank 0 says."""
    import torch
    import torch.distributed as distributed

    import trainmon

    found = []
    for bad in (0, 1):
        layer = torch.nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        folder = os.path.join(directory, str(bad))
        keys = {"output_dir": folder, "run_name": "r", "sinks": {"log": False}}
        health = {"gate": "before_update", "rules": [{**STOP, "action": "stop"}]}
        with trainmon.attach(layer, optimizer, keys, health=health) as mon:
            values = [1.0, float("nan") if distributed.get_rank() == bad else 2.0, 3.0]
            layer.weight.grad = torch.tensor([values])
            decision = mon.grads_ready()
            mon.step_end()
        said = read(Path(folder)) if distributed.get_rank() == 0 else {}
        found.append({"skip": decision.skip, "step": decision.step, "reason": decision.reason, **said})
    return found


def scaled(directory: str) -> dict[str, Any]:
    """A gradient scaler that meets an infinite loss in step 2 on one rank: overflow, not illness."""
    import torch
    import torch.distributed as distributed

    import trainmon

    layer: Any = torch.nn.Linear(2, 1, bias=False)
    layer = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    with trainmon.attach(
        layer, optimizer, {"output_dir": directory, "run_name": "r", "sinks": {"log": False}}
    ) as mon:
        for step in (1, 2, 3, 4):
            scale = scaler.get_scale()
            loss = layer(torch.ones(1, 2)).sum()
            bad = step == 2 and distributed.get_rank() == 1
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            mon.grads_ready(loss_scale=scale)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            mon.step_end(loss=loss, tokens=1, overflow=scaler.get_scale() < scale)
    return read(Path(directory)) if distributed.get_rank() == 0 else {}
