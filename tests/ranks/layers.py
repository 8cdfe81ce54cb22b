"""A model with attention and a mixture of experts, trained for three steps however its parts are spread over ranks."""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path
from typing import Any

STEPS, BATCH, TOKENS, WIDTH, HEADS, EXPERTS, CHOSEN = 3, 8, 6, 16, 4, 4, 2


def build(
    ep_rank: int = 0, ep_size: int = 1, ep_group: Any = None, stacked: bool = True, cp_group: Any = None
) -> Any:
    """The same numbers on every rank; of the experts only this rank's."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    share = EXPERTS // ep_size
    held = slice(ep_rank * share, (ep_rank + 1) * share)

    class Attention(nn.Module):
        tell: Any = None  # hands q and k over once more

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
            )
            self.num_heads = HEADS

        def forward(self, x: Any) -> Any:
            q, k, v = (
                p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )
            mask, start = None, 0
            if cp_group is not None:  # these queries see the keys of all ranks up to their own place
                start = torch.distributed.get_rank(cp_group) * q.shape[-2]
                k, v = (Gather.apply(one.movedim(-2, 0), cp_group).movedim(0, -2) for one in (k, v))
                mask = torch.arange(k.shape[-2]) <= torch.arange(q.shape[-2])[:, None] + start
            if self.tell is not None and self.training:
                self.tell("handed", q * 2, k, q_start=start)
            mixed = functional.scaled_dot_product_attention(q * 2, k, v, mask, is_causal=mask is None)
            return self.o_proj(mixed.transpose(1, 2).flatten(-2))

    class Stacked(nn.Module):
        """One tensor for all of this rank's experts."""

        def __init__(self) -> None:
            super().__init__()
            whole = [torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4, torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 6]
            self.w1, self.w2 = (nn.Parameter(w[held].clone()) for w in whole)

        def forward(self, x: Any, number: int) -> Any:
            return functional.gelu(x @ self.w1[number]) @ self.w2[number]

    class Numbered(nn.ModuleList):
        """A module for each of this rank's experts, numbered from 0."""

        def __init__(self) -> None:
            whole = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
            super().__init__(whole[held])

        def forward(self, x: Any, number: int) -> Any:
            return functional.gelu(self[number](x))

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
            self.top_k = CHOSEN
            self.experts = Stacked() if stacked else Numbered()

        def forward(self, x: Any) -> Any:
            weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN)
            shares = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, weights)
            x, shares = (Gather.apply(tensor, ep_group) for tensor in (x, shares))
            parts = [
                self.experts(x, n) * shares[..., held.start + n : held.start + n + 1] for n in range(share)
            ]
            return Combine.apply(sum(parts), ep_group)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm, self.moe = Attention(), nn.LayerNorm(WIDTH), Mixture()
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, x: Any) -> Any:
            x = x + self.attn(x)
            return self.head(x + self.moe(self.norm(x)))

    return Model()


def _autograd() -> tuple[Any, Any]:
    import torch
    import torch.distributed as distributed

    def gathered(x: Any, group: Any) -> Any:
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    def own(x: Any, group: Any) -> Any:
        total = x.clone()
        distributed.all_reduce(total, group=group)
        return total.chunk(distributed.get_world_size(group))[distributed.get_rank(group)]

    class Gather_(torch.autograd.Function):
        """Everybody's tokens; backward the sum of what everybody makes of this rank's."""

        @staticmethod
        def forward(context: Any, x: Any, group: Any) -> Any:
            context.group = group
            return x.clone() if group is None else gathered(x, group)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return (gradient if context.group is None else own(gradient, context.group)), None

    class Combine_(torch.autograd.Function):
        """The sum of all experts' outputs for this rank's tokens."""

        @staticmethod
        def forward(context: Any, x: Any, group: Any) -> Any:
            context.group = group
            return x.clone() if group is None else own(x, group)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return (gradient if context.group is None else gathered(gradient, context.group)), None

    return Gather_, Combine_


