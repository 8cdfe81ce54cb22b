"""What msProbe's older monitor has beside rows, in the drop-in."""

from __future__ import annotations

import csv
import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.msprobe.golden import tree  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2, analyse_anomalies, read  # noqa: E402
from trainmon.msprobe.older_settings import read_older  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(x))) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


class Run:
    """A model with its optimizer and monitor."""

    def __init__(
        self, directory: Path, *, model: nn.Module | None = None, context: Any = None, **config: Any
    ) -> None:
        torch.manual_seed(3)
        self.model = Net() if model is None else model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.directory = directory
        self.monitor = TrainerMonitorV2({"output_dir": str(directory), **config})
        self.monitor.start(self.model, self.optimizer, **(context or {}))

    def step(self, *batches: torch.Tensor, stop: bool = False) -> None:
        self.optimizer.zero_grad()
        for batch in batches or (torch.ones(3, 4),):
            self.model(batch).square().sum().backward()
        self.optimizer.step()
        if stop:
            self.monitor.stop()


def monitors(*names: str, **own: Any) -> dict[str, Any]:
    return {name: {"enabled": True, **own} for name in names}


def alert(*rules: tuple[str, dict[str, Any]], dump: bool = True) -> dict[str, Any]:
    return {"rules": [{"rule_name": name, "args": args} for name, args in rules], "dump": dump}


# -- alerts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_nan_is_told_where_it_comes_first(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(
        tmp_path,
        monitors=monitors("module", "weight_grad", "optimizer", "param"),
        alert=alert(("AnomalyNan", {})),
        async_write=asynchronous,
        context={"grad_acc_steps": 2},
    )
    with caplog.at_level(logging.WARNING):
        run.step(torch.ones(3, 4), torch.ones(3, 4))
        assert not (tmp_path / "anomaly_detected").exists()
        with torch.no_grad():
            run.model.layers[1].fc1.weight[0, 0] = math.nan  # type: ignore[union-attr, index]
        run.step(torch.ones(3, 4), torch.ones(3, 4), stop=True)
    first = analyse_anomalies(tmp_path, top_k=100)
    assert [(one["tag_name"], one["step"], one["micro_step"]) for one in first[:4]] == [
        ("layers.1.fc1.output.0/actv", 1, 0),
        ("layers.1.fc2.input.0/actv", 1, 0),
        ("layers.1.fc2.output.0/actv", 1, 0),
        ("layers.1.output.0/actv", 1, 0),
    ]
    stages = [one["tag_name"].rpartition("/")[2] for one in first]
    backward = stages.index("actv_grad")
    assert set(stages[:backward]) == {"actv"} and first[backward]["micro_step"] == 0
    last = [one for one in first if one["tag_name"].endswith(("post_grad", "exp_avg", "param_updated"))]
    assert last and all(one["micro_step"] == 1 for one in last)
    record = json.loads((tmp_path / "anomaly_detected/rank0/anomaly.json").read_text())
    assert len(record) == len(first)
    lines = [one.message for one in caplog.records if "AnomalyNan" in one.message]
    assert "rank 0: AnomalyNan: min of layers.1.fc1.output.0/actv is nan at step 1" in lines[0]
    assert len(lines) <= 5 * 4 and "more alerts at step 1" in caplog.text


class Spoiled(torch.autograd.Function):
    """What it hands back is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan


class Spoil(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Spoiled.apply(x)
        return found


def test_rows_of_all_monitors_are_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """Numbered for itself each monitor's rows would begin with 0: the gradient of a weight would come first."""
    model = nn.Sequential(nn.Linear(4, 4), Spoil(), nn.Linear(4, 2))
    run = Run(
        tmp_path, model=model, monitors=monitors("module", "weight_grad"), alert=alert(("AnomalyNan", {}))
    )
    run.step(stop=True)
    first, *others = analyse_anomalies(tmp_path, top_k=50)
    assert first["tag_name"] == "1.grad_input.0/actv_grad"
    assert {"0.weight/pre_grad", "0.weight/post_grad"} <= {one["tag_name"] for one in others}


