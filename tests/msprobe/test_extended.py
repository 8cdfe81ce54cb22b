"""`extended: true`, and beside each of its decisions what the default does instead."""

from __future__ import annotations

import gc
import json
import logging
import math
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.msprobe.loops import adam, backward, config, model, rows, train  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2  # noqa: E402


def watched(
    directory: Path, net: nn.Module, steps: Any, *monitors: str, mode: str = "extended", **keys: Any
) -> Any:
    """The rows of a monitor after some steps. `keys` of the one monitor by its name."""
    own = {one: keys.pop(one) for one in monitors if one in keys}
    entry = config(directory, *monitors, mode=mode, **keys)
    for name, more in own.items():
        entry["monitors"][name] |= more
    optimizer = keys.pop("optimizer", None) or adam(net)
    mon = TrainerMonitorV2(entry)
    mon.start(net, optimizer)
    steps(net, optimizer)
    mon.stop()
    return rows(directory, monitors[0])


def names(found: list[dict[str, str]], scope: str | None = None) -> list[str]:
    return [row["module_name"] for row in found if scope in (None, row["scope"])]


# -- D9, D10: passes ----------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Calls its one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.fc(x).tanh())
        return out


def accumulated(net: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(4):
            backward(net)
        optimizer.step()


def test_rows_of_modules_are_unique(tmp_path: Path) -> None:
    """T-27, D9: micro_step from 1, call from 0 in each micro-batch, in both directions."""
    torch.manual_seed(0)
    found = watched(tmp_path / "x", Twice(), accumulated, "module")
    head = (tmp_path / "x" / "rank_0" / "module_step0-0.csv").read_text().splitlines()[0]
    assert head == "vpp_stage,step,module_name,scope,micro_step,call,min,max,mean,norm,nans"
    keys = Counter(
        (row["step"], row["module_name"], row["scope"], row["micro_step"], row["call"]) for row in found
    )
    assert set(keys.values()) == {1}
    for name in ("fc.input.0", "fc.output.0", "fc.grad_output.0"):
        labels = {(row["micro_step"], row["call"]) for row in found if row["module_name"] == name}
        assert labels == {(str(micro), str(call)) for micro in range(1, 5) for call in range(2)}
    # The second call's gradient is the loss's own: its output is the model's.
    by = {(row["module_name"], row["step"], row["micro_step"], row["call"]): row["norm"] for row in found}
    assert by["fc.grad_output.0", "1", "3", "1"] == by[".grad_output.0", "1", "3", "0"]
    assert by["fc.grad_output.0", "1", "3", "0"] != by[".grad_output.0", "1", "3", "0"]


def test_without_it_tags_repeat(tmp_path: Path) -> None:
    found = watched(tmp_path, Twice(), accumulated, "module", mode="default")
    assert names(found).count("fc.input.0") == 2 * 4 * 2
    assert "micro_step" not in found[0]


def test_forward_passes_of_one_backward_pass_are_one_micro_batch(tmp_path: Path) -> None:
    """A model that is called for two views of a sample."""

    def steps(net: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            (net(torch.ones(2, 3)).square().sum() + net(torch.zeros(2, 3)).square().sum()).backward()
        optimizer.step()

    found = watched(tmp_path, model(), steps, "module")
    labels = [(row["micro_step"], row["call"]) for row in found if row["module_name"] == ".input.0"]
    assert labels == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_evaluation_has_no_rows(tmp_path: Path, how: str, include: bool) -> None:
    """T-25, D10: unless asked for; and nothing is kept of a thousand passes."""
    held: list[weakref.ref[torch.Tensor]] = []

    def steps(net: nn.Module, optimizer: Any) -> None:
        train(net, optimizer)
        net.train(how != "eval")
        with torch.no_grad() if how == "no_grad" else torch.enable_grad():
            for _ in range(50):
                output = net(torch.ones(2, 3))
                held.append(weakref.ref(output))
                del output
        gc.collect()
        assert not any(one() is not None for one in held)
        net.train()
        train(net, optimizer)

    found = watched(tmp_path, model(), steps, "module", module={"include_eval": include})
    last = [row for row in found if row["step"] == "1"]
    assert names(last).count("0.input.0") == (51 if include else 1)
    first = [row for row in found if row["step"] == "0"]
    if not include:
        assert [row | {"step": ""} for row in last if row["module_name"] == ".input.0"] == [
            row | {"step": ""} for row in first if row["module_name"] == ".input.0"
        ]


def test_a_part_in_eval_mode_of_a_model_in_training_has_rows(tmp_path: Path) -> None:
    """Frozen statistics of a norm are no evaluation."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[1].eval()
    found = watched(tmp_path, net, train, "module")
    assert "1.input.0" in names(found)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["default", "extended"])
def test_a_pass_that_is_repeated_has_no_second_rows(tmp_path: Path, reentrant: bool, mode: str) -> None:
    """T-26, D10."""
    torch.manual_seed(0)
    found = watched(tmp_path, Checkpointed(reentrant), accumulated, "module", mode=mode)
    counts = Counter(names(found))
    assert counts["inner.0.input.0"] == (16 if mode == "default" else 8)
    for name in ("inner.2.output.0",) if mode == "extended" else ():
        assert counts[name] == 8
    for name in ("inner.0.grad_output.0", "inner.2.grad_input.0", "first.grad_output.0"):
        assert counts[name] == 8
    if mode == "extended":
        keys = Counter((r["step"], r["module_name"], r["micro_step"], r["call"]) for r in found)
        assert set(keys.values()) == {1}
        labels = {(r["micro_step"], r["call"]) for r in found if r["module_name"] == "inner.2.grad_output.0"}
        assert labels == {(str(micro), "0") for micro in range(1, 5)}


def test_a_pass_that_is_repeated_if_it_is_asked_for(tmp_path: Path) -> None:
    found = watched(tmp_path, Checkpointed(False), train, "module", module={"include_recompute": True})
    calls = [row["call"] for row in found if row["module_name"] == "inner.0.input.0"]
    assert calls == ["0", "1"]


# -- D11, D23: containers and arguments ---------------------------------------------------------------------------


@dataclass
class Result:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


class Nested(nn.Module):
    """Takes and gives containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, batch: dict[str, Any], scale: list[torch.Tensor], *, shift: torch.Tensor) -> Result:
        h = self.fc(batch["x"]) * scale[0] + shift
        return Result(h * 2.0, [h, h * 3.0])


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.nested = nn.Linear(3, 3), Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.nested({"x": x, "more": (x, None)}, [torch.ones(1)], shift=self.fc(x))
        return result.logits + result.hidden[1]


@pytest.mark.parametrize("mode", ["default", "extended"])
def test_containers(tmp_path: Path, mode: str) -> None:
    """T-24, D11."""
    torch.manual_seed(0)
    found = watched(tmp_path, Outer(), train, "module", mode=mode)
    own = [
        name.removeprefix("nested.")
        for name in names(found)
        if name.startswith("nested.") and ".fc" not in name
    ]
    if mode == "default":
        assert own == ["input.0"]
        return
    forward = [*(f"input.{index}" for index in range(4)), *(f"output.{index}" for index in range(3))]
    assert own[:7] == forward
    # Of what is given by keyword too, and with its number.
    assert set(own[7:]) == {"grad_input.3", "grad_output.0", "grad_output.1", "grad_output.2"}
    norms = {row["module_name"]: float(row["norm"]) for row in found}
    assert norms["nested.output.2"] == pytest.approx(1.5 * norms["nested.output.0"], rel=1e-6)
    assert norms["nested.grad_output.0"] == pytest.approx(norms[".grad_output.0"], rel=1e-6)
    # d/dh of 2 h + 3 h; of tensors in containers it is all that comes to them, from within the module, too.
    assert norms["nested.grad_output.1"] == pytest.approx(5 * norms[".grad_output.0"], rel=1e-6)
    assert norms["nested.grad_input.3"] == pytest.approx(5 * norms[".grad_output.0"], rel=1e-6)


class Takes(nn.Module):
    def forward(self, ids: torch.Tensor, x: torch.Tensor, unused: torch.Tensor) -> Any:
        return ids, None, x * 2.0, x * 3.0


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.takes = nn.Linear(3, 3), Takes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        out: torch.Tensor = self.takes(torch.arange(3), h, h)[3]
        return out


@pytest.mark.parametrize("mode", ["v2", "default", "extended"])
def test_arguments_without_gradient(tmp_path: Path, mode: str) -> None:
    """T-49, D23: no rows of zeros, and an index says which tensor, as those of the forward pass do."""
    found = watched(tmp_path, Gives(), train, "module", mode=mode)
    own = [name for name in names(found, "backward") if name.startswith("takes")]
    if mode == "extended":
        assert own == ["takes.grad_input.1", "takes.grad_output.2"]
    else:
        assert own == [*(f"takes.grad_input.{index}" for index in range(3)), "takes.grad_output.0"]
        zeros = [row["norm"] for row in found if row["module_name"] in (own[0], own[2])]
        assert zeros == ["0.0", "0.0"]


# -- D12: targets -------------------------------------------------------------------------------------------------


def three() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in ("l1", "l10", "l11")})


