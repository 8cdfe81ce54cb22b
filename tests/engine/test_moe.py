"""Mixtures of experts with real torch: routers of every kind, counters, what the user hands over, memory over steps."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import trainmon  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

E, K, WIDTH = 4, 2, 6


def attach(
    model: nn.Module, directory: Path, *, backend: Any = "auto", optimizer: Any = None, **moe: Any
) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    keys = {
        "output_dir": str(directory),
        "run_name": "r",
        "sinks": ["csv", "jsonl"],
        "moe": {"per_expert": True, **moe},
    }
    return trainmon.attach(model, optimizer, keys, backend=backend)


def steps(directory: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(directory / "r/rank_0/scalars.jsonl") if "step" in record]


def loads(directory: Path, layer: str, step: int = 1, column: str = "moe/load") -> list[float | None]:
    found = {}
    for path in sorted((directory / "r/rank_0/tensors").glob("moe_*.csv")):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                if row["step"] == str(step) and row["name"].rpartition("/")[0] == layer:
                    found[int(row["name"].rpartition("/")[2])] = float(row[column]) if row[column] else None
    return [found[expert] for expert in sorted(found)]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(directory / "r/rank_0/events.jsonl") if event.get("kind") == kind]


class Experts(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH) for _ in range(E))

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            out = out + expert(x) * torch.where(chosen == number, weights, 0.0).sum(-1, keepdim=True)
        return out


class TopK(nn.Module):
    """A router as a module of its own: (weights, indices) and more."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, WIDTH))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        logits = nn.functional.linear(x, self.weight)
        weights, chosen = logits.softmax(-1).topk(K)
        match self.returns:
            case "indices":
                return weights, chosen, torch.histc(chosen.float(), E, 0, E)
            case "int32 first":
                return chosen.int(), weights, None
            case "map":
                return logits, torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)
            case "nothing":
                return None
            case _:
                return logits


class Mixture(nn.Module):
    """Mixtral's kind (a linear gate) or any of the others'; keeps what it chose for the test."""

    def __init__(self, returns: str = "linear", child: str = "gate") -> None:
        super().__init__()
        self.top_k, self.num_experts, self.child = K, E, child
        self.add_module(child, nn.Linear(WIDTH, E, bias=False) if returns == "linear" else TopK(returns))
        self.experts = Experts()
        self.register_buffer("tokens_per_expert", torch.zeros(E) if returns == "nothing" else None)
        self.chosen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, -2)
        router = self.get_submodule(self.child)
        router(x)
        weights, chosen = nn.functional.linear(x, router.weight).softmax(-1).topk(K)  # type: ignore[arg-type]
        if self.tokens_per_expert is not None:
            with torch.no_grad():
                self.tokens_per_expert += torch.bincount(chosen.flatten(), minlength=E)
        self.chosen.append(chosen)
        return self.experts.mix(x, weights, chosen)

    def taken(self) -> list[list[int]]:
        """Counts of each call since the last time."""
        counts = [torch.bincount(chosen.flatten(), minlength=E).tolist() for chosen in self.chosen]
        self.chosen.clear()
        return counts


def empty(layer: Any) -> None:
    layer.tokens_per_expert.zero_()