def test_calls_are_shared_out_among_the_micro_batches(tmp_path: Path) -> None:
    """By default, where rows don't say their micro-batch; extended they do."""
    for mode in ({}, {"extended": True}):
        shared = nn.Linear(4, 4)
        run = Run(
            tmp_path,
            model=nn.Sequential(shared, shared),
            monitors=monitors("module"),
            alert=alert(("AnomalyNan", {})),
            context={"grad_acc_steps": 2},
            **mode,
        )
        run.step(torch.full((3, 4), math.nan), torch.ones(3, 4), stop=True)
        found = [one for one in analyse_anomalies(tmp_path, top_k=50) if one["tag_name"] == "0.input.0/actv"]
        assert [one["micro_step"] for one in found] == [0, 0]


def test_a_jump_is_told_after_the_warm_up_and_seldom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(
        tmp_path,
        monitors=monitors("module", targets=["head"], ops=["norm"]),
        alert=alert(("AnomalyTurbulence", {"threshold": 0.5, "warmup": 3}), dump=False),
    )
    with caplog.at_level(logging.WARNING):
        for scale in (1.0, 50.0, 1.0, 1.0):
            run.step(torch.full((3, 4), scale))
        assert "Anomaly" not in caplog.text
        for _ in range(9):
            run.step(torch.full((3, 4), 1000.0))
        run.monitor.stop()
    told = [one.message for one in caplog.records if "head.input.0" in one.message]
    assert [one.split("step ")[1].split(",")[0] for one in told] == ["4", "5", "7", "11"]
    assert "(8 written steps in a row)" in told[-1]
    assert not (tmp_path / "anomaly_detected").exists()


def parallel(directory: str) -> list[str]:
    """On one of two data-parallel ranks, of which the second is given a batch with a NaN."""
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = DistributedDataParallel(Net())
    run = Run(
        Path(directory),
        model=model,
        monitors=monitors("module", "weight_grad", "param"),
        alert=alert(("AnomalyNan", {})),
        context={"dp_group": distributed.group.WORLD},
    )
    for step in range(2):
        batch = torch.ones(3, 4)
        if step == 1 and distributed.get_rank() == 1:
            batch[0, 0] = math.nan
        run.step(batch)
    run.monitor.stop()
    distributed.barrier()
    return sorted(
        one.name.split("_step")[0] for one in (Path(directory) / f"rank_{distributed.get_rank()}").iterdir()
    )


def test_the_rank_with_which_it_begins(tmp_path: Path) -> None:
    """Though the other one is spoilt in the same step, by the reduced gradients. Rows of parameters are the first's."""
    from tests.ranks.gloo import on_ranks

    files = on_ranks(2, parallel, str(tmp_path), timeout=60)
    assert files == {
        rank: [name for name in names for _ in range(2)]
        for rank, names in {0: ("module", "param", "weight_grad"), 1: ("module", "weight_grad")}.items()
    }
    gradients = read(tmp_path)["weight_grad"]
    assert set(gradients.scope[gradients.rank == 0]) == {"unreduced", "reduced"}
    assert set(gradients.scope[gradients.rank == 1]) == {"unreduced"}
    found = analyse_anomalies(tmp_path, top_k=1000)
    assert (found[0]["rank"], found[0]["tag_name"], found[0]["step"]) == (1, ".input.0/actv", 1)
    other = next(one for one in found if one["rank"] == 0)
    assert other["tag_name"].endswith(("pre_grad", "post_grad")) and other["step"] == 1


def test_anomalies_stay_when_the_monitor_is_stopped_and_started(tmp_path: Path) -> None:
    keys = {"monitors": monitors("param"), "alert": alert(("AnomalyNan", {"threshold": 0.0}))}
    run = Run(tmp_path, **keys)
    run.step(stop=True)
    run.monitor.start(run.model, run.optimizer)
    run.step(stop=True)
    assert {one["step"] for one in analyse_anomalies(tmp_path, top_k=100)} == {0, 1}
    Run(tmp_path, **keys).step(stop=True)  # another run
    assert {one["step"] for one in analyse_anomalies(tmp_path, top_k=100)} == {0}


