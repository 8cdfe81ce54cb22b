"""Silent corruption: a replica whose bits differ is named with its tensor and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.gloo import on_ranks
from trainmon.backend.host import HostBackend
from trainmon.config.schema import ReplicasConfig
from trainmon.dist import Gathering, Single
from trainmon.events import TensorView
from trainmon.pieces import Pieces
from trainmon.replicas import Replicas


def train(directory: str, flip_on: int | None, backend: Any, sharded: bool = False) -> Any:
    """Six steps on equal data; after step 3 one bit of one weight flips on one rank."""
    import torch

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keys = {"output_dir": directory, "run_name": "r", "sinks": {"log": False}, "replicas": {"every": 2}}
    rank = torch.distributed.get_rank()
    with trainmon.attach(model, optimizer, keys, backend=backend) as mon:
        for step in range(1, 7):
            loss = model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
            loss.backward()
            mon.micro_end(loss, 4)
            optimizer.step()
            optimizer.zero_grad()
            if step == 3 and rank == flip_on:
                model[2].weight.data.view(torch.int32)[1, 2] ^= 1
            mon.step_end()
    events = Path(directory) / "r/rank_0/events.jsonl"
    return read_jsonl(events) if rank == 0 else None


@pytest.mark.parametrize(("ranks", "bad", "backend"), [(3, 1, "host"), (3, 0, "torch"), (2, 1, "host")])
def test_one_flipped_bit_is_named(ranks: int, bad: int, backend: str, tmp_path: Path) -> None:
    events = on_ranks(ranks, train, str(tmp_path), bad, backend)[0]
    found = [event for event in events if event.get("kind") == "replicas_differ"]
    first = found[0]
    assert first["data"]["name"] == "2.weight" and first["step"] == 4
    assert first["data"]["holders"] == list(range(ranks))
    assert first["data"]["differing"] == ([bad] if ranks > 2 else [0, 1])
    names = [event["data"]["name"] for event in found]
    assert len(names) == len(set(names)), "each once while it lasts"
    words = f"rank {bad} differs" if ranks > 2 else "no majority"
    assert words in first["text"]


@pytest.mark.parametrize("sharded", [False, True])
def test_equal_replicas_and_shards_are_no_matter(sharded: bool, tmp_path: Path) -> None:
    events = on_ranks(2, train, str(tmp_path), None, "auto", sharded)[0]
    assert not [event for event in events if event.get("level") in ("warning", "error")]


class _Model:
    """Weights of 1 MiB each, as a model view gives them."""

    def __init__(self, count: int) -> None:
        self.names = [f"w{i}" for i in range(count)]
        self.tensors = [np.full(1 << 17, float(i)) for i in range(count)]

    def weights(self) -> TensorView:
        return TensorView(self.names, self.tensors)


class _Twins(Single):
    """Two ranks that hold the same."""

    size = 2

    def gather(self, values: Any) -> Gathering:
        class Rows:
            def wait(self) -> Any:
                return np.stack([values, values])

        return Rows()


def test_a_budget_bounds_each_check_and_every_piece_has_its_turn() -> None:
    model, keys = _Model(7), np.arange(7, dtype=np.uint64)
    replicas = Replicas(ReplicasConfig(every=1, megabytes=2), _Twins(), HostBackend())
    replicas.register(model.names, [Pieces(keys, np.full(7, 1 << 20, np.uint64))] * 2)
    looked = []
    for step in range(1, 9):
        check = replicas.look(step, model)  # type: ignore[arg-type]
        assert check is not None
        prints = check.prints.finish()
        assert 1 <= len(prints) <= 2, "2 MiB a check"
        looked += prints[:, 0].tolist()
        replicas.start(check, prints)
        assert replicas.finish(merged=True) == []
    assert len(set(looked)) == 7
    assert len(looked) == 14, "four checks see all of them once"


def test_a_rank_that_cannot_read_its_weights_still_takes_part() -> None:
    model, keys = _Model(2), np.arange(2, dtype=np.uint64)
    replicas = Replicas(ReplicasConfig(every=1), _Twins(), HostBackend())
    replicas.register(model.names, [Pieces(keys, np.full(2, 1 << 20, np.uint64))] * 2)
    model.tensors[1] = object()  # type: ignore[call-overload]
    check = replicas.look(1, model)  # type: ignore[arg-type]
    assert check is not None and not check.holds.any() and "TypeError" in check.problem
    replicas.start(check, check.prints.finish())
    assert replicas.finish(merged=True) == []
