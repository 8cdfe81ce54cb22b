"""Weights, moments, updates of real torch models and optimizers, against torch's own numbers."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

import trainmon  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

BACKENDS = ("host", "torch")


def attach(tmp_path: Path, model: Any, optimizer: Any, backend: Any = "auto", **keys: Any) -> Any:
    off = dict.fromkeys(("loss", "gradients", "weights", "throughput", "timing"), False)
    config = {"output_dir": str(tmp_path), "run_name": "r", "sinks": {"log": False}, **off, **keys}
    return trainmon.attach(model, optimizer, config, backend=backend)


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if "step" in record]


def said(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(tmp_path / "r/rank_0/events.jsonl") if event.get("kind") == kind]


def tables(tmp_path: Path, probe: str) -> dict[tuple[int, str], dict[str, float | None]]:
    """By step and name; an empty cell is None."""
    found: dict[tuple[int, str], dict[str, float | None]] = {}
    for path in sorted((tmp_path / "r/rank_0/tensors").glob(f"{probe}_*.csv")):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                key = int(row.pop("step")), row.pop("name")
                found[key] = {name: float(cell) if cell else None for name, cell in row.items()}
    return found


def make(seed: int = 0, dtype: Any = None) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return model.to(dtype) if dtype is not None else model


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad()


def norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


# ---- weights ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_norms_are_those_after_the_update(tmp_path: Path, backend: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {"every": 1, "per_parameter": True, "target": "weight$"}
    truth, rows = [], {}
    with attach(tmp_path, model, optimizer, backend, weights=weights) as mon:
        for number in (1, 2, 3):
            step(model, optimizer, number)
            mon.step_end()
            truth.append(norm(model.parameters()))
            rows.update({(number, n): norm([p]) for n, p in model.named_parameters() if "weight" in n})
    assert [record["weight/norm"] for record in records(tmp_path)] == pytest.approx(truth, rel=1e-12)
    assert [record["weight/nonfinite"] for record in records(tmp_path)] == [0, 0, 0]
    found = {key: row["weight/norm"] for key, row in tables(tmp_path, "weights").items()}
    assert found == pytest.approx(rows, rel=1e-12)


def test_weights_are_watched_by_default_every_tenth_step(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainmon.attach(
        model, optimizer, {"output_dir": str(tmp_path), "run_name": "r", "sinks": {"log": False}}
    ) as mon:
        for number in range(1, 22):
            step(model, optimizer, number)
            if number == 15:
                with torch.no_grad():
                    model[2].weight[1, 2] = float("inf")
                    model[2].bias[0] = float("nan")
            mon.step_end()
    shown = {
        record["step"]: record["weight/nonfinite"] for record in records(tmp_path) if "weight/norm" in record
    }
    assert list(shown) == [1, 10, 20]
    assert shown[1] == shown[10] == 0 and shown[20] > 1
    (event,) = said(tmp_path, "nonfinite_weight")
    assert event["step"] == 20 and event["level"] == "warning"
    assert event["text"].startswith("weight of 0.weight is not finite at step 20"), "the update spread it"
    assert event["data"]["first"]["index"] == 0 and event["data"]["first"]["more"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_bad_weight_is_named_with_its_index(tmp_path: Path, backend: str) -> None:
    model = make()
    with attach(tmp_path, model, torch.optim.SGD(model.parameters()), backend, weights={"every": 1}) as mon:
        for number in (1, 2, 3):
            with torch.no_grad():
                model[2].weight[1, 2] = -float("inf") if number == 2 else 1.0
            mon.step_end()
    assert [record["weight/nonfinite"] for record in records(tmp_path)] == [0, 1, 0]
    (event,) = said(tmp_path, "nonfinite_weight")
    first = event["data"]["first"]
    assert first["index"] == (7 if backend == "host" else None)
    assert (first["name"], first["counts"], first["more"]) == ("2.weight", {"-inf": 1}, 0)
    (after,) = said(tmp_path, "finite_again")
    assert after["step"] == 3


def test_a_bad_weight_is_not_said_to_be_finite_before_it_was_looked_at_again(tmp_path: Path) -> None:
    model = make()
    idle = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("idle", idle)
    with attach(
        tmp_path, model, torch.optim.SGD(model.parameters()), gradients=True, weights={"every": 3}
    ) as mon:
        for number in range(1, 10):
            with torch.no_grad():
                idle[1] = float("nan") if number == 3 else 0.0
            mon.step_end()
    assert [event["step"] for event in said(tmp_path, "nonfinite_weight")] == [3]
    assert [event["step"] for event in said(tmp_path, "finite_again")] == [6]


def test_tied_frozen_meta_and_added_parameters(tmp_path: Path) -> None:
    model = make()
    model.add_module("tied", torch.nn.Linear(5, 2))
    model.tied.weight = model[2].weight
    model.add_module("nowhere", torch.nn.Linear(3, 3, device="meta"))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if not p.is_meta], lr=0.1)
    with attach(tmp_path, model, optimizer, weights={"every": 1, "per_parameter": True}) as mon:
        mon.step_end()
        model.append(torch.nn.Linear(2, 2))
        optimizer.add_param_group({"params": model[-1].parameters()})
        mon.step_end()
    first, second = ({name for number, name in tables(tmp_path, "weights") if number == n} for n in (1, 2))
    rows = tables(tmp_path, "weights")
    assert first == {"0.weight", "2.weight", "2.bias", "tied.bias", "nowhere.weight", "nowhere.bias"}
    assert rows[1, "nowhere.weight"]["weight/norm"] is None
    assert len(second - first) == 2
    kept = [model[0].weight, *model[2].parameters(), model.tied.bias]
    added = list(optimizer.param_groups[1]["params"])
    truth = [norm(kept), norm([*kept, *added])]
    assert [record["weight/norm"] for record in records(tmp_path)] == pytest.approx(truth, rel=1e-12)


class MasterSGD(torch.optim.Optimizer):
    """Keeps float32 copies in its state and updates those, as fused optimizers for mixed precision do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master_param", p.detach().float())
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masters_in_the_optimizers_state_are_the_weights(tmp_path: Path, backend: str) -> None:
    model = make(dtype=torch.bfloat16)
    optimizer = MasterSGD(model.parameters(), lr=1e-4)
    on = {"weights": {"every": 1}, "updates": {"every": 1}, "moments": {"every": 1, "per_parameter": True}}
    truth = []
    with attach(tmp_path, model, optimizer, backend, **on) as mon:
        for number in (1, 2, 3):
            before = [one["master_param"].clone() for one in optimizer.state.values()]
            step(model, optimizer, number)
            masters = [one["master_param"] for one in optimizer.state.values()]
            moved = [a - b for a, b in zip(masters, before, strict=False)]
            truth.append((norm(masters), norm(moved)))
            mon.step_end()
            if number == 2:
                optimizer.load_state_dict(optimizer.state_dict())  # torch makes bfloat16 of them
    shown = [(record["weight/norm"], record["update/norm"]) for record in records(tmp_path)]
    assert [one for one, _ in shown] == pytest.approx([one for one, _ in truth], rel=1e-12)
    assert [one for _, one in shown[1:]] == pytest.approx([one for _, one in truth[1:]], rel=1e-5)
    assert not [name for record in records(tmp_path) for name in record if name.startswith("moment/norm")]