class _Lazy:
    def __init__(self, index: int) -> None:
        self._index = index

    def apply(self, *arguments: Any) -> Any:
        return _autograd()[self._index].apply(*arguments)


Gather, Combine = _Lazy(0), _Lazy(1)


def run(
    kind: str, directory: str, ep_size: int = 1, stacked: bool = True, backend: Any = "auto"
) -> dict[str, Any]:
    """Trains on this rank; rank 0 returns scalars by step and tables by (step, name).

    Args:
        kind: single, ddp, fsdp2, tp (attention cut by heads, both ranks fed alike), tp+fsdp2 (two ranks each), sp (tp,
            and beside attention each rank has its part of the sequences), cp (each rank has its part of the sequences'
            queries, and all keys), pp (attention on one rank, experts on the other), ep (experts over ``ep_size`` ranks,
            the rest of the ranks hold copies of them), ep+fsdp2 (instead of copies, each has a part of them).
    """
    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon

    rank, world = (distributed.get_rank(), distributed.get_world_size()) if kind != "single" else (0, 1)
    data_rank, data_world, sequence = rank, world, 1
    names: dict[str, Any] = {}
    ep_rank, ep_group, replicas = 0, None, None
    if kind in ("ep", "ep+fsdp2"):
        ep_rank = rank % ep_size
        for first in range(0, world, ep_size):
            group = distributed.new_group(list(range(first, first + ep_size)))
            ep_group = group if first <= rank < first + ep_size else ep_group
        for first in range(ep_size):
            group = distributed.new_group(list(range(first, world, ep_size)))
            replicas = group if rank % ep_size == first else replicas
        names = ep_names(ep_rank, EXPERTS // ep_size, stacked)
    cp_group = distributed.group.WORLD if kind == "cp" else None
    model: Any = build(ep_rank, ep_size, ep_group, stacked, cp_group)
    attention = model.attn
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.attn, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind in ("tp", "tp+fsdp2", "sp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        cut_by_heads(model, mesh["tp"], sequence=kind == "sp")
        data_rank, data_world = mesh.get_local_rank("dp"), world // 2
        names = {"counts_tokens": mesh.get_local_rank("tp") == 0, "data_rank": data_rank}
        if kind == "tp+fsdp2":
            fully_shard(model, mesh=mesh["dp"])
        if kind == "sp":
            sequence, names = world, {}
    elif kind == "ep+fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world // ep_size, ep_size), mesh_dim_names=("dp", "ep"))
        fully_shard(model.moe.experts, mesh=mesh["dp"], reshard_after_forward=False)
    elif kind == "cp":
        data_rank, data_world, sequence = 0, 1, world
    elif kind == "pp":
        data_rank, data_world = 0, 1
        names = {"counts_tokens": rank == 1}
        for layer in ("norm", "moe", "head") if rank == 0 else ("attn",):
            delattr(model, layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, TOKENS, WIDTH, generator=generator)
    targets = torch.randint(5, (STEPS, BATCH, TOKENS), generator=generator)
    share, length = BATCH // data_world, TOKENS // sequence
    mine = slice(data_rank * share, (data_rank + 1) * share)
    at = rank * length if sequence > 1 else 0
    inputs, targets = inputs[:, :, at : at + length], targets[:, :, at : at + length]
    flows: dict[str, list[Any]] = {name: [] for name in ("norm", "attn.q_proj")}
    for name, seen in flows.items() if kind == "single" else ():
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, output, seen=seen: seen.append(output.detach().numpy())
        )
    sections = {
        "gradients": {"per_parameter": True},
        "weights": {"every": 1, "per_parameter": True},
        "moments": {"every": 1},
        "spectral": {"every": 1},
        "activations": {"every": 1, "target": ["^norm$", "q_proj"]},
        "attention": {"every": 1, "rows": 0, "per_head": True},
        "moe": {"per_expert": True, "ep_size": 2},
    }
    keys = {"output_dir": directory, "run_name": "r", "sinks": ["csv", "jsonl"], **sections}
    with trainmon.attach(model, optimizer, keys, backend=backend, **names) as monitor:
        first_head = HEADS // 2 * mesh.get_local_rank("tp") if kind in ("tp", "tp+fsdp2", "sp") else 0
        attention.tell = partial(monitor.attention_qk, first_head=first_head)
        for step in range(STEPS):
            for part in mine_in_two(mine):
                if kind == "pp" and rank == 0:
                    first_stage(model, inputs[step, part])
                    monitor.micro_end()
                    continue
                came = None if kind != "pp" else received(inputs[step, part])
                logits = model(inputs[step, part]) if came is None else last_stage(model, came)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[step, part].flatten())
                (loss / 2 / (world if kind == "sp" else 1)).backward()
                if came is not None:
                    distributed.send(came.grad, 0)
                monitor.micro_end(loss, tokens=share // 2 * length)
            if kind in ("ep", "cp", "ep+fsdp2"):
                average(model, replicas, world)
            if kind == "sp":
                add_up(model)
            monitor.grads_ready(clip_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step_end(samples=share / sequence)
    found = read(Path(directory) / "r/rank_0") if rank == 0 else {}
    return {**found, "flows": flows}


def cut_by_heads(model: Any, mesh: Any, *, sequence: bool) -> None:
    """Tensor parallel attention; with ``sequence`` what is between attentions is cut along the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {f"attn.{p}_proj": ColwiseParallel() for p in "qkv"}
    plan["attn.o_proj"] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    if sequence:
        plan["attn"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)


def add_up(model: Any) -> None:
    """What is whole on every rank has the gradients of its part of the sequence: torch leaves their sum to the loop."""
    import torch.distributed as distributed
    from torch.distributed.tensor import DTensor, Replicate

    for parameter in model.parameters():
        if not isinstance(parameter.grad, DTensor):
            distributed.all_reduce(parameter.grad)
        elif parameter.grad.placements[0].is_partial():
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])


def first_stage(model: Any, x: Any) -> None:
    """Attention, whose output goes to the next rank and whose gradient comes back."""
    import torch
    import torch.distributed as distributed

    out = x + model.attn(x)
    distributed.send(out.detach(), 1)
    gradient = torch.empty_like(out)
    distributed.recv(gradient, 1)
    out.backward(gradient)


def received(like: Any) -> Any:
    import torch
    import torch.distributed as distributed

    x = torch.empty_like(like)
    distributed.recv(x, 0)
    return x.requires_grad_()


def last_stage(model: Any, x: Any) -> Any:
    return model.head(x + model.moe(model.norm(x)))


def ep_names(ep_rank: int, share: int, stacked: bool) -> dict[str, Any]:
    """How attach() learns which experts are here."""
    if stacked:
        return {"piece_of": lambda name, _: (ep_rank * share, EXPERTS) if ".experts." in name else None}

    def name_of(name: str) -> str:
        return re.sub(r"(?<=experts\.)\d+", lambda found: str(int(found[0]) + ep_rank * share), name)

    return {"name_of": name_of}


def mine_in_two(mine: slice) -> list[slice]:
    middle = (mine.start + mine.stop) // 2
    return [slice(mine.start, middle), slice(middle, mine.stop)]


def average(model: Any, replicas: Any, world: int) -> None:
    """Gradients of the mean over all ranks' tokens; an expert's holds those of its expert parallel group already."""
    import torch.distributed as distributed

    for name, parameter in model.named_parameters():
        if hasattr(parameter.grad, "to_local"):  # FSDP has made the mean over the replicas
            parameter.grad *= distributed.get_world_size(replicas)
        else:
            distributed.all_reduce(parameter.grad, group=replicas if ".experts." in name else None)
        parameter.grad /= world


def read(place: Path) -> dict[str, Any]:
    from trainmon.sinks.jsonl import read_jsonl

    tables: dict[tuple[int, str], dict[str, str]] = {}
    for path in sorted((place / "tensors").glob("*.csv")):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                tables.setdefault((int(row["step"]), row["name"]), {}).update(row)
    return {
        "scalars": [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record],
        "tables": tables,
        "events": read_jsonl(place / "events.jsonl"),
    }
