"""The same tiny training in the fakes of HyperParallel's trainers and in a plain loop, both watched."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

import trainmon
from tests.hosts.hyperparallel import (
    config_g3,
    config_lm,
    fake_g1,
    fake_g2,
    fake_g3,
    fake_g3_older,
)
from tests.hosts.hyperparallel import model as task
from trainmon.sinks.jsonl import read_jsonl
from trainmon.sinks.run_file import read_run

#: Trainers by name: the class, the configuration of its generation, how it weighs micro-batches.
TRAINERS: dict[str, tuple[Any, Any, str]] = {
    "g1": (fake_g1.LLMTrainer, config_lm, "token"),
    "g2": (fake_g2.LLMTrainer, config_lm, "token"),
    "g3_text": (fake_g3.TextTrainer, config_g3, "micro"),
    "g3_vlm": (fake_g3.VLMTrainer, config_g3, "micro"),
    "g3_base": (fake_g3.BaseTrainer, config_g3, "shifted"),
    "g3_older_text": (fake_g3_older.TextTrainer, config_g3, "micro"),
    "g3_older_base": (fake_g3_older.BaseTrainer, config_g3, "shifted"),
}
#: One of each generation.
EACH = ("g1", "g2", "g3_text")
#: Sections that look at everything that the tiny model has, at every step.
EVERYTHING: dict[str, Any] = {
    "loss": {"micro": True},
    "gradients": dict.fromkeys(("clipped", "per_parameter", "local", "device", "micro", "increment"), True)
    | {"micro_every": 1},
    "weights": {"every": 1, "per_parameter": True},
    "moments": {"every": 1},
    "spectral": {"every": 1},
    "updates": {"every": 1},
    "activations": {"every": 1, "target": "^(up|down|head)$"},
    "moe": {"per_expert": True},
}
#: What clocks and the program itself measure, and what differs between hosts on purpose.
_NOT_COMPARED = ("time/", "perf/", "trainmon/", "loss/part/", "data/consumed_samples")


def config(directory: Path, **keys: Any) -> dict[str, Any]:
    return {"output_dir": str(directory), "run_name": "r", "sinks": ["jsonl", "csv"], **keys}


def settings_of(name: str, **changes: Any) -> dict[str, Any]:
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    return task.settings(world=world, moe_monitor=name in ("g1", "g2"), **changes)


def build(
    name: str, settings: dict[str, Any], directory: Path, prepare: Callable[[Any], None] | None = None
) -> Any:
    """A trainer that leaves the process group to its maker where there was one."""
    make, kind, _ = TRAINERS[name]
    alone = not distributed.is_initialized()
    configuration = kind.from_settings(settings, str(directory / "checkpoints"))
    if prepare is not None:
        prepare(configuration)
    trainer = make(configuration)
    if not alone:
        inner = inner_of(trainer)
        inner._destroy = inner.destroy_distributed = lambda: None
    return trainer


def wrapped(how: str) -> Callable[[Any], None]:
    """For :func:`build`: one of the fakes' ways of holding parameters, or ``recompute``."""

    def prepare(configuration: Any) -> None:
        place = configuration.train.parallel if hasattr(configuration, "train") else configuration.fsdp_config
        if how == "recompute":
            place.recompute = True
        else:
            place.wrap = how

    return prepare


def inner_of(trainer: Any) -> Any:
    return getattr(trainer, "base", trainer)


def train(trainer: Any) -> None:
    """Without what the host warns of, and without a group of its own afterwards."""
    before = distributed.is_initialized() and distributed.get_world_size() > 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
    finally:
        if not before and distributed.is_initialized():
            distributed.destroy_process_group()


def spoil(trainer: Any, step: int, name: str = "head.weight", value: float = float("nan")) -> None:
    """One element of a gradient goes bad after the step's last backward pass."""
    inner = inner_of(trainer)

    def after_backward(now: int, index: int, count: int) -> None:
        if now == step and index == count - 1:
            parameter = dict(inner.model.named_parameters())[name]
            parameter.grad.view(-1)[1] = value

    inner.after_backward = after_backward


def plain(
    settings: dict[str, Any],
    weighting: str,
    keys: dict[str, Any],
    change: Callable[[Any], None] = lambda model: None,
) -> None:
    """The training as a loop of one's own, on this rank, watched by ``trainmon.attach``."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    world = settings["world"]
    model, optimizer, scheduler = task.build(settings)
    change(model)
    parameters = list(model.parameters())
    size, done = settings["micro_batches"], 0

    def summed(value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        if world > 1:
            distributed.all_reduce(total)
        return float(total)

    with trainmon.attach(model, optimizer, keys, total_steps=settings["max_steps"]) as mon:
        for epoch in range(settings["epochs"]):
            for first in range(0, settings["loader_len"] - size + 1, size):
                if done == settings["max_steps"]:
                    return
                batches = [task.micro_batch(settings, epoch, first + i, rank) for i in range(size)]
                counts = [task.valid_labels(batch)[weighting != "token"] for batch in batches]
                for batch, count in zip(batches, counts, strict=True):
                    loss = model(**batch).loss
                    total = summed(count) * size if weighting == "micro" else summed(sum(counts))
                    (loss * count / total).backward()
                    mon.micro_end(loss, count)
                if world > 1:
                    for parameter in parameters:
                        distributed.all_reduce(parameter.grad)
                limit = settings["max_grad_norm"]
                mon.grads_ready(clip_norm=limit if limit > 0 else None)
                norm = None
                if limit > 0:
                    norm = torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=False)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if settings["moe_monitor"]:
                    if world > 1:
                        distributed.all_reduce(model.moe.tokens_per_expert)
                    model.moe.update_expert_bias(settings["moe_lr"])
                mon.step_end(grad_norm=norm, samples=settings["rows"] * size)
                done += 1


class Attention(torch.nn.Module):
    """Two causal heads that add little to what they see; nothing of it is trained."""

    def __init__(self) -> None:
        super().__init__()
        for seed, name in enumerate(("q_proj", "k_proj")):
            layer = torch.nn.Linear(task.WIDTH, task.WIDTH, bias=False).requires_grad_(False)
            layer.weight.copy_(task.pattern(layer.weight.shape, 90 + seed, 4.0))
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.reshape(*y.shape[:2], 2, -1).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x), x)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + 0.125 * mixed.transpose(1, 2).reshape(x.shape)


def with_attention(model: Any) -> None:
    """Puts attention behind the embedding."""
    model.embed = torch.nn.Sequential(model.embed, Attention())


def steps_of(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    records = read_jsonl(directory / f"r/rank_{rank}/scalars.jsonl")
    return [record for record in records if "step" in record]


def said(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    records = [record for record in read_jsonl(directory / "r/rank_0/events.jsonl") if "kind" in record]
    return [record for record in records if kind is None or record["kind"] == kind]


def life_of(directory: Path) -> dict[str, Any]:
    run = read_run(directory / "r")
    assert run is not None
    return dict(run["lives"][-1])


def tables_of(directory: Path) -> dict[tuple[str, str, str], float]:
    """What is told of single tensors, layers and experts, by series, step and name."""
    found: dict[tuple[str, str, str], float] = {}
    for path in sorted((directory / "r/rank_0/tensors").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step, name = row.pop("step"), row.pop("name")
                found |= {(series, step, name): float(text) for series, text in row.items() if text}
    return found


def compared(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in record.items()
        if ("/" in key or key == "step") and not key.startswith(_NOT_COMPARED)
    }