def test_masters_that_the_loop_keeps_go_by_the_names_of_the_model(tmp_path: Path) -> None:
    model = make(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-4)
    truth: dict[str, list[float]] = {"auto": [], "model": []}
    for source, norms in truth.items():
        with attach(
            tmp_path / source, model, optimizer, weights={"every": 1, "per_parameter": True, "source": source}
        ) as mon:
            for _ in (1, 2):
                model(torch.randn(4, 6, dtype=torch.bfloat16)).square().mean().backward()
                for master, own in zip(masters, model.parameters(), strict=True):
                    master.grad, own.grad = own.grad.float(), None
                optimizer.step()
                with torch.no_grad():
                    for master, own in zip(masters, model.parameters(), strict=True):
                        own.copy_(master)
                mon.step_end()
                norms.append(norm(masters if source == "auto" else model.parameters()))
        shown = [record["weight/norm"] for record in records(tmp_path / source)]
        assert shown == pytest.approx(norms, rel=1e-12)
        names = {name for _, name in tables(tmp_path / source, "weights")}
        assert names == {name for name, _ in model.named_parameters()}
    (event,) = said(tmp_path / "auto", "weights_source")
    assert event["data"] == {"masters": 4}
    assert not said(tmp_path / "model", "weights_source")


# ---- moments ----