def test_a_wrong_rule_is_refused_as_msprobe_does(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="rule_name"):
        TrainerMonitorV2({"output_dir": str(tmp_path), "alert": alert(("AnomalyX", {}))})


def test_the_places_in_the_pipeline(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        model=nn.Sequential(nn.Linear(4, 2)),
        monitors=monitors("module"),
        alert=alert(("AnomalyNan", {"threshold": 1.0})),
        context={"pp_stage": 3},
    )
    run.step(torch.full((3, 4), 7.0), stop=True)
    first = analyse_anomalies(tmp_path)[0]
    assert (first["pp_stage"], first["vpp_stage"], first["tag_name"]) == (3, 0, ".input.0/actv")


# -- structure, stacks ----------------------------------------------------------------------------------------------


def test_the_structure_is_that_of_the_model(tmp_path: Path) -> None:
    run = Run(tmp_path, print_struct=True)
    run.step()
    shown = json.loads((tmp_path / "module_struct/rank0/module_struct.json").read_text())
    assert set(shown) == {name for name, _ in run.model.named_modules()} - {"layers"}
    assert shown["layers.1"] == {
        "input": {"config": "tuple[1]", "0": "size=(3, 4), dtype=torch.float32", "scale": "float"},
        "output": {"config": "tensor", "tensor": "size=(3, 4), dtype=torch.float32"},
        "input_grad": {"config": "tuple[1]", "0": "size=(3, 4), dtype=torch.float32"},
        "output_grad": {"config": "tuple[1]", "0": "size=(3, 4), dtype=torch.float32"},
    }
    assert shown["head"]["output"]["tensor"] == "size=(3, 2), dtype=torch.float32"
    assert "input_grad" not in shown["layers.0"]  # the batch needs no gradient
    left = [module._forward_hooks or module._forward_pre_hooks for module in run.model.modules()]
    assert not any(left)
    run.step(stop=True)  # goes on


def test_the_structure_of_containers(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, pair: Any, flag: Any) -> Any:
            return {"y": pair[0] * 2, "n": 3}, [pair[1]], None

    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.fc = Odd(), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.odd((x, x), None)[0]["y"])

    run = Run(tmp_path, model=Top(), print_struct=True)
    run.step(stop=True)
    odd = json.loads((tmp_path / "module_struct/rank0/module_struct.json").read_text())["odd"]
    assert odd["input"] == {"config": "tuple[2]", "0": "tuple[2]", "1": "NoneType"}
    assert odd["output"] == {"config": "tuple[3]", "0": "dict", "1": "list[1]", "2": "NoneType"}


def test_the_training_ends_with_the_structure_if_it_shall(tmp_path: Path) -> None:
    run = Run(tmp_path, print_struct="exit", monitors=monitors("param"), async_write=True)
    with pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == 0
    assert (tmp_path / "module_struct/rank0/module_struct.json").exists()
    assert set(read(tmp_path)["param"].step) == {0}  # written, by another thread too


def ending(directory: str) -> list[Any]:
    """On one of two ranks, of which the configuration watches the second."""
    import torch.distributed as distributed

    rank = distributed.get_rank()
    run = Run(Path(directory), print_struct="exit", rank=[1], monitors={})
    try:
        run.step()
    except SystemExit as end:
        return ["ended", end.code, rank]
    return ["went on"]


def test_all_ranks_end_together(tmp_path: Path) -> None:
    from tests.ranks.gloo import on_ranks

    assert on_ranks(2, ending, str(tmp_path), timeout=60) == {0: ["ended", 0, 0], 1: ["ended", 0, 1]}
    assert (tmp_path / "module_struct/rank1/module_struct.json").exists()
    assert not (tmp_path / "module_struct/rank0").exists()


