"""A small model trained for three steps under any kind of parallelism; what trainmon said of it."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

STEPS, BATCH, TOKENS, WIDTH = 3, 8, 5, 12


def run(
    kind: str,
    directory: str,
    nan_on: tuple[int, int] | None = None,
    dies_on: tuple[int, int] | None = None,
    backend: Any = "auto",
    **keys: Any,
) -> dict[str, Any]:
    """Trains on this rank, and returns the run's scalars by step and its tables by series, step and name (rank 0's).

    Args:
        kind: single, plain (ranks that don't communicate), ddp, zero, fsdp1, fsdp2, tp, tp+fsdp2, pp, pp+ddp.
        nan_on: (rank, step) where the last gradient gets a NaN at index 1 before it is watched.
        dies_on: (rank, step) at whose end the process kills itself.
        backend: of attach().
        keys: configuration keys beside the usual ones.
    """
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon

    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
    )
    rank = distributed.get_rank() if kind != "single" else 0
    world = distributed.get_world_size() if kind != "single" else 1
    data_rank, data_world, counts = rank, world, True
    if kind in ("ddp", "zero"):
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind in ("tp", "tp+fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        tensor = 2
        mesh2 = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh2["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        data_rank, data_world = mesh2.get_local_rank("dp"), world // tensor
        counts = mesh2.get_local_rank("tp") == 0
        if kind == "tp+fsdp2":
            fully_shard(model, mesh=mesh2["dp"])
    pipeline: Pipeline | None = None
    if kind in ("pp", "pp+ddp"):
        pipeline = Pipeline(model, BATCH // (world // 2))
        model = pipeline.module
        data_rank, data_world, counts = pipeline.data_rank, world // 2, pipeline.is_last
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    inputs = torch.randn(STEPS, BATCH, TOKENS, WIDTH)
    targets = torch.randint(4, (STEPS, BATCH, TOKENS))
    share = BATCH // data_world
    mine = slice(data_rank * share, (data_rank + 1) * share)
    with trainmon.attach(
        model,
        optimizer,
        {
            "output_dir": directory,
            "run_name": "r",
            "sinks": {"log": False},
            "gradients": {"per_parameter": True},
            "weights": {"every": 1, "per_parameter": True},
            "moments": {"every": 1, "per_parameter": True},
            "updates": {"every": 1, "per_parameter": True, "adam": True},
            "spectral": {"every": 1},
            **keys,
        },
        counts_tokens=counts,
        backend=backend,
        consumed_tokens=1000,
    ) as monitor:
        for step in range(STEPS):
            if pipeline is not None:
                losses = pipeline.step(inputs[step, mine], targets[step, mine])
            else:
                losses = [cross_entropy(model(inputs[step, mine]), targets[step, mine])]
                losses[0].backward()
            if nan_on == (rank, step + 1):
                gradient = next(p.grad for p in reversed(list(model.parameters())) if p.grad is not None)
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                gradient.view(-1)[1] = float("nan")
            for loss in losses:
                monitor.micro_end(loss, tokens=share * TOKENS // len(losses))
            monitor.grads_ready(clip_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step_end(samples=share)
            if dies_on == (rank, step + 1):
                os.kill(os.getpid(), signal.SIGKILL)
    if rank != 0:
        return {}
    return read(Path(directory))


def cross_entropy(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """Two stages of the model, its layers under their names in the whole, with replicas where there are more ranks."""

    def __init__(self, model: Any, batch: int, micros: int = 2) -> None:
        from collections import OrderedDict

        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        world = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
        index = mesh.get_local_rank("pp")
        self.is_last, self.data_rank = index == 1, mesh.get_local_rank("dp")
        cuts = [("0", "1", "2"), ("3", "4")]
        layers = dict(model.named_children())
        self.module: Any = nn.Sequential(OrderedDict((name, layers[name]) for name in cuts[index]))
        self._replicas = mesh["dp"].get_group() if world > 2 else None
        example = torch.zeros(batch // micros, TOKENS, WIDTH)
        stage = PipelineStage(
            self.module, index, 2, torch.device("cpu"), input_args=(example,), group=mesh["pp"].get_group()
        )
        self._schedule = ScheduleGPipe(stage, micros, loss_fn=cross_entropy)

    def step(self, inputs: Any, targets: Any) -> list[Any]:
        """Forward and backward of all micro-batches; their losses on the last stage, None elsewhere."""
        import torch.distributed as distributed

        losses: list[Any] = []
        if self.is_last:
            self._schedule.step(target=targets, losses=losses)
        else:
            self._schedule.step(inputs)
        if self._replicas is not None:
            for parameter in self.module.parameters():
                distributed.all_reduce(parameter.grad, distributed.ReduceOp.AVG, group=self._replicas)
        return losses


def read(directory: Path) -> dict[str, Any]:
    from trainmon.sinks.jsonl import read_jsonl

    place = directory / "r/rank_0"
    records = [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]
    rows: dict[tuple[str, int, str], float | None] = {}
    for path in sorted((place / "tensors").glob("*.csv")):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                step, name = int(row.pop("step")), row.pop("name")
                rows |= {(series, step, name): float(cell) if cell else None for series, cell in row.items()}
    return {"scalars": records, "rows": rows, "events": read_jsonl(place / "events.jsonl")}


def run_with_other_sections(directory: str) -> str:
    """What attach() says when the ranks are configured differently."""
    import torch.distributed as distributed

    said = "nothing"
    try:
        run("plain", directory, loss=distributed.get_rank() == 0)
    except ValueError as error:
        said = str(error)
    distributed.barrier()  # a rank that ends first would be lost to the other, which is told no more then
    return said