class Lion(torch.optim.Optimizer):
    """The optimizer of arXiv 2302.06675, as people write it: through ``p.data``."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p))
                p.data.add_((mean * one + p.grad * (1 - one)).sign(), alpha=-group["lr"])
                mean.mul_(two).add_(p.grad, alpha=1 - two)


class Wrapper:
    """An optimizer that holds another, as mixed precision and data parallel libraries have it."""

    def __init__(self, inner: Any, name: str = "optimizer") -> None:
        setattr(self, name, inner)


def _muon(model: Any) -> list[Any]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, centered=True),
    "lion": lambda m: Lion(m.parameters()),
    "muon with adamw": _muon,
}
STATES = {
    "sgd": {"momentum_buffer": "momentum_buffer"},
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"},
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adamw fused": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adafactor": {"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col", "variance": "exp_avg_sq"},
    "rmsprop": {"square_avg": "square_avg", "grad_avg": "grad_avg"},
    "lion": {"exp_avg": "exp_avg"},
    "muon with adamw": {
        "momentum_buffer": "momentum_buffer",
        "exp_avg": "exp_avg",
        "exp_avg_sq": "exp_avg_sq",
    },
}


def _held(optimizers: list[Any], key: str) -> dict[int, Any]:
    """State tensors of one key by the id of the parameter."""
    return {
        id(p): s[key] for o in optimizers for p, s in o.state.items() if isinstance(s.get(key), torch.Tensor)
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moment_norms_of_every_optimizer(tmp_path: Path, kind: str, backend: str) -> None:
    model = make()
    optimizer = OPTIMIZERS[kind](model)
    inner = optimizer if isinstance(optimizer, list) else [optimizer]
    moments = {"every": 1, "per_parameter": True}
    with attach(tmp_path, model, optimizer, backend, moments=moments) as mon:
        for number in (1, 2):
            step(model, inner, number)
            mon.step_end()
    record, rows = records(tmp_path)[-1], tables(tmp_path, "moments")
    assert {name for name in record if name.startswith("moment/norm")} == {
        f"moment/norm/{state}" for state in STATES[kind].values()
    }
    for key, state in STATES[kind].items():
        held = _held(inner, key)
        assert held
        assert record[f"moment/norm/{state}"] == pytest.approx(norm(held.values()), rel=1e-6), state
        for name, parameter in model.named_parameters():
            shown = rows[2, name].get(f"moment/norm/{state}")
            if id(parameter) in held:
                assert shown == pytest.approx(norm([held[id(parameter)]]), rel=1e-6), (state, name)
            else:
                assert shown is None, (state, name)
    assert record["moment/v_negative"] in (0, None)
    assert (record["moment/v_negative"] is None) == (kind in ("sgd", "lion")), (
        "null where there is no such state"
    )


def test_wrapped_and_chained_optimizers_are_found(tmp_path: Path) -> None:
    for index, name in enumerate(("optimizer", "optim", "optimizers", "chained_optimizers")):
        model = make()
        inner = _muon(model) if name.endswith("s") else [torch.optim.AdamW(model.parameters(), lr=0.25)]
        wrapped = Wrapper(Wrapper(inner, name) if name.endswith("s") else Wrapper(inner[0], name))
        with attach(tmp_path / str(index), model, wrapped, gradients=True, moments={"every": 1}) as mon:
            step(model, inner, 1)
            mon.step_end()
        (record,) = records(tmp_path / str(index))
        assert record["moment/norm/exp_avg"] == pytest.approx(
            norm(_held(inner, "exp_avg").values()), rel=1e-6
        )
        assert record["grad/norm_clipped"] > 0, "the hooks are on what does the work"
        assert record["optim/lr"] == max(group["lr"] for one in inner for group in one.param_groups)
        for one in inner:
            assert not one._optimizer_step_pre_hooks, "and gone"
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, a list of them, or hold one"):
        attach(tmp_path / "none", make(), Wrapper(3))


def test_an_optimizer_that_a_wrapper_makes_anew_is_followed(tmp_path: Path) -> None:
    model = make()
    wrapped = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    with attach(tmp_path, model, wrapped, gradients=True, moments={"every": 1}) as mon:
        step(model, wrapped.optimizer, 1)
        mon.step_end()
        before, wrapped.optimizer = wrapped.optimizer, torch.optim.AdamW(model.parameters(), lr=0.25)
        step(model, wrapped.optimizer, 2)
        mon.step_end()
        step(model, wrapped.optimizer, 3)
        mon.step_end()
        assert not before._optimizer_step_pre_hooks
    first, second, third = records(tmp_path)
    assert first["optim/lr"] == 0.5 and second["optim/lr"] == third["optim/lr"] == 0.25
    assert second["moment/norm/momentum_buffer"] is None and second["moment/norm/exp_avg_sq"] > 0
    assert third["grad/norm_clipped"] > 0, "hooked at the end of the step in which it came"


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_is_null_before_the_first_update_and_right_after_a_reload(tmp_path: Path, backend: str) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with attach(tmp_path, model, optimizer, backend, moments={"every": 1}) as mon:
        mon.step_end()
        step(model, optimizer, 1)
        mon.step_end()
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state["exp_avg"] = state["exp_avg"] * 3
        optimizer.load_state_dict(saved)
        truth = norm(_held([optimizer], "exp_avg").values())
        mon.step_end()
        optimizer.state.clear()
        mon.step_end()
    empty, first, loaded, gone = (record["moment/norm/exp_avg"] for record in records(tmp_path))
    assert empty is None and gone is None
    assert loaded == pytest.approx(3 * first, rel=1e-6) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_moments_below_zero_are_counted_and_named_once(tmp_path: Path, backend: str) -> None:
    model = make(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attach(tmp_path, model, optimizer, backend, moments={"every": 1}) as mon:
        for number in (1, 2, 3):
            step(model, optimizer, number)
            if number > 1:
                optimizer.state[model[2].weight]["exp_avg_sq"][0, 1:3] = -1.0
            mon.step_end()
    assert [record["moment/v_negative"] for record in records(tmp_path)] == [0, 2, 2]
    (event,) = said(tmp_path, "negative_second_moment")
    assert event["data"] == {"state": "exp_avg_sq", "name": "2.weight", "count": 2, "tensors": 1}
    assert event["step"] == 2


def test_one_packed_read_a_step_whatever_is_on(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    everything = {
        "weights": {"every": 1, "per_parameter": True},
        "moments": {"every": 1, "per_parameter": True},
    }
    with attach(tmp_path, model, optimizer, "torch", gradients={"per_parameter": True}, **everything) as mon:
        for number in range(1, 5):
            step(model, optimizer, number)
            mon.step_end()
        reads = mon.monitor._backend
    assert reads.reads == 4


# ---- updates ----

UPDATES = {"every": 1, "per_parameter": True}
FEW = ("sgd", "adamw", "lion", "muon with adamw")


def copies(model: Any) -> dict[str, Any]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def moved(before: dict[str, Any], model: Any) -> dict[str, float]:
    """What an update is, from float64 copies."""
    after = copies(model)
    size = norm(before.values())
    differences = {name: after[name] - before[name] for name in after}
    same = sum(int((difference == 0).sum()) for difference in differences.values())
    whole = norm(differences.values())
    return {
        "update/norm": whole,
        "update/ratio": whole / size,
        "update/zero_share": same / sum(tensor.numel() for tensor in after.values()),
        **{name: norm([differences[name]]) / norm([before[name]]) for name in after},
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "every"), [*((kind, 1) for kind in FEW), ("adamw", 2), ("adamw", 3)])
def test_updates_are_what_the_optimizer_did(tmp_path: Path, kind: str, every: int, backend: str) -> None:
    model = make()
    optimizer = OPTIMIZERS[kind](model)
    truth = {}
    with attach(tmp_path, model, optimizer, backend, updates={**UPDATES, "every": every}) as mon:
        for number in range(1, 8):
            before = copies(model)
            step(model, optimizer, number)
            truth[number] = moved(before, model)
            mon.step_end()
    due = [number for number in truth if number == 1 or number % every == 0]
    shown, rows = records(tmp_path), tables(tmp_path, "updates")
    assert [record["step"] for record in shown] == due
    for record in shown:
        expected = truth[record["step"]]
        for name in ("update/norm", "update/ratio", "update/zero_share"):
            assert record[name] == pytest.approx(expected[name], rel=1e-5), (record["step"], name)
        for name in copies(model):
            assert rows[record["step"], name]["update/ratio"] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_others_write_to_weights_is_no_update(tmp_path: Path, backend: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other, truth = make(seed=5).state_dict(), []
    with attach(tmp_path, model, optimizer, backend, updates=UPDATES) as mon:
        for number in range(1, 7):
            if number == 3:
                model.load_state_dict(other)
            if number == 5:
                with torch.no_grad():
                    model[0].weight.mul_(2)
            before = copies(model)
            if number == 4:
                mon.step_end()  # nothing happened, as when a loss scaler skips
                truth.append(0.0)
                continue
            if number == 5:
                mon.step_end()  # somebody else's doing, and no update
                truth.append(None)
                continue
            step(model, optimizer, number)
            truth.append(moved(before, model)["update/norm"])
            mon.step_end()
    shown = records(tmp_path)
    assert [record["update/norm"] for record in shown] == [
        None if value is None else pytest.approx(value, rel=1e-5) for value in truth
    ]
    assert shown[3]["update/ratio"] == 0 and shown[3]["update/zero_share"] == 1


def test_a_step_that_the_scaler_skips_gives_0(tmp_path: Path) -> None:
    for fused in (False, True):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        with attach(tmp_path / str(fused), model, optimizer, updates=UPDATES) as mon:
            for number in (1, 2, 3, 4):
                loss = model(torch.ones(1, 2)).sum() * (float("inf") if number == 2 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                mon.step_end()
        norms = [record["update/norm"] for record in records(tmp_path / str(fused))]
        assert norms[1] == 0 and min(norms[0], norms[2], norms[3]) > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_updates_are_lost_in_bfloat16_and_seen_in_its_masters(tmp_path: Path, backend: str) -> None:
    model = make(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-5)
    shown = {}
    for source in ("auto", "model"):
        with attach(
            tmp_path / source, model, optimizer, backend, updates={**UPDATES, "source": source}
        ) as mon:
            for _ in (1, 2):
                model(torch.ones(4, 6, dtype=torch.bfloat16)).square().mean().backward()
                for master, own in zip(masters, model.parameters(), strict=True):
                    master.grad, own.grad = own.grad.float(), None
                optimizer.step()
                with torch.no_grad():
                    for master, own in zip(masters, model.parameters(), strict=True):
                        own.copy_(master)
                mon.step_end()
        shown[source] = records(tmp_path / source)[-1]
    assert shown["auto"]["update/norm"] > 0 and shown["auto"]["update/zero_share"] < 0.5
    assert shown["model"]["update/zero_share"] > 0.9
    (event,) = said(tmp_path / "model", "updates_of_rounded_weights")
    assert "bfloat16" in event["text"]
    assert not said(tmp_path / "auto", "updates_of_rounded_weights")


def test_from_zero_the_ratio_is_infinite_and_0_of_0_is_null(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"still": torch.zeros(3), "moves": torch.zeros(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach(tmp_path, model, optimizer, updates=UPDATES) as mon:
        model["moves"].grad = torch.ones(2)
        optimizer.step()
        mon.step_end()
    (record,) = records(tmp_path)
    rows = {name: row["update/ratio"] for (_, name), row in tables(tmp_path, "updates").items()}
    assert rows == {"still": None, "moves": math.inf}
    assert record["update/ratio"] == "Infinity" or record["update/ratio"] == math.inf
    assert record["update/norm"] == pytest.approx(math.sqrt(2)) and record["update/zero_share"] == 0.6


@pytest.mark.parametrize("section", ["gradients", "weights", "moments", "updates", "spectral"])
@pytest.mark.parametrize("invert", [False, True])
def test_a_target_that_no_parameter_has_is_told(tmp_path: Path, section: str, invert: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"target": "." if invert else "no such name", "invert": invert}
    sinks = {"output_dir": str(tmp_path), "run_name": "r", "sinks": ["jsonl"]}
    with trainmon.attach(model, optimizer, {**sinks, section: keys}):
        pass
    with trainmon.attach(model, optimizer, {**sinks, section: {"target": "bias"}}):
        pass
    told = [event for event in read_jsonl(tmp_path / "r/rank_0/events.jsonl") if "kind" in event]
    assert [event["kind"] for event in told] == ["nothing_selected"]
    assert told[0]["text"].startswith(f"{section}.target ('{keys['target']}') selects no parameter")


def test_only_selected_weights_are_copied_and_come_and_go(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, model, optimizer, updates={**UPDATES, "target": "weight"}) as mon:
        for number in range(1, 7):
            if number == 3:
                model.append(torch.nn.Linear(2, 2))
                optimizer.add_param_group({"params": model[-1].parameters()})
            if number == 5:
                model[0].weight.requires_grad_(False)
            before = copies(model)
            step(model, optimizer, number)
            truth = moved(before, model)
            mon.step_end()
        (probe,) = [slot.probe for slot in mon.monitor._probes if slot.probe.name == "updates"]
        assert all("weight" in name for name in probe._copies)
    rows = tables(tmp_path, "updates")
    assert {name for number, name in rows if number == 1} == {"0.weight", "2.weight"}
    assert rows[6, "3.weight"]["update/ratio"] == pytest.approx(truth["3.weight"], rel=1e-5)
    assert rows[6, "2.weight"]["update/ratio"] == pytest.approx(truth["2.weight"], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_the_norm_that_adam_says_is_the_norm_of_the_update(tmp_path: Path, kind: str, backend: str) -> None:
    model = make()
    make_one = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    optimizer = make_one(model.parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True)
    with attach(tmp_path, model, optimizer, backend, updates={"every": 1, "adam": True}) as mon:
        for number in (1, 2, 3):
            step(model, optimizer, number)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # a scheduler, before the step is over
            mon.step_end()
    for record in records(tmp_path):
        assert record["update/norm_adam"] == pytest.approx(record["update/norm"], rel=1e-4)


# ---- gradients before reduction ----


def micro_steps(mon: Any, model: Any, optimizer: Any, number: int, micros: int, scale: float = 1.0) -> Any:
    """Trains with accumulation; returns norms of each micro-batch's own gradient and of the accumulated one, by key."""
    own, summed = {}, {}
    for micro in range(micros):
        before = {
            name: 0 if p.grad is None else p.grad.double().clone() for name, p in model.named_parameters()
        }
        torch.manual_seed(10 * number + micro)
        (model(torch.randn(4, 6)).square().mean() * scale).backward()
        mon.micro_end(loss_scale=None if scale == 1 else scale)
        for name, p in model.named_parameters():
            own[f"{name}@{micro}"] = norm([p.grad.double() - before[name]]) / scale
            summed[f"{name}@{micro}"] = norm([p.grad]) / scale
    mon.grads_ready()
    optimizer.step()
    optimizer.zero_grad()
    mon.step_end()
    return own, summed