def max_vio(counts: Any) -> float:
    return float(np.max(counts) / np.mean(counts) - 1)


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize(
    ("returns", "child"),
    [("linear", "gate"), ("indices", "router"), ("int32 first", "gate"), ("map", "router"), ("logits", "wg")],
)
def test_routers_of_every_kind(tmp_path: Path, backend: Any, returns: str, child: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"a": Mixture(returns, child), "b": Mixture(returns, child), "dense": nn.Linear(2, 2)}
    )
    with attach(model, tmp_path, backend=backend) as mon:
        true: list[dict[str, list[list[int]]]] = []
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(2, 5, WIDTH)
                model.b(model.a(x)).sum().backward()
                mon.micro_end()
            true.append({name: model[name].taken() for name in "ab"})
            mon.step_end()
    total = {name: np.zeros(E) for name in "ab"}
    for step, (record, layers) in enumerate(zip(steps(tmp_path), true, strict=True), start=1):
        worst = []
        for name, micros in layers.items():
            counts = np.sum(micros, axis=0)
            total[name] += counts
            assert loads(tmp_path, name, step) == counts.tolist()
            assert record[f"moe/max_vio/{name}"] == pytest.approx(max_vio(counts))
            assert record[f"moe/max_vio_micro/{name}"] == pytest.approx(max(max_vio(c) for c in micros))
            for series in ("global", "window"):
                assert record[f"moe/max_vio_{series}/{name}"] == pytest.approx(max_vio(total[name]))
            share = counts / counts.sum()
            entropy = -float(np.sum(share * np.log(np.where(share > 0, share, 1))))
            assert record[f"moe/load_entropy_norm/{name}"] == pytest.approx(entropy / math.log(E))
            worst.append(max_vio(counts))
        assert record["moe/max_vio"] == pytest.approx(max(worst)) and record["moe/dead"] == 0
    assert "moe/churn/a" not in steps(tmp_path)[0] and steps(tmp_path)[1]["moe/churn/a"] > 0
    assert not events(tmp_path, "internal_error") and not events(tmp_path, "probe_failed")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("returns", ["linear", "indices", "nothing"])
def test_recomputed_passes_count_once(tmp_path: Path, returns: str, reentrant: bool) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"moe": Mixture(returns)})
    first = []
    with attach(model, tmp_path) as mon:
        for _ in range(2):
            x = torch.randn(3, WIDTH, requires_grad=True)
            checkpoint(model.moe, x, use_reentrant=reentrant).sum().backward()
            first.append(model.moe.taken()[0])
            mon.micro_end()
            mon.step_end()
    if returns != "nothing":  # a router that tells nothing is noticed in the first step
        assert loads(tmp_path, "moe", 1) == first[0]
    assert loads(tmp_path, "moe", 2) == first[1]