def test_stacks_are_a_table_of_the_first_step_that_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, stack_info=True, start_step=1, monitors=monitors("module", targets=["fc1"]))
    run.step()
    assert not (tmp_path / "rank_0/stack_info.csv").exists()
    run.step()
    with (tmp_path / "rank_0/stack_info.csv").open(newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["module_name", "stack_info"]
    assert [name for name, _ in rows] == ["layers.0.fc1", "layers.1.fc1"]
    frames = rows[0][1].split("\n")
    assert any(frame.startswith(f"{__file__}[") and frame.endswith("]   step") for frame in frames)
    assert frames[-1].startswith(f"{__file__}[") and frames[-1].endswith("]   forward")
    run.step(stop=True)


# -- columns, names, targets ----------------------------------------------------------------------------------------


def test_what_tensors_are(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        monitors=monitors("param", ops=["norm", "zeros", "shape", "dtype", "id"], eps=0.3)
        | monitors("module", ops=["zeros", "dtype"], targets=["head"]),
        extended=True,
    )
    truth = {name: one.detach().clone() for name, one in run.model.named_parameters()}
    run.step(torch.tensor([[0.0, 1e-9, 1e-7, 1.0]]), stop=True)
    table = read(tmp_path)["param"]
    origin = table.where(table.scope == "param_origin")
    assert origin.name.tolist() == list(truth)
    for at, (name, value) in enumerate(truth.items()):
        assert origin.stats["zeros"][at] == (value.abs() < 0.3).double().mean().item(), name
        assert origin.texts["shape"][at] == str(tuple(value.shape))
    assert set(origin.texts["dtype"]) == {"torch.float32"}
    assert len(set(origin.texts["id"])) == len(truth)
    header = next(iter((tmp_path / "rank_0").glob("param*"))).read_text().splitlines()[0]
    assert header == "vpp_stage,step,module_name,scope,norm,zeros,shape,dtype,id"


@pytest.mark.parametrize(
    ("values", "share"),
    [
        (torch.tensor([0.0, 1e-9, -1e-9, 1e-7]), 0.75),
        (torch.tensor([]), math.nan),
        (torch.tensor([True, False, False]), 2 / 3),
        (torch.tensor([0, 3], dtype=torch.int32), 0.5),
        (torch.tensor([math.nan, math.inf, 0.0, 0.0]), 0.5),
        (torch.tensor([0.0, 2.0]).to(torch.float8_e4m3fn), 0.5),
        (torch.tensor([0j, 1j]), 0.5),
        (torch.eye(3).to_sparse(), 2 / 3),
        (torch.eye(700, dtype=torch.bfloat16).T[:, ::2], 699 / 700),
    ],
)
def test_the_share_of_zeros(values: torch.Tensor, share: float) -> None:
    from trainmon.adapters.torch_rows.meter import Meter

    meter = Meter()
    meter.distances = frozenset({1e-8})
    facts = meter.read([values])[0].facts
    assert facts is not None
    assert facts.zeros[1e-8] == pytest.approx(share, rel=1e-12, nan_ok=True)


def test_decimals(tmp_path: Path) -> None:
    for digits in (None, 3):
        run = Run(
            tmp_path / str(digits),
            monitors=monitors("param"),
            **({} if digits is None else {"ndigits": digits}),
        )
        run.step(stop=True)
    exact, short = (read(tmp_path / name)["param"].stats["mean"] for name in ("None", "3"))
    assert [round(value, 3) for value in exact.tolist()] == short.tolist()
    assert not np.array_equal(exact, short)


def test_short_names(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    run = Run(tmp_path, model=Outer(), squash_name=True, monitors=monitors("module", "optimizer"))
    run.step(stop=True)
    found = read(tmp_path)
    assert "layers.1.fc2.weight.exp_avg" in found["optimizer"].name
    assert "model.head.weight.exp_avg" in found["optimizer"].name
    assert {"layers.0.output.0", ".output.0", "model.head.input.0"} <= set(found["module"].name)


def test_targets_that_are_an_object(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        targets={"layers.1.fc1": {"input": "tuple[1]:0", "output_grad": "tensor"}, "head": {}},
        monitors=monitors("module", "param", "weight_grad"),
    )
    run.step(stop=True)
    found = read(tmp_path)
    assert sorted(set(found["module"].name)) == sorted(
        [
            "layers.1.fc1.input.0",
            "layers.1.fc1.grad_output.0",
            *(f"head.{kind}.0" for kind in ("input", "output", "grad_input", "grad_output")),
        ]
    )
    names = {"layers.1.fc1.weight", "layers.1.fc1.bias", "head.weight"}
    assert set(found["param"].name) == names == set(found["weight_grad"].name)


def test_a_monitors_own_targets_come_before_those_of_all(tmp_path: Path) -> None:
    run = Run(
        tmp_path, targets={"head": {"input": "tensor"}}, monitors=monitors("module", targets=["layers.0.fc1"])
    )
    run.step(stop=True)
    assert {name.rsplit(".", 2)[0] for name in read(tmp_path)["module"].name} == {"layers.0.fc1"}


def test_targets_of_one_monitor(tmp_path: Path) -> None:
    run = Run(tmp_path, monitors={"module": {"targets": {"layers.0": {"output": "tensor"}}}})
    run.step(stop=True)
    assert set(read(tmp_path)["module"].name) == {"layers.0.output.0"}


@pytest.mark.parametrize(
    ("keys", "scopes", "modules"),
    [
        ({"forward_only": True}, {"forward"}, 1),
        ({"backward_only": True}, {"backward"}, 1),
        ({"all_xy": True, "forward_only": True}, {"forward"}, 7),
        ({"forward_only": True, "backward_only": True}, set(), 0),
    ],
)
def test_passes(tmp_path: Path, keys: dict[str, bool], scopes: set[str], modules: int) -> None:
    run = Run(tmp_path, monitors=monitors("module", "param"), targets={"head": {}}, **keys)
    run.step(stop=True)
    tables = read(tmp_path).tables
    if not scopes:
        assert "module" not in tables
        return
    assert set(tables["module"].scope) == scopes
    assert len({name.rsplit(".", 2)[0] for name in tables["module"].name}) in (modules, modules + 1)


# -- directions, features -------------------------------------------------------------------------------------------


def test_directions_are_those_of_gradient_and_momentum(tmp_path: Path) -> None:
    run = Run(tmp_path, mg_direction=True, monitors={})
    run.step()
    assert not list((tmp_path / "rank_0").iterdir())  # there was no momentum yet
    momentum = {
        name: run.optimizer.state[one]["exp_avg"].clone() for name, one in run.model.named_parameters()
    }
    run.step(torch.randn(3, 4))
    table = read(tmp_path)["mg_direction"]
    assert table.name.tolist() == list(momentum) and set(table.scope) == {"mg_direction"}
    for at, (name, one) in enumerate(run.model.named_parameters()):
        want = ((one.grad.sign() * momentum[name].sign()).double().mean() + 1) / 2
        assert table.stats["mg_direction"][at] == pytest.approx(want.item(), abs=1e-12)
    run.monitor.stop()


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + k.mean() + v.mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.router, self.emb = Attention(), nn.Linear(8, 4, bias=False), nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.emb(torch.zeros(x.shape[0], dtype=torch.long))
        q = x.reshape(x.shape[0], 1, 2, 4)  # s, b, h, d
        return self.router(self.attention(q, q * 2, q).reshape(x.shape[0], 8))


def test_features(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = Layer()
    batches = [torch.randn(9, 8), torch.randn(9, 8)]
    with torch.no_grad():
        logits = [model(batch).double() for batch in batches]
        q = (batches[1] + model.emb.weight[0]).reshape(9, 2, 4).transpose(0, 1).double()
    run = Run(
        tmp_path,
        model=model,
        recording_l2_features=True,
        l2_targets={
            "attention_hook": ["attention"],
            "linear_hook": [],
            "moe_router_weight_hook": ["router"],
            "moe_router_logit_hook": ["router", "nowhere"],
        },
        monitors={},
    )
    run.step(*batches, stop=True)
    found = read(tmp_path)

    attention = found["attention_hook"]
    assert attention.micro_step.tolist() == [1, 2] and attention.name.tolist() == ["attention"] * 2
    scores = q @ (2 * q).transpose(1, 2) / 2
    p = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    entropy = torch.special.entr(p).sum(-1).mean()
    assert attention.stats["entropy"][1] == pytest.approx(entropy.item(), rel=1e-5)
    assert attention.stats["softmax_max"][1] == pytest.approx(p.amax(-1).mean().item(), rel=1e-5)

    linear = found["linear_hook"]
    assert linear.name.tolist() == ["router"] and linear.micro_step.tolist() == [-1]
    after = model.router.weight.detach().double()
    values = torch.linalg.svdvals(after)
    rank = (values.square().sum() / values[0] ** 2).item()
    assert linear.stats["stable_rank"][0] == pytest.approx(rank, rel=0.01)
    assert linear.stats["sr_v1"][0] == pytest.approx(math.sqrt(rank), rel=0.01)
    assert linear.stats["kernel_norm"][0] == pytest.approx(values[0].item(), rel=0.01)

    units = after / after.norm(dim=1, keepdim=True)
    cosines = units @ units.T
    mean = (cosines.sum() - 4) / 12
    assert found["moe_router_weight_hook"].stats["router_weight_similarity"][0] == pytest.approx(
        mean.item(), abs=1e-9
    )
    entropies = [torch.special.entr(one.softmax(-1)).sum(-1).mean().item() for one in logits]
    assert found["moe_router_logit_hook"].stats["per_token_expert_entropy"].tolist() == pytest.approx(
        entropies, rel=1e-5
    )


def test_features_of_long_rows_of_shared_heads_and_one_expert() -> None:
    from trainmon.adapters.torch_rows.features import attention_features, router_similarity, weight_of

    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8)
    entropy, largest = attention_features(q, k).tolist()
    wide = k.repeat_interleave(2, dim=1)
    scores = (q.double() @ wide.double().transpose(-1, -2) / math.sqrt(8)).masked_fill(
        ~torch.ones(300, 300, dtype=torch.bool).tril(), -math.inf
    )
    p = scores.softmax(-1)
    assert entropy == pytest.approx(torch.special.entr(p).sum(-1).mean().item(), rel=0.05)
    assert largest == pytest.approx(p.amax(-1).mean().item(), rel=0.15)
    assert router_similarity(torch.randn(1, 8)).item() == 0
    assert router_similarity(torch.ones(8, 3)).item() == pytest.approx(
        1
    )  # the shorter axis is that of experts
    assert weight_of(nn.Embedding(3, 4)) is None and weight_of(nn.LayerNorm(3)) is None


def test_on_a_device_all_of_it_comes_in_one_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host in place of the device; the numbers are those of the C kernels."""
    from trainmon.adapters.torch_rows import meter
    from trainmon.backend.torch import TorchBackend

    backends = []

    class Counted(TorchBackend):
        def __init__(self, device: Any) -> None:
            super().__init__(device)
            backends.append(self)

    trees = []
    for place in ("host", "device"):
        if place == "device":
            monkeypatch.setattr(meter, "_is_on_device", meter._is_plain)
            monkeypatch.setattr(meter, "_is_plain", lambda one: False)
            monkeypatch.setattr("trainmon.backend.torch.TorchBackend", Counted)
        torch.manual_seed(4)
        run = Run(
            tmp_path / place,
            model=Layer(),
            extended=True,
            mg_direction=True,
            recording_l2_features=True,
            l2_targets={
                "attention_hook": ["attention"],
                "linear_hook": [],
                "moe_router_weight_hook": ["router"],
                "moe_router_logit_hook": ["router"],
            },
            monitors=monitors("param", ops=["norm", "zeros", "shape"], eps=0.1)
            | monitors("module", ops=["mean"]),
            alert=alert(("AnomalyNan", {"threshold": 1.0})),
        )
        torch.manual_seed(5)
        for _ in range(3):
            run.step(torch.randn(9, 8))
        run.monitor.stop()
        trees.append(read(tmp_path / place))
    (backend,) = backends
    assert backend.reads == 3
    host, device = trees
    assert set(host.tables) == set(device.tables) and len(host.tables) == 7
    for name, table in host.tables.items():
        other = device[name]
        assert table.name.tolist() == other.name.tolist() and table.step.tolist() == other.step.tolist()
        for column, values in table.stats.items():
            near = {"linear_hook": 0.02, "attention_hook": 1e-6}.get(name, 1e-9)
            np.testing.assert_allclose(other.stats[column], values, rtol=near)
    first, second = (
        [one["tag_name"] for one in analyse_anomalies(tmp_path / place, top_k=50)]
        for place in ("host", "device")
    )
    assert first == second and len(first) > 3


def test_the_place_in_the_pipeline_where_megatron_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmon.msprobe.alarms import pipeline_stage

    assert pipeline_stage(None) == 0
    states = types.SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 2)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", states)
    assert pipeline_stage(None) == 2 and pipeline_stage(5) == 5
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", object())
    assert pipeline_stage(None) == 0


def test_a_configuration_of_the_older_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    keys: dict[str, Any] = {
        "targets": {"head": {}},
        "xy_distribution": True,
        "wg_distribution": True,
        "mv_distribution": False,
        "param_distribution": True,
        "monitor_mbs_grad": True,
        "ops": ["norm", "mean"],
        "module_ranks": ["0"],
        "step_interval": 2,
    }
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = TrainerMonitorV2(keys)
    monitor.start(model, optimizer, grad_acc_steps=2)
    for _ in range(3):
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    monitor.stop()
    found = read(tmp_path)
    assert set(found.tables) == {"module", "weight_grad", "param"}
    assert all(
        set(table.stats) == {"norm", "mean"} and set(table.step) == {0, 2} for table in found.tables.values()
    )
    assert {one.micro_step for one in found["weight_grad"] if one.scope == "unreduced"} == {1, 2}
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    with pytest.raises(TypeError, match="cc_distribution has no keys enabled"):
        TrainerMonitorV2({"cc_distribution": {"enabled": True}})
    TrainerMonitorV2({**keys, "monitors": {}, "output_dir": str(tmp_path)})
    assert "ignored beside monitors" in caplog.text
    TrainerMonitorV2({"wg_distribution": False, "ops": ["norm"], "output_dir": str(tmp_path)})
    assert "ops, wg_distribution: none of the older monitor's switches is on" in caplog.text


# -- modes, keys ----------------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "alert": alert(("AnomalyNan", {"threshold": 0.0})),
    "print_struct": "exit",
    "stack_info": True,
    "mg_direction": True,
    "ndigits": 2,
    "squash_name": True,
    "targets": {"head": {}},
    "forward_only": True,
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": []},
}


def test_compat_takes_none_of_it_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trees = []
    for name, keys in (("with", EVERYTHING), ("without", {})):
        with caplog.at_level(logging.WARNING):
            run = Run(
                tmp_path / name,
                compat="msprobe-v2",
                monitors=monitors("module", "param", "optimizer"),
                **keys,
            )
        run.step()
        run.step(stop=True)
        trees.append(tree(tmp_path / name))
        assert sorted(one.name for one in (tmp_path / name).iterdir()) == ["rank_0"]
    assert trees[0] == trees[1] and len(trees[0]) == 6
    assert "alert, print_struct, stack_info" in caplog.text and "compat is set" in caplog.text


def test_what_is_wrong_is_said_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read_older(
            {
                "print_struct": "yes",
                "stack_info": 1,
                "ndigits": 0,
                "targets": ["head"],
                "recording_l2_features": True,
                "l2_targets": {"linear_hook": "fc", "svd_hook": []},
                "sa_order": "h,d",
            }
        )
    assert found.structure == "no" and not found.stacks and found.digits is None and found.targets is None
    assert found.features is not None and found.features.targets == {} and found.features.sequence_first
    for word in ("print_struct", "stack_info", "ndigits", "targets", "linear_hook", "svd_hook", "sa_order"):
        assert word in caplog.text


def test_nothing_is_hooked_unless_it_is_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, monitors=monitors("param"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())
    run.step(stop=True)