UNREDUCED = dict.fromkeys(("local", "device", "micro", "increment"), True) | {"micro_every": 1}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_micro_batches_own_and_accumulated_gradients(tmp_path: Path, scale: float, backend: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {**UNREDUCED, "target": "weight"}
    truth = {}
    with attach(tmp_path, model, optimizer, backend, gradients=gradients) as mon:
        for number, micros in enumerate((2, 5, 1), start=1):  # accumulation of changing length
            truth[number] = micro_steps(mon, model, optimizer, number, micros, scale)
    rows, shown = tables(tmp_path, "gradients"), records(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    for number, (own, summed) in truth.items():
        micros = len(own) // len(names)
        expected = {key for key in own if "weight" in key} | {name for name in names if "weight" in name}
        assert {name for at, name in rows if at == number} == expected
        last = [summed[f"{name}@{micros - 1}"] for name in names]
        assert shown[number - 1]["grad/norm_device"] == pytest.approx(math.hypot(*last), rel=1e-6)
        for name in names:
            if "weight" not in name:
                continue
            local = rows[number, name]["grad/norm_local"]
            assert local == pytest.approx(summed[f"{name}@{micros - 1}"], rel=1e-6)
            before = 0.0
            for micro in range(micros):
                key = f"{name}@{micro}"
                assert rows[number, key]["grad/norm_micro"] == pytest.approx(own[key], rel=1e-4)
                grown = rows[number, key]["grad/norm_increment"]
                assert grown == pytest.approx(summed[key] - before, rel=1e-4, abs=1e-8)
                before = summed[key]


def test_hooks_on_parameters_come_and_go_with_what_listens(tmp_path: Path) -> None:
    def hooks(model: Any) -> int:
        return sum(bool(p._backward_hooks) + bool(p._post_accumulate_grad_hooks) for p in model.parameters())

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "off", model, optimizer, gradients=True) as mon:
        assert hooks(model) == 0
    with attach(tmp_path / "on", model, optimizer, gradients={**UNREDUCED, "every": 2}) as mon:
        assert hooks(model) == 8
        for number in range(1, 5):
            if number == 3:
                model.append(torch.nn.Linear(2, 2))
                optimizer.add_param_group({"params": model[-1].parameters()})
            step(model, optimizer, number)
            mon.step_end()
        assert hooks(model) == 12
    assert hooks(model) == 0
    rows = tables(tmp_path / "on", "gradients")
    assert {number for number, _ in rows} == {1, 2, 4}
    assert rows[4, "3.weight"]["grad/norm_local"] > 0


def test_a_step_whose_publishing_ctrl_c_cuts_off_is_published_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), attach(tmp_path, model, optimizer, gradients=True) as mon:
        for number in (1, 2):
            step(model, optimizer, number)
            with monkeypatch.context() as patched:
                if number == 2:
                    patched.setattr(type(mon.monitor._own), "write_cost", cut)
                mon.step_end()
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_micro_batches_have_a_cadence_of_their_own_within_the_sections(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {"every": 2, "local": True, "device": True, "micro": True, "micro_every": 3}
    with attach(tmp_path, model, optimizer, gradients=gradients) as mon:
        for number in range(1, 13):
            if number == 3:
                model.append(torch.nn.Linear(2, 2))
                optimizer.add_param_group({"params": model[-1].parameters()})
            step(model, optimizer, number)
            mon.step_end()
    rows = tables(tmp_path, "gradients")
    assert [number for number, name in rows if name == "0.weight@0"] == [1, 6, 12]
    assert [number for number, name in rows if name == "0.weight"] == [1, 2, 4, 6, 8, 10, 12]
    assert rows[4, "3.weight"]["grad/norm_local"] > 0  # that came under way
    assert [record["step"] for record in records(tmp_path) if record.get("grad/norm_device")] == [
        1,
        2,
        4,
        6,
        8,
        10,
        12,
    ]


def test_tied_sparse_and_missing_gradients_before_reduction(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "table": torch.nn.Embedding(7, 3, sparse=True),
            "one": torch.nn.Linear(3, 3),
            "two": torch.nn.Linear(3, 3),
        }
    )
    model["two"].weight = model["one"].weight
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, model, optimizer, gradients=UNREDUCED) as mon:
        x = model["table"](torch.tensor([1, 1, 5]))
        model["two"](model["one"](x)).square().sum().backward()
        mon.micro_end()
        truth = {
            name: norm([p.grad.to_dense()]) for name, p in model.named_parameters() if p.grad is not None
        }
        mon.step_end()
    rows = tables(tmp_path, "gradients")
    assert {name for _, name in rows} == {*truth, *(f"{name}@0" for name in truth)}
    for name, value in truth.items():
        assert rows[1, name]["grad/norm_local"] == pytest.approx(value, rel=1e-6), name
        assert rows[1, f"{name}@0"]["grad/norm_micro"] == pytest.approx(value, rel=1e-6), name