def test_counters_however_they_are_emptied(tmp_path: Path) -> None:
    """Never, at the optimizer's step by a hook that was there before, or when the loop pleases."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("tokens_per_expert", torch.zeros(E))
            self.register_buffer("expert_bias", torch.tensor([0.1, -0.2, 0.0, 0.0]))

        def forward(self, counts: list[float]) -> torch.Tensor:
            self.tokens_per_expert += torch.tensor(counts)
            return self.weight.sum()

    model = nn.ModuleDict({name: Counting() for name in ("never", "hook", "loop")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: empty(model.hook))
    given = [[[4.0, 0, 0, 0], [1.0, 1, 1, 1]], [[0, 2.0, 2, 0], [0, 0, 3.0, 1]]]
    with attach(model, tmp_path, optimizer=optimizer, bias_cap=0.2) as mon:
        for micros in given:
            for counts in micros:
                sum(layer(counts) for layer in model.values()).backward()
                mon.micro_end()
                model.loop.tokens_per_expert.zero_()
            optimizer.step()
            mon.step_end()
    for step, micros in enumerate(given, start=1):
        for name in model:
            assert loads(tmp_path, name, step) == np.sum(micros, axis=0).tolist(), (name, step)
    record = steps(tmp_path)[0]
    assert record["moe/bias_span/never"] == pytest.approx(0.3)
    assert record["moe/bias_saturated/never"] == 0.25


def test_what_the_user_hands_over(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with attach(model, tmp_path, capacity_factor=1.0, ep_size=2, placement=True) as mon:
        for step in range(2):
            mon.experts("ids", indices=torch.tensor([[0, 1], [0, 2], [0, 3]]), num_experts=E)
            mon.experts("ids", indices=np.array([0, 0, 9, -1]), num_experts=E)
            mon.experts(
                "counts", counts=[10, 0, 5, 5], dropped=4, placement=[0, 0, 1, 1] if step else [0, 1, 0, 1]
            )
            mon.experts("own", counts=torch.tensor([3, 1]), first_expert=2, num_experts=E)
            mon.step_end()
    first, second = steps(tmp_path)
    assert loads(tmp_path, "ids") == [5, 1, 1, 1]
    assert loads(tmp_path, "own") == [3, 1], "experts that nobody counted have no row"
    # formulas, §11
    for name, value in {
        "max_vio": 1.0, "min_vio": 1.0, "load_cv": 0.70711, "load_jain": 0.66667, "load_entropy": 1.03972,
        "load_entropy_norm": 0.75, "experts_effective": 2.82843, "load_gini": 0.375, "drop_rate": 0.2,
        "drop_forecast": 0.25, "drop_forecast_mf": 0.25, "ep_load_vio": 0.5,
    }.items():  # fmt: skip
        assert first[f"moe/{name}/counts"] == pytest.approx(value, abs=1e-5), name
    assert second["moe/ep_load_vio/counts"] == 0.0, "the second placement shares evenly"
    assert "moe/migration/counts" not in first and second["moe/migration/counts"] == 2
    assert first["moe/drop_rate/ids"] is None, "nobody measured it"
    assert first["moe/max_vio"] == 2.0, "of own: 3 of 4"
    (said,) = events(tmp_path, "invalid_experts")
    assert said["text"].startswith("2 assignments of ids at step 1 are to no expert from 0 to 3")


def test_forecasts_are_made_for_each_micro_batch(tmp_path: Path) -> None:
    with attach(nn.Linear(1, 1), tmp_path, capacity_factor=1.0) as mon:
        for counts in ([4, 0, 0, 0], [0, 4, 0, 0]):  # each overflows by 3; together they would only by 2 each
            mon.experts("x", counts=counts)
            mon.micro_end()
        mon.step_end()
    (record,) = steps(tmp_path)
    assert record["moe/drop_forecast/x"] == 6 / 8
    assert record["moe/max_vio/x"] == 1.0 and record["moe/max_vio_micro/x"] == 3.0


def test_steps_with_more_micro_batches_than_are_told_apart(tmp_path: Path) -> None:
    with attach(nn.Linear(1, 1), tmp_path, micros=2) as mon:
        for micros in (2, 3, 1, 4):
            for micro in range(micros):
                mon.experts("x", counts=[0, 0, 0, 0] if micro == 1 else [4 + micro, 1, 1, 2 - micro])
                mon.micro_end()
            mon.step_end()
    values = [record.get("moe/max_vio_micro/x") for record in steps(tmp_path)]
    assert values == [1.0, None, 1.0, None], "a micro-batch without assignments has no balance"
    (said,) = events(tmp_path, "micro_batches_not_told_apart")
    assert said["step"] == 2 and "steps have 3 micro-batches and moe.micros is 2" in said["text"]


def test_micro_batches_are_not_told_apart_at_all(tmp_path: Path) -> None:
    with attach(nn.Linear(1, 1), tmp_path, micros=0) as mon:
        mon.experts("x", counts=[4, 0, 0, 0])
        mon.step_end()
    (record,) = steps(tmp_path)
    assert record["moe/max_vio/x"] == 3 and "moe/max_vio_micro/x" not in record
    assert not events(tmp_path, "micro_batches_not_told_apart")


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_two_routings_of_the_same_tokens(tmp_path: Path, backend: Any) -> None:
    now = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 9]])
    before = torch.tensor([[1, 0], [2, 0], [2, 3], [9, 3]])
    with attach(nn.Linear(1, 1), tmp_path, backend=backend) as mon:
        mon.experts("x", indices=now, num_experts=E, previous=before)
        mon.experts("x", indices=now[:1], num_experts=E, previous=now[:1])
        mon.step_end()
        mon.experts("x", indices=now, num_experts=E)
        mon.step_end()
    first, second = steps(tmp_path)
    assert first["moe/assign_churn/x"] == pytest.approx(1 - (2 + 1 + 0 + 1 + 2) / 10)
    assert "moe/assign_churn/x" not in second


def test_counts_that_are_no_experts_are_refused(tmp_path: Path) -> None:
    with attach(nn.Linear(1, 1), tmp_path) as mon:
        mon.experts("x", counts=[1, 2], first_expert=3, num_experts=4)
        mon.step_end()
        mon.experts("x", counts=[1, 2], first_expert=2, num_experts=4)
        mon.step_end()
    (said,) = events(tmp_path, "probe_failed")
    assert "x has 4 experts: there are no counts of experts 3 to 4" in said["text"]
    assert loads(tmp_path, "x", 2)[-2:] == [1, 2]


def test_ages_windows_and_layers_that_come_later(tmp_path: Path) -> None:
    with attach(nn.Linear(1, 1), tmp_path, span=3, hold=2) as mon:
        for step in range(1, 7):
            mon.experts("x", counts=[9, 3, 0, 4] if step < 6 else [4, 4, 4, 4])
            if step >= 3:
                mon.experts("late", counts=[1, 1, 1, 1, 1])
            mon.step_end()
    records = steps(tmp_path)
    assert [record["moe/dead/x"] for record in records] == [0, 0, 1, 1, 1, 0]
    assert [record["moe/dead"] for record in records] == [0, 0, 1, 1, 1, 0]
    assert [record["moe/hot/x"] for record in records] == [0, 1, 1, 1, 1, 0]
    assert loads(tmp_path, "x", 5, "moe/dead_age") == [0, 0, 5, 0]
    assert records[5]["moe/max_vio_window/x"] == pytest.approx(max_vio([22, 10, 4, 12]))
    assert records[5]["moe/max_vio_global/x"] == pytest.approx(max_vio([49, 19, 4, 24]))
    assert "moe/max_vio/late" not in records[1] and records[2]["moe/max_vio/late"] == 0
    (said,) = events(tmp_path, "dead_experts")
    assert said["step"] == 3 and said["text"].endswith("2 of x")


def test_what_a_layer_counts_is_believed_rather_than_its_logits(tmp_path: Path) -> None:
    """A bias that the layer adds to its router's logits is not in them."""

    class Biased(Mixture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.gate(x.flatten(0, -2))
            chosen = (logits + torch.tensor([0.0, 50.0, 50.0, 0.0])).topk(K).indices
            self.tokens_per_expert += torch.bincount(chosen.flatten(), minlength=E)
            return logits

    model = nn.ModuleDict({"moe": Biased()})
    model.moe.register_buffer("tokens_per_expert", torch.zeros(E))
    with attach(model, tmp_path) as mon:
        model.moe(torch.randn(5, WIDTH)).sum().backward()
        mon.step_end()
    assert loads(tmp_path, "moe") == [0, 5, 5, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counters_that_stop_counting_are_not_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """A cast of the whole model takes them along: 16 bits hold 256 tokens, or 2048, and then no more."""
    model = nn.ModuleDict({name: Mixture("nothing") for name in ("a", "b")})
    for layer in model.values():
        layer.tokens_per_expert.fill_(300)
        layer.tokens_per_expert.data = layer.tokens_per_expert.to(dtype)
    with attach(model, tmp_path) as mon:
        for _ in range(2):
            sum(layer(torch.randn(5, WIDTH)).sum() for layer in model.values()).backward()
            mon.step_end()
    (said,) = events(tmp_path, "counter_too_short")
    assert "tokens_per_expert of a (and of 1 other layers)" in said["text"] and "float32" in said["text"]
    assert "moe/max_vio/a" not in steps(tmp_path)[1]


def test_a_router_that_tells_nothing_is_said_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"moe": Mixture("nothing")})
    model.moe.tokens_per_expert = None
    with attach(model, tmp_path) as mon:
        for _ in range(3):
            model.moe(torch.randn(5, WIDTH)).sum().backward()
            mon.step_end()
    (said,) = events(tmp_path, "router_not_understood")
    assert "mon.experts()" in said["text"] and "moe/max_vio" not in steps(tmp_path)[2]