@pytest.mark.parametrize(
    ("targets", "left"),
    [
        (["l1"], {"l1", "l10", "l11"}),
        (["=l1.weight", "=l1"], {"l1"}),
        (["glob:l1[01]*"], {"l10", "l11"}),
        (["re:^l1[01]"], {"l10", "l11"}),
        (["l1", "!l11"], {"l1", "l10"}),
        (["!re:l1$", "!re:^l1\\."], {"l10", "l11"}),
        (["re:("], {"l1", "l10", "l11"}),
    ],
)
@pytest.mark.parametrize("monitor", ["module", "param", "weight_grad", "optimizer"])
def test_targets(tmp_path: Path, monitor: str, targets: list[str], left: set[str]) -> None:
    """T-29: `=l1` is l1 alone; of all monitors."""

    def steps(net: Any, optimizer: Any) -> None:
        sum(net[name](torch.ones(1, 2)).sum() for name in net).backward()
        optimizer.step()

    found = watched(tmp_path, three(), steps, monitor, **{monitor: {"targets": targets}})
    assert {name.split(".")[0] for name in names(found)} == left
    if targets[0] == "=l1.weight" and monitor in ("param", "weight_grad"):
        assert set(names(found)) == {"l1.weight"}


def test_targets_of_other_monitors_need_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = watched(tmp_path, model(), train, "param", mode="default", param={"targets": ["0"]})
    assert {name.split(".")[0] for name in names(found)} == {"0", "2"}
    assert "monitors.param.targets needs extended: true" in caplog.text