def test_a_part_that_reentrant_checkpointing_runs_twice_has_no_norm_of_a_micro_batch(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, model, optimizer, gradients=UNREDUCED) as mon:
        x = torch.randn(2, 3, requires_grad=True)
        for _ in (1, 2):
            x = checkpoint(model, x, use_reentrant=True)
        x.square().sum().backward()
        truth = norm([model.weight.grad])
        mon.micro_end()
        mon.step_end()
    rows = tables(tmp_path, "gradients")
    assert rows[1, "weight"]["grad/norm_local"] == pytest.approx(truth, rel=1e-6)
    assert rows[1, "weight@0"]["grad/norm_increment"] == pytest.approx(truth, rel=1e-6)
    assert rows[1, "weight@0"].get("grad/norm_micro") is None


# ---- spectra ----


def singular(tensor: Any) -> Any:
    return torch.linalg.svdvals(tensor.detach().double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_stable_ranks_and_singular_values_of_matrices_in_turns(tmp_path: Path, backend: str) -> None:
    torch.manual_seed(0)
    shapes = {"a": (40, 300), "b": (300, 300), "c": (3, 20, 30), "flat": (7,), "d": (280, 290)}
    model = torch.nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
    with torch.no_grad():
        model["c"][1] = 0
        for one in (model["a"], model["b"], model["d"]):
            one += 4 * torch.outer(torch.randn(len(one)), torch.randn(one.shape[1])) / math.sqrt(one.shape[1])
    matrices = {"a": 0, "b": 0, "c[0]": 0, "c[1]": 1, "c[2]": 2, "d": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spectral = {"every": 1, "eigenvalue": True, "elements": 90_000}
    with attach(tmp_path, model, optimizer, backend, spectral=spectral) as mon:
        for _ in range(9):
            for parameter in model.values():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            with torch.no_grad():
                model["c"][1] = 0
            mon.step_end()
    truth = {key: singular(model[key[0]][at] if "[" in key else model[key]) for key, at in matrices.items()}
    rows = tables(tmp_path, "spectral")
    steps = {number: [name for at, name in rows if at == number] for number in range(1, 10)}
    # a fits with nothing beside b; the small ones go together; a zero matrix has no row.
    assert steps[1] == ["a"] and steps[2] == ["b"] and set(steps[3]) == {"c[0]", "c[2]", "d"}
    assert steps[4] == ["a"] and steps[7] == ["a"]
    for name in steps[9]:
        values, row = truth[name], rows[9, name]
        rank = float((values**2).sum() / values[0] ** 2)
        assert row["spectral/sigma"] == pytest.approx(float(values[0]), rel=0.01)
        assert row["spectral/eigenvalue"] == pytest.approx(float(values[0]) ** 2, rel=0.02)
        assert rank * (1 - 1e-6) <= row["spectral/stable_rank"] <= rank * 1.02
        if backend == "host":
            assert rank * 0.97 <= row["spectral/stable_rank_low"] <= rank * (1 + 1e-6)
        else:
            assert row.get("spectral/stable_rank_low") is None
    assert len(said(tmp_path, "spectral_one_sided")) == (backend == "torch")


def test_lives_that_are_short_come_to_all_matrices(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({name: torch.randn(8, 8) for name in "abcde"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spectral = {"every": 1, "elements": 64}
    for resumed in (0, 2, 4):
        keys = {"output_dir": str(tmp_path), "run_name": "r", "sinks": ["csv"], "spectral": spectral}
        with trainmon.attach(model, optimizer, keys, resumed_step=resumed) as mon:
            for _ in range(2):
                mon.step_end()
    assert [name for _, name in sorted(tables(tmp_path, "spectral"))] == ["a", "b", "c", "d", "e", "a"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matrix_that_is_not_finite_or_zero_has_no_spectrum(tmp_path: Path, backend: str) -> None:
    model = torch.nn.ParameterDict({"bad": torch.ones(4, 5), "nil": torch.zeros(4, 5), "good": torch.eye(4)})
    with torch.no_grad():
        model["bad"][1, 2] = float("nan")
    with attach(tmp_path, model, torch.optim.SGD(model.parameters()), backend, spectral={"every": 1}) as mon:
        mon.step_end()
    rows = tables(tmp_path, "spectral")
    assert {name for _, name in rows} == {"good"}
    assert rows[1, "good"]["spectral/stable_rank"] == pytest.approx(4, rel=1e-4)
    assert not said(tmp_path, "probe_failed")


def test_without_a_matrix_spectral_says_so(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"flat": torch.ones(7)})
    with attach(tmp_path, model, torch.optim.SGD(model.parameters()), spectral={"every": 1}) as mon:
        mon.step_end()
    assert len(said(tmp_path, "spectral_nothing")) == 1