def test_selection_named_routers_evaluation_and_hooks(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chooser = nn.Linear(WIDTH, E)
            self.top_k = K

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chooser(x)  # type: ignore[no-any-return]

    model = nn.ModuleDict({"a": Mixture(), "b": Mixture(), "odd": Odd(), "gate": nn.Linear(WIDTH, WIDTH)})
    x = torch.randn(5, WIDTH)

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    with attach(model, tmp_path, exclude="b", routers="chooser$", every=2) as mon:
        assert hooks() == 2 and len(model.a.gate._forward_hooks) == 1
        for _ in range(4):
            with mon.evaluation():
                model.a(x)
            for layer in model.values():
                layer(x)
            model.eval()
            model.a(x)
            model.train()
            mon.step_end()
    mon.close()
    assert hooks() == 0
    records = steps(tmp_path)
    assert [("moe/max_vio/a" in r, "moe/max_vio/odd" in r) for r in records] == [(True, True)] * 2 + [
        (False, False),
        (True, True),
    ]
    assert "moe/max_vio/b" not in records[0] and sum(loads(tmp_path, "a")) == 5 * K  # type: ignore[arg-type]
    model["a"].taken()
    keys = {"output_dir": str(tmp_path / "off"), "sinks": [], "moe": False}
    with trainmon.attach(model, torch.optim.SGD(model.parameters()), keys):
        assert hooks() == 0
    dense = nn.Sequential(nn.Linear(2, 2))
    with attach(dense, tmp_path / "dense") as mon:
        dense(torch.ones(1, 2))
        mon.step_end()
    assert not [name for name in steps(tmp_path / "dense")[0] if name.startswith("moe/")]


def test_a_target_without_a_layer_is_told(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": Mixture(), "dense": nn.Linear(2, 2)})
    with attach(model, tmp_path, target=r"^dense"):
        pass
    (said,) = events(tmp_path, "nothing_selected")
    assert said["text"].startswith("moe.target ('^dense') selects nothing")


@pytest.mark.parametrize("emptied", [True, False])
def test_compiled_layers_are_counted_by_their_counters(tmp_path: Path, emptied: bool) -> None:
    torch._dynamo.reset()

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(2, E), nn.Identity()
            self.register_buffer("tokens_per_expert", torch.zeros(E))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.tokens_per_expert.add_(self.gate(x).detach().sign().clamp(0).sum(0))
            return self.experts(self.gate(x))  # type: ignore[no-any-return]

    model = nn.ModuleDict({"moe": Compiled()})
    model.moe.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if emptied:
        optimizer.register_step_post_hook(lambda *_: empty(model.moe))
    true = []
    with attach(model, tmp_path, optimizer=optimizer) as mon:
        for _ in range(2):
            before = model.moe.tokens_per_expert.clone()
            model.moe(torch.randn(9, 2)).sum().backward()
            true.append((model.moe.tokens_per_expert - before).tolist())
            optimizer.step()
            mon.step_end()
    assert [loads(tmp_path, "moe", step) for step in (1, 2)] == true
    assert not events(tmp_path, "modules_compiled")


def test_many_layers_stay_below_two_hundred_scalars(tmp_path: Path) -> None:
    with attach(nn.Linear(1, 1), tmp_path) as mon:
        for layer in range(61):
            mon.experts(f"layers.{layer}", counts=[layer + 1, 1, 1, 1])
        mon.step_end()
    (record,) = steps(tmp_path)
    assert len(record) < 200 and record["moe/max_vio"] == pytest.approx(max_vio([61, 1, 1, 1]))
    (path,) = (tmp_path / "r/rank_0/tensors").glob("moe_*.csv")
    with path.open(newline="") as stream:
        table = {row["name"]: row for row in csv.DictReader(stream)}
    assert float(table["layers.60"]["moe/max_vio"]) == pytest.approx(max_vio([61, 1, 1, 1]))
    assert float(table["layers.60/0"]["moe/load"]) == 61


def test_layers_in_a_wrapper_that_recomputes(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.ModuleDict({"moe": checkpoint_wrapper(Mixture("nothing"))})
    x = torch.randn(5, WIDTH, requires_grad=True)
    with attach(model, tmp_path) as mon:
        model.moe(x).sum().backward()
        mon.step_end()
    assert sum(loads(tmp_path, "moe")) == 5 * K