# -- D13: state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "scopes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"]),
        (
            lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
            ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        ),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), ["row_var", "col_var", "variance"]),
        (lambda p: torch.optim.NAdam(p, lr=0.1), ["exp_avg", "exp_avg_sq"]),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), ["square_avg"]),
    ],
)
def test_what_else_an_optimizer_keeps(tmp_path: Path, make: Any, scopes: list[str]) -> None:
    """T-20, D13: the scope is the key."""
    for mode in ("extended", "default"):
        net = model()
        optimizer = make(net.parameters())
        mon = TrainerMonitorV2(config(tmp_path / mode, "optimizer", mode=mode))
        mon.start(net, optimizer)
        train(net, optimizer, 2)
        mon.stop()
        found = [row for row in rows(tmp_path / mode, "optimizer") if row["step"] == "1"]
        wanted = scopes if mode == "extended" else [one for one in scopes if one in ("exp_avg", "exp_avg_sq")]
        assert list(dict.fromkeys(row["scope"] for row in found)) == wanted
        assert all(row["module_name"].endswith("." + row["scope"]) for row in found)
        for row in found:
            name, key = row["module_name"].rsplit(".", 1)
            state = optimizer.state[dict(net.named_parameters())[name]][key]
            assert float(row["norm"]) == pytest.approx(float(state.norm()), rel=1e-6)


# -- T-17: steps that are thrown away -----------------------------------------------------------------------------


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("mode", ["default", "extended"])
def test_a_step_that_a_scaler_skips(
    tmp_path: Path, mode: str, none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """T-17: its rows are dropped and counted; by default they join the next step's."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    mon = TrainerMonitorV2(config(tmp_path, "module", "weight_grad", mode=mode))
    mon.start(net, optimizer)
    with caplog.at_level(logging.INFO):
        for step in range(3):
            optimizer.zero_grad(set_to_none=none)
            x = torch.ones(2, 3) if step != 1 else torch.full((2, 3), math.inf)
            scaler.scale(net(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert mon.current_step == 2
    mon.stop()
    last = [row for row in rows(tmp_path, "module") if row["step"] == "1"]
    inputs = [row["norm"] for row in last if row["module_name"] == ".input.0"]
    assert len(inputs) == (2 if mode == "default" else 1)
    unreduced = [r for r in rows(tmp_path, "weight_grad") if (r["step"], r["scope"]) == ("1", "unreduced")]
    assert len(unreduced) == (8 if mode == "default" else 4)
    assert bool(mon.discarded) == (mode == "extended")
    assert ("the optimizer was not called" in caplog.text) == (mode == "extended")
    if none or mode == "extended":
        assert "micro-batches" not in caplog.text  # a step that is made anew has no more of them


def test_accumulation_is_no_skipped_step(tmp_path: Path) -> None:
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "module", mode="extended"))
    mon.start(net, optimizer)
    accumulated(net, optimizer)
    mon.stop()
    assert mon.discarded == 0
    assert names(rows(tmp_path, "module")).count(".input.0") == 8


# -- columns, views, numbers --------------------------------------------------------------------------------------

MORE = ("n", "sum", "sumsq", "absmax", "rms", "n_posinf", "n_neginf", "n_zero", "first_bad")


@pytest.mark.parametrize(
    "values",
    [
        [1.0, -3.0, 0.0, 2.0],
        [0.0, math.inf, 1.0, math.inf],
        [1.0, -math.inf, math.nan],
        [],
        [1e30] * 4,
    ],
)
def test_more_columns(tmp_path: Path, values: list[float]) -> None:
    x = torch.tensor(values)

    def steps(net: nn.Module, optimizer: Any) -> None:
        net(x)
        optimizer.step()

    net = nn.Identity()
    net.weight = nn.Parameter(torch.ones(1))
    (row, _) = watched(tmp_path, net, steps, "module", module={"ops": ["max", *MORE]})
    assert list(row)[6:] == ["max", *MORE]
    wide = x.double()
    bad = (~x.isfinite()).nonzero().reshape(-1).tolist()
    want = {
        "n": len(values),
        "sum": float(wide.sum()),
        "sumsq": float(wide.square().sum()),
        "absmax": float(wide.abs().max()) if values else math.nan,
        "rms": float(wide.square().mean().sqrt()),
        "n_posinf": values.count(math.inf),
        "n_neginf": values.count(-math.inf),
        "n_zero": values.count(0.0),
        "first_bad": bad[0] if bad else -1,
    }
    assert {name: float(row[name]) for name in MORE} == pytest.approx(want, rel=1e-12, nan_ok=True)


def test_more_columns_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums follow from what was read; counts are not known there."""
    from trainmon.adapters.torch_rows import meter

    monkeypatch.setattr(meter, "_is_on_device", meter._is_plain)
    monkeypatch.setattr(meter, "_is_plain", lambda one: False)
    found = watched(tmp_path, model(), train, "param", param={"ops": [*MORE]})
    weight = next(model().parameters()).detach().double()
    row = found[0]
    assert float(row["sumsq"]) == pytest.approx(float(weight.square().sum()), rel=1e-6)
    assert float(row["absmax"]) == pytest.approx(float(weight.abs().max()), rel=1e-6)
    assert float(row["rms"]) == pytest.approx(float(weight.square().mean().sqrt()), rel=1e-6)
    assert {row[name] for name in ("n_posinf", "n_neginf", "n_zero", "first_bad")} == {"nan"}


def test_other_columns_are_msprobes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (row, *_) = watched(tmp_path, model(), train, "param", mode="default", param={"ops": ["rms", "max"]})
    assert "rms" not in row and "max" in row
    assert "Unsupported ops ['rms']" in caplog.text


@pytest.mark.parametrize("view", ["accumulated", "own"])
@pytest.mark.parametrize("each", [False, True])
def test_gradients_as_each_micro_batch_adds_them(tmp_path: Path, view: str, each: bool) -> None:
    def steps(net: nn.Module, optimizer: Any) -> None:
        for scale in (1.0, 3.0):
            (net(torch.ones(2, 3)).sum() * scale).backward()
        optimizer.step()

    net = nn.Sequential(nn.Linear(3, 2, bias=False))
    keys = {"grad_view": view, "monitor_mbs_grad": each, "micro_batch_number": 2}
    found = watched(tmp_path, net, steps, "weight_grad", weight_grad=keys)
    unreduced = [(row["micro_step"], float(row["max"])) for row in found if row["scope"] == "unreduced"]
    last = ("2", 8.0 if view == "accumulated" else 6.0)
    assert unreduced == [*([("1", 2.0)] if each else []), last]
    assert [float(row["max"]) for row in found if row["scope"] == "reduced"] == [8.0]


@pytest.mark.parametrize("where", ["config", "start"])
@pytest.mark.parametrize("mode", ["v2", "default", "extended"])
def test_the_number_of_the_first_step(tmp_path: Path, where: str, mode: str) -> None:
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(
        config(
            tmp_path,
            "param",
            mode=mode,
            start_step=12,
            **({"start_iteration": 10} if where == "config" else {}),
        )
    )
    mon.start(net, optimizer, **({"start_iteration": 10} if where == "start" else {}))
    train(net, optimizer, 4)
    mon.stop()
    assert mon.current_step == (4 if mode == "v2" else 14)
    assert {row["step"] for row in rows(tmp_path, "param")} == (set() if mode == "v2" else {"12", "13"})


@pytest.mark.parametrize("mode", ["default", "extended"])
def test_complex_numbers(tmp_path: Path, mode: str) -> None:
    """D6: of the modulus, or norm over both parts and the rest undefined or real."""
    net = nn.Identity()
    net.weight = nn.Parameter(torch.tensor([3 + 4j, 0j]))
    found = watched(tmp_path, net, lambda net, optimizer: optimizer.step(), "param", mode=mode)
    values = [float(found[0][name]) for name in ("min", "max", "mean", "norm", "nans")]
    want = [0.0, 5.0, 2.5, 5.0, 0.0] if mode == "extended" else [math.nan, math.nan, 1.5, 5.0, 0.0]
    assert values == pytest.approx(want, nan_ok=True)


@pytest.mark.parametrize("mode", ["default", "extended"])
def test_gradients_without_elements(tmp_path: Path, mode: str) -> None:
    """D8: a row of nothing, or none."""
    net = nn.Linear(2, 1)
    net.nothing = nn.Parameter(torch.zeros(0))

    def steps(net: Any, optimizer: Any) -> None:
        (net(torch.ones(1, 2)).sum() + net.nothing.sum()).backward()
        optimizer.step()

    found = [
        row
        for row in watched(tmp_path, net, steps, "weight_grad", mode=mode)
        if row["module_name"] == "nothing"
    ]
    if mode == "extended":
        assert not found
    else:
        assert [(row["min"], row["norm"], row["nans"]) for row in found] == [("nan", "0.0", "0.0")] * 2


@pytest.mark.parametrize("mode", ["default", "extended"])
def test_rows_of_a_step_that_has_not_ended_are_dropped_and_said(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """D15."""
    with caplog.at_level(logging.INFO):
        found = watched(tmp_path, model(), lambda net, optimizer: backward(net), "module", mode=mode)
    assert not found
    assert "rows of the step that had begun are dropped" in caplog.text


def test_a_run_leaves_word_of_itself(tmp_path: Path) -> None:
    """D18: beginning and end of each run in a directory."""
    for _ in range(2):
        watched(tmp_path, model(), lambda net, o: train(net, o, 2), "param", start_iteration=5, start_step=5)
    records = [json.loads(line) for line in (tmp_path / "rank_0" / "manifest.jsonl").read_text().splitlines()]
    assert [one["event"] for one in records] == ["run", "end"] * 2
    assert records[0]["first_step"] == 5 and records[0]["rank"] == 0
    assert records[0]["config"] == records[2]["config"] and len(records[0]["config"]) == 64
    assert records[0]["versions"]["trainmon"] and records[0]["versions"]["torch"]
    assert records[0]["watched"] == {"param": "4 parameters"}
    assert records[1] | {"time": 0} == {
        "event": "end", "time": 0, "next_step": 7, "rows": {"param": 16}, "errors": 0, "discarded": 0,
    }  # fmt: skip
    assert not (tmp_path / "rank_0" / "manifest.jsonl").read_text().count("\r")
