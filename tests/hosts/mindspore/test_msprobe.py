"""The drop-in for msProbe's Monitor V2 on MindSpore: the rows of real trainings against NumPy on copies."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import Parameter, ParameterTuple, Tensor, nn  # noqa: E402
from mindspore.train import Callback, Model  # noqa: E402

from tests.hosts.mindspore.training import MODES, Mean, adam, data, network  # noqa: E402
from tests.hosts.mindspore.training import rows as samples  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2  # noqa: E402

FOUR = ("module", "weight_grad", "optimizer", "param")
OPS = ("min", "max", "mean", "norm", "nans")


@pytest.fixture(autouse=True)
def pynative() -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def monitor(folder: Path, *monitors: str, **keys: Any) -> TrainerMonitorV2:
    """All steps in one file a monitor."""
    wanted = {one: {"enabled": True} for one in monitors or FOUR}
    settings = {"framework": "mindspore", "output_dir": str(folder), "step_count_per_record": 100}
    return TrainerMonitorV2({**settings, "monitors": wanted, **keys})


def table(folder: Path, name: str, rank: int = 0) -> list[dict[str, str]]:
    found = []
    for path in sorted((folder / f"rank_{rank}").glob(f"{name}_step*.csv")):
        with path.open(newline="") as lines:
            found += list(csv.DictReader(lines))
    return found


def same(row: dict[str, str], array: Any) -> None:
    """Extremes and counts exactly, mean and norm to 1e-12 of the largest magnitude."""
    values = np.asarray(array, np.float64)
    truth = [
        values.min(),
        values.max(),
        values.mean(),
        np.sqrt(np.square(values).sum()),
        np.isnan(values).sum(),
    ]
    largest = max(map(abs, truth[:4]))
    for name, true in zip(OPS, truth, strict=True):
        got = float(row[name])
        assert got == true or abs(got - true) <= 1e-12 * largest * (name in ("mean", "norm")), (
            row,
            name,
            true,
        )


def shown(rows: list[dict[str, str]], *columns: str) -> list[tuple[str, ...]]:
    return [tuple(row[one] for one in columns) for row in rows]


class Micro:
    """A training with two micro-batches a step, whose gradients are added up and averaged by hand."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = adam(self.net)
        loss, net = Mean(), self.net

        def forward(ids: Any, label: Any) -> Any:
            return loss(net(ids), label)

        self.gradients = mindspore.value_and_grad(forward, None, self.optimizer.parameters)
        self.truth: list[dict[str, Any]] = []

    def run(self, steps: int, each: Callable[[], None] = lambda: None) -> None:
        batches = list(data(lambda: samples(8 * steps)).create_tuple_iterator())
        for step in range(steps):
            before = self.arrays(self.net.get_parameters())
            found = [self.gradients(*batch)[1] for batch in batches[2 * step : 2 * step + 2]]
            first, second = ([one.asnumpy().copy() for one in gradients] for gradients in found)
            mean = tuple((one + other) / 2 for one, other in zip(*found, strict=True))
            self.optimizer(mean)
            each()
            self.truth.append(
                {
                    "first": first,
                    "sum": [one + other for one, other in zip(first, second, strict=True)],
                    "given": self.arrays(mean),
                    "before": before,
                    "after": self.arrays(self.net.get_parameters()),
                    "exp_avg": self.arrays(self.optimizer.moment1),
                    "exp_avg_sq": self.arrays(self.optimizer.moment2),
                }
            )

    @staticmethod
    def arrays(tensors: Any) -> list[Any]:
        return [one.asnumpy().copy() for one in tensors]


def test_tables_are_those_of_numpy(tmp_path: Path) -> None:
    train = Micro()
    wanted: dict[str, Any] = {one: {"enabled": True} for one in ("weight_grad", "optimizer", "param")}
    wanted["weight_grad"]["monitor_mbs_grad"] = True
    mon = monitor(tmp_path, monitors=wanted)
    mon.start(train.net, train.optimizer, grad_acc_steps=2)
    train.run(3)
    mon.stop()
    assert mon.current_step == 3
    names = [name for name, _ in train.net.parameters_and_names()]
    places = {one.name: at for at, one in enumerate(train.optimizer.parameters)}
    order = [places[one.name] for one in train.net.get_parameters()]
    params, moments, gradients = (table(tmp_path, one) for one in ("param", "optimizer", "weight_grad"))
    n = len(names)
    for step, truth in enumerate(train.truth):
        part = [row for row in params if row["step"] == str(step)]
        assert shown(part, "module_name", "scope") == [
            (name, scope) for scope in ("param_origin", "param_updated") for name in names
        ]
        for row, array in zip(part, truth["before"] + truth["after"], strict=True):
            same(row, array)
        part = [row for row in moments if row["step"] == str(step)]
        assert shown(part, "module_name", "scope") == [
            (f"{name}.{key}", key) for key in ("exp_avg", "exp_avg_sq") for name in names
        ]
        states = [truth[key][at] for key in ("exp_avg", "exp_avg_sq") for at in order]
        for row, array in zip(part, states, strict=True):
            same(row, array)
        part = [row for row in gradients if row["step"] == str(step)]
        reduced = [row for row in part if row["scope"] == "reduced"]
        assert part[-n:] == reduced and shown(reduced, "module_name", "micro_step") == [
            (one, "2") for one in names
        ]
        for row, at in zip(reduced, order, strict=True):
            same(row, truth["given"][at])
        for micro, key in (("1", "first"), ("2", "sum")):
            those = [row for row in part if row["scope"] == "unreduced" and row["micro_step"] == micro]
            # The one that takes no part has no gradient in the backward pass.
            assert {row["module_name"] for row in those} | {"idle"} == set(names)
            for row in those:
                same(row, truth[key][order[names.index(row["module_name"])]])


def test_only_the_last_micro_batch_has_a_row(tmp_path: Path) -> None:
    train = Micro()
    mon = monitor(tmp_path, "weight_grad")
    mon.start(train.net, train.optimizer, micro_batch_number=2)
    train.run(2)
    mon.stop()
    rows = [row for row in table(tmp_path, "weight_grad") if row["scope"] == "unreduced"]
    assert {row["micro_step"] for row in rows} == {"2"}
    names = [one.name for one in train.optimizer.parameters]
    for row in rows:
        same(row, train.truth[int(row["step"])]["sum"][names.index(row["module_name"])])


def test_more_micro_batches_than_told_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = Micro()
    mon = monitor(tmp_path, "weight_grad")
    mon.start(train.net, train.optimizer)
    train.run(2)
    mon.stop()
    assert sum("a step has 2 micro-batches" in one.message for one in caplog.records) == 1


class Seen:
    """What a Cell is called with, as copies: MindSpore's own hooks beside the monitor's."""

    def __init__(self, net: Any) -> None:
        self.rows: list[tuple[str, Any]] = []
        for name, cell in net.cells_and_names():
            cell.register_forward_pre_hook(self.forward(name, "input"))
            cell.register_forward_hook(self.forward(name, "output"))
            cell.register_backward_hook(self.backward(name))

    def forward(self, name: str, kind: str) -> Any:
        def hook(_cell: Any, *values: Any) -> None:
            self.keep(name, kind, values[-1])

        return hook

    def backward(self, name: str) -> Any:
        def hook(_cell: Any, inputs: Any, outputs: Any) -> None:
            self.keep(name, "grad_input", [one for one in inputs if one is not None])
            self.keep(name, "grad_output", outputs)

        return hook

    def keep(self, name: str, kind: str, values: Any) -> None:
        values = values if isinstance(values, list | tuple) else [values]
        for at, one in enumerate(values):
            self.rows.append((f"{name}.{kind}.{at}", one.asnumpy().copy()))


def test_calls_of_cells(tmp_path: Path) -> None:
    train = Micro()
    mon = monitor(tmp_path, "module")
    mon.start(train.net, train.optimizer)
    seen = Seen(train.net)
    train.run(1)
    mon.stop()
    rows = table(tmp_path, "module")
    assert shown(rows, "module_name") == [(name,) for name, _ in seen.rows]
    for row, (name, array) in zip(rows, seen.rows, strict=True):
        assert row["scope"] == ("backward" if ".grad_" in name else "forward")
        same(row, array)


def test_targets_and_what_is_switched_off(tmp_path: Path) -> None:
    train = Micro()
    wanted = {
        "module": {"targets": ["hidden"]},
        "optimizer": {"enabled": True, "mv_distribution": False},
        "param": {"enabled": True, "param_distribution": False},
    }
    mon = monitor(tmp_path, monitors=wanted)
    mon.start(train.net, train.optimizer)
    train.run(1)
    mon.stop()
    assert {row["module_name"].split(".")[0] for row in table(tmp_path, "module")} == {"hidden"}
    assert {row["module_name"].split(".")[1] for row in table(tmp_path, "module")} == {
        "input",
        "output",
        "grad_input",
        "grad_output",
        "activation",
    }
    assert not table(tmp_path, "optimizer") and not table(tmp_path, "param")


class Scaled(nn.Cell):
    """The model of msProbe's example: one matrix, and a factor that comes as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(2, 2, has_bias=False)
        self.fc.weight.set_data(Tensor([[1, -2], [3, 0.5]], mindspore.float32))

    def construct(self, x: Any, scale: Any = None) -> Any:
        return self.fc(x) * scale


RECORDED = """\
-1,1,.input.0,forward,1.0,2.0,1.5,2.2360680103302,0.0
-1,1,.input.1,forward,2.0,2.0,2.0,2.0,0.0
-1,1,fc.input.0,forward,1.0,2.0,1.5,2.2360680103302,0.0
-1,1,fc.output.0,forward,-4.5,2.5,-1.0,5.147815227508545,0.0
-1,1,.output.0,forward,-9.0,5.0,-2.0,10.29563045501709,0.0
-1,1,.grad_output.0,backward,1.0,1.0,1.0,1.4142135381698608,0.0
-1,1,fc.grad_output.0,backward,2.0,2.0,2.0,2.8284270763397217,0.0
"""


def test_msprobes_bytes(tmp_path: Path) -> None:
    """The recorded example; but for norms, which it can't have on a CPU, what msProbe 26.2.0 writes on MindSpore."""
    net = Scaled()
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.5)
    wanted: dict[str, Any] = {one: {"enabled": True} for one in FOUR}
    wanted["weight_grad"] |= {"ops": ["norm", "min", "nans"], "monitor_mbs_grad": True}
    window = {"start_step": 1, "step_interval": 2, "step_count_per_record": 4, "collect_times": 2}
    mon = monitor(tmp_path, monitors=wanted, compat="msprobe-v2", **window)
    mon.start(net, optimizer, grad_acc_steps=2)
    gradients = mindspore.value_and_grad(lambda x, s: net(x, scale=s).sum(), None, optimizer.parameters)
    for _ in range(6):
        found = [gradients(Tensor([[1.0, 2.0]]), Tensor(2.0))[1][0] for _ in range(2)]
        optimizer((found[0] + found[1],))
    mon.stop()
    folder = tmp_path / "rank_0"
    head = b"vpp_stage,step,module_name,scope,min,max,mean,norm,nans\r\n"
    lines = RECORDED.encode().replace(b"\n", b"\r\n")
    assert (folder / "module_step1-4.csv").read_bytes().startswith(head + lines + lines)
    text = (
        "vpp_stage,step,module_name,scope,micro_step,norm,min,nans\n"
        "-1,1,fc.weight,unreduced,1,6.324555397033691,2.0,0.0\n"
        "-1,1,fc.weight,unreduced,2,12.649110794067383,4.0,0.0\n"
        "-1,1,fc.weight,reduced,2,12.649110794067383,4.0,0.0\n"
    )
    assert (folder / "weight_grad_step1-4.csv").read_bytes().startswith(text.encode().replace(b"\n", b"\r\n"))
    moments = table(tmp_path, "optimizer")
    assert float(moments[0]["norm"]) == pytest.approx(2.4033310413360596, rel=1e-6)
    assert moments[0]["module_name"] == "fc.weight.exp_avg"
    origin, updated = table(tmp_path, "param")[:2]
    assert (origin["scope"], updated["scope"]) == ("param_origin", "param_updated")
    assert float(updated["mean"]) == pytest.approx(-0.3749999701976776, rel=1e-5)
    assert {row["step"] for row in table(tmp_path, "param")} == {"1", "3"}


def hooks(net: Any, optimizer: Any) -> int:
    cells = [*(cell for _, cell in net.cells_and_names()), optimizer]
    kinds = ("_forward_pre_hook", "_forward_hook", "_backward_hook")
    return sum(len(getattr(cell, kind)) for cell in cells for kind in kinds)


def test_training_is_the_same_and_hooks_stand_only_in_the_window(tmp_path: Path) -> None:
    plain = Micro()
    plain.run(5)
    seen = Micro()
    mon = monitor(tmp_path, start_step=1, step_interval=2, collect_times=2)
    mon.start(seen.net, seen.optimizer, grad_acc_steps=2)
    assert hooks(seen.net, seen.optimizer) == 2  # the optimizer's
    counts: list[int] = []
    seen.run(5, lambda: counts.append(hooks(seen.net, seen.optimizer)))
    cells = 3 * len(list(seen.net.cells_and_names()))
    assert counts == [cells + 2, 2, cells + 2, 2, 2]
    mon.stop()
    mon.stop()
    assert hooks(seen.net, seen.optimizer) == 0
    for name in FOUR:
        assert {row["step"] for row in table(tmp_path, name)} == {"1", "3"}, name
    for one, other in zip(plain.truth[-1]["after"], seen.truth[-1]["after"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_model_train(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In PyNative the optimizer counts; a compiled update is counted by hand, and what is not seen is said."""
    mon = monitor(tmp_path)

    class Counts(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            mon.step()

    net = network()
    optimizer = adam(net)
    mon.start(net, optimizer)
    Model(net, Mean(), optimizer).train(1, data(), callbacks=[Counts()], dataset_sink_mode=False)
    mon.stop()
    assert mon.current_step == 3
    filled = {name for name in FOUR if table(tmp_path, name)}
    told = "\n".join(one.message for one in caplog.records)
    if mode == "graph":
        assert filled == {"optimizer", "param"}
        for text in ("module has no rows", "weight_grad has no rows", "call step() after each training step"):
            assert f"GRAPH mode: {text}" in told or ("GRAPH mode" in told and text in told), text
    else:
        assert filled == set(FOUR) and "step() is ignored: the optimizer's step counts" in told
    for name, states in (
        ("optimizer", [*optimizer.moment1, *optimizer.moment2]),
        ("param", net.get_parameters()),
    ):
        last = [row for row in table(tmp_path, name) if row["step"] == "2" and row["scope"] != "param_origin"]
        by_name = {one.name: one.asnumpy() for one in states}
        prefix = {"exp_avg": "moment1.", "exp_avg_sq": "moment2."}
        for row in last:
            key = prefix.get(row["scope"], "") + row["module_name"].removesuffix("." + row["scope"])
            same(row, by_name[key])
    for before, after in zip(
        *(_of(tmp_path, scope) for scope in ("param_origin", "param_updated")), strict=True
    ):
        assert (before["step"] == "0") or before["module_name"] == after["module_name"]


def _of(folder: Path, scope: str) -> list[dict[str, str]]:
    return [row for row in table(folder, "param") if row["scope"] == scope]


def test_counting_by_hand(tmp_path: Path) -> None:
    train = Micro()
    mon = monitor(tmp_path, patch_optimizer_step=False)
    mon.start(train.net, train.optimizer, grad_acc_steps=2)
    train.run(2)
    assert mon.current_step == 0
    mon.step()
    mon.stop()
    assert mon.current_step == 1
    # Both updates fell into the one step that was counted.
    assert len(_of(tmp_path, "param_updated")) == 2 * len(list(train.net.get_parameters()))


def test_what_jit_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hooks that a compiler meets do nothing, and that steps can't be counted is said; msProbe's end the training."""
    train = Micro()
    mon = monitor(tmp_path)
    mon.start(train.net, train.optimizer)

    differentiate, update = train.gradients, train.optimizer

    @mindspore.jit
    def step(ids: Any, label: Any) -> Any:
        loss, gradients = differentiate(ids, label)
        update(gradients)
        return loss

    for batch in data().create_tuple_iterator():
        step(*batch)
        mon.step()
    mon.stop()
    plain = Micro()
    for batch in data().create_tuple_iterator():
        plain.optimizer(plain.gradients(*batch)[1])
    for one, other in zip(plain.net.get_parameters(), train.net.get_parameters(), strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-7)
    told = "\n".join(one.message for one in caplog.records)
    assert "compiled by @jit" in told and "call step() after each of them" in told
    assert mon.current_step == 3 and len(table(tmp_path, "optimizer")) == 3 * 2 * len(
        train.optimizer.parameters
    )
    assert not table(tmp_path, "module") and "code that @jit compiles, of which nothing is seen" in told


class Nested(nn.Cell):
    """Twice the same Cell, containers, and an argument that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.pair = Pair()

    def construct(self, ids: Any) -> Any:
        h = self.table(ids)
        first = self.pair(ids, h, more={"list": [h]})
        return self.pair(ids, first[0], more={"list": [h]})[1].sum()


class Pair(nn.Cell):
    def construct(self, ids: Any, h: Any, more: Any = None) -> Any:
        return h * 2, h * 3


def test_extended(tmp_path: Path) -> None:
    net = Nested()
    optimizer = nn.Adam(net.trainable_params(), 0.1, use_amsgrad=True)
    wanted = {
        "module": {"targets": ["pair"]},
        "weight_grad": {"enabled": True, "grad_view": "own", "monitor_mbs_grad": True},
        "optimizer": {"enabled": True, "ops": ["norm", "rms", "n_zero"]},
    }
    mon = monitor(tmp_path, monitors=wanted, extended=True)
    mon.start(net, optimizer, grad_acc_steps=2)

    def forward(ids: Any) -> Any:
        return net(ids)

    gradients = mindspore.value_and_grad(forward, None, optimizer.parameters)
    found = [gradients(Tensor([row]))[1] for row in (1, 2)]
    optimizer(tuple(one + other for one, other in zip(*found, strict=True)))
    mon.stop()
    rows = table(tmp_path, "module")
    assert shown(rows[:5], "module_name", "micro_step", "call") == [
        ("pair.input.0", "1", "0"),
        ("pair.input.1", "1", "0"),
        ("pair.input.2", "1", "0"),
        ("pair.output.0", "1", "0"),
        ("pair.output.1", "1", "0"),
    ]
    assert {row["micro_step"] for row in rows} == {"1", "2"}
    forward_rows = [row for row in rows if row["scope"] == "forward"]
    assert (
        len(set(shown(forward_rows, "module_name", "micro_step", "call"))) == len(forward_rows) == 2 * 2 * 5
    )
    backward = [row for row in rows if row["scope"] == "backward"]
    assert {row["module_name"] for row in backward if "grad_input" in row["module_name"]} == {
        "pair.grad_input.1"
    }
    assert {row["call"] for row in backward} == {"0", "1"}
    own = [row for row in table(tmp_path, "weight_grad") if row["scope"] == "unreduced"]
    for row, gradient in zip(own, found, strict=True):
        same(row, gradient[0].asnumpy())
    states = table(tmp_path, "optimizer")
    assert [row["scope"] for row in states] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert float(states[0]["rms"]) == pytest.approx(float(states[0]["norm"]) / 6**0.5)


class AdamW(nn.Optimizer):
    """State as MindFormers' AdamW keeps it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(0.1, parameters)
        self.exp_avg = ParameterTuple([_state("adam_m", one) for one in self.parameters])
        self.exp_avg_sq = ParameterTuple([_state("adam_v", one) for one in self.parameters])


class Loose(nn.Optimizer):
    """State that stands nowhere in a row."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(0.1, parameters)
        for one in self.parameters:
            name = one.name.replace(".", "_")
            setattr(self, f"m_{name}", _state("exp_avg", one))
            setattr(self, f"v_{name}", _state("exp_avg_sq", one))


def _state(prefix: str, parameter: Any) -> Any:
    values = np.full(parameter.shape, 2.0 if prefix in ("adam_v", "exp_avg_sq") else 1.0, np.float32)
    return Parameter(Tensor(values), name=f"{prefix}.{parameter.name}")


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


KINDS: dict[str, Callable[[Any], Any]] = {
    "nn.Adam": nn.Adam,
    "nn.AdamWeightDecay": nn.AdamWeightDecay,
    "mint.AdamW": mindspore.mint.optim.AdamW,
    "MindFormers": AdamW,
    "loose": Loose,
    "wrapped": lambda those: Wrapper(nn.Adam(those)),
}


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_every_kind_of_optimizer(kind: str, compat: bool, tmp_path: Path) -> None:
    net = network()
    optimizer = KINDS[kind](net.trainable_params())
    keys = {"compat": "msprobe-v2"} if compat else {}
    mon = monitor(tmp_path, "optimizer", patch_optimizer_step=False, **keys)
    mon.start(net, optimizer)
    mon.step()
    mon.stop()
    names = [name for name, _ in net.parameters_and_names()]
    rows = table(tmp_path, "optimizer")
    own = compat and kind in ("mint.AdamW", "loose")  # msProbe goes by the state's own name
    assert shown(rows, "module_name", "scope") == [
        (f"{key}.{name}.{key}" if own else f"{name}.{key}", key)
        for key in ("exp_avg", "exp_avg_sq")
        for name in names
    ]
    if kind in ("MindFormers", "loose"):
        assert [row["max"] for row in rows] == ["1.0"] * len(names) + ["2.0"] * len(names)


def test_an_optimizer_without_moments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = Micro()
    optimizer = nn.Momentum(train.net.trainable_params(), 0.1, 0.9)
    mon = monitor(tmp_path, "optimizer", patch_optimizer_step=False)
    mon.start(train.net, optimizer)
    for _ in range(4):
        mon.step()
    mon.stop()
    assert sum("keeps neither exp_avg nor exp_avg_sq" in one.message for one in caplog.records) == 1


class Stepping:
    """No Cell at all."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def step(self) -> str:
        for one in self.parameters:
            one.set_data(Tensor(one.asnumpy() + 1))
        return "closed"


def test_an_optimizer_that_is_no_cell(tmp_path: Path) -> None:
    net = network()
    optimizer = Stepping(net.trainable_params())
    mon = monitor(tmp_path, "param", "weight_grad")
    mon.start(net, optimizer)
    for one in net.trainable_params():
        one.grad = Tensor(np.full(one.shape, 3.0, np.float32))
    assert optimizer.step() == "closed"
    mon.stop()
    assert "step" not in vars(optimizer) and mon.current_step == 1
    means = [float(row["mean"]) for row in table(tmp_path, "param")]
    half = len(means) // 2
    np.testing.assert_allclose(np.subtract(means[half:], means[:half]), 1.0, rtol=1e-6)
    assert {row["mean"] for row in table(tmp_path, "weight_grad")} == {"3.0"}


def test_names_of_chunks(tmp_path: Path) -> None:
    class Part(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(Tensor([1.0, 2.0]), name="given")
            self.frozen = Parameter(Tensor([3.0]), name="frozen", requires_grad=False)
            self.nothing = Parameter(Tensor(np.zeros((0, 2), np.float32)), name="nothing")
            self.twice = self.inner = nn.Dense(1, 1, has_bias=False)

        def construct(self, x: Any) -> Any:
            return x

    first, last = Part(), Part()
    optimizer = nn.SGD([first.w], 0.1)
    mon = monitor(tmp_path, "param")
    mon.start([first, None, last], optimizer)
    optimizer((Tensor([1.0, 1.0]),))
    mon.stop()
    names = ("w", "frozen", "twice.weight")
    assert shown(_of(tmp_path, "param_updated"), "vpp_stage", "module_name") == [
        (stage, f"{stage}:{name}") for stage in "02" for name in names
    ]


def test_nothing_that_fails_reaches_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trainmon.adapters.mindspore_rows.meter import Meter

    plain, seen = Micro(), Micro()
    plain.run(2)
    mon = monitor(tmp_path)
    mon.start(seen.net, seen.optimizer, grad_acc_steps=2)

    def broken(*_arguments: Any) -> Any:
        raise ArithmeticError("broken within")

    monkeypatch.setattr(Meter, "read", broken)
    seen.run(2)
    mon.stop()
    told = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert 2 <= sum("broken within" in one for one in told) <= 3  # one a step
    for one, other in zip(plain.truth[-1]["after"], seen.truth[-1]["after"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    train = Micro()
    mon = monitor(tmp_path)
    with pytest.raises(ValueError, match="Optimizer must be provided"):
        mon.start(train.net)
    with pytest.raises(TypeError, match=r"must be a mindspore\.nn\.Cell"):
        mon.start("net", train.optimizer)
    with pytest.raises(TypeError, match="one optimizer"):
        mon.start(train.net, [train.optimizer, train.optimizer])
    assert hooks(train.net, train.optimizer) == 0
    mon.start(train.net, [train.optimizer], grad_acc_steps=2)
    train.run(1)
    mon.stop()
    assert all(table(tmp_path, name) for name in FOUR)


NAN, INF = float("nan"), float("inf")
VALUES: dict[str, tuple[list[Any], Any, tuple[float, ...]]] = {
    "empty": ([], "float32", (NAN, NAN, NAN, 0.0, 0.0)),
    "nan": ([NAN, 1.0, INF], "float32", (NAN, NAN, NAN, NAN, 1.0)),
    "both infinities": ([INF, -INF], "float32", (-INF, INF, NAN, INF, 0.0)),
    "bool": ([True, False], "bool_", (0.0, 1.0, 0.5, 1.0, 0.0)),
    "bfloat16": ([1.0, -2.0], "bfloat16", (-2.0, 1.0, -0.5, 5**0.5, 0.0)),
    "float16": ([1.0, -2.0], "float16", (-2.0, 1.0, -0.5, 5**0.5, 0.0)),
    "float64": ([0.1, 3e300], "float64", (0.1, 3e300, 1.5e300, 3e300, 0.0)),
    "int": ([16777217], "int32", (16777217.0,) * 4 + (0.0,)),
    "complex": ([1 + 2j, 3j], "complex64", (NAN, NAN, 0.5, 14**0.5, 0.0)),
    "scalar": (2.0, "float32", (2.0, 2.0, 2.0, 2.0, 0.0)),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", VALUES)
def test_tensors_of_every_kind(case: str) -> None:
    from trainmon.adapters.mindspore_rows.meter import Meter
    from trainmon.backend.statistics import finished

    values, kind, expected = VALUES[case]
    tensor = Tensor(np.array(values), getattr(mindspore, kind))
    found = finished(Meter().read([tensor]), None)[0, 1:]
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    if case == "complex":
        assert finished(Meter(as_msprobe=True).read([tensor]), None)[0, 4] == 1.0
        assert finished(Meter(modulus=True).read([tensor]), None)[0, 2] == 3.0


def test_statistics_of_a_device_in_one_read() -> None:
    """MindSpore's operators, here on the CPU: float32."""
    from trainmon.backend.mindspore import MindSporeDevice

    arrays = [
        np.random.default_rng(1).normal(size=(7, 3)),
        np.array([1e30, -3e30]),
        np.zeros(4),
        np.array([NAN, 1.0]),
    ]
    backend = MindSporeDevice()
    tensors = [Tensor(one, mindspore.float32) for one in arrays]
    tensors.insert(1, Tensor(np.zeros((0,), np.float32)))
    first, last = backend.statistics(tensors[:2]), backend.statistics(tensors[2:])
    tables = backend.read([first, last]).wait()
    assert backend.reads == 1
    table = np.concatenate(tables)
    assert table[:, 0].tolist() == [21, 0, 2, 4, 2]
    assert np.isnan(table[1, 1:4]).all() and table[1, 4:].tolist() == [0.0, 0.0]
    assert np.isnan(table[4, 1:5]).all() and table[4, 5] == 1
    for row, array in zip(table[[0, 2, 3]], arrays[:3], strict=True):
        norm = np.sqrt(np.square(array.astype(np.longdouble)).sum())
        np.testing.assert_allclose(
            row[1:], [array.min(), array.max(), array.mean(), float(norm), 0], rtol=2e-6
        )


class Mails:
    """What communication offers, in one process: twice the tensor."""

    def __init__(self) -> None:
        from mindspore.communication import comm_func

        self.handle_class = comm_func.CommHandle

    def all_reduce(self, tensor: Any, op: str = "sum", async_op: bool = False) -> Any:
        result = tensor * 2
        return (result, self.handle_class() if async_op else None)

    def all_gather_into_tensor(self, tensor: Any) -> Any:
        from mindspore.communication import comm_func

        return comm_func.all_reduce(tensor)

    def batch_isend_irecv(self, operations: list[Any]) -> list[Any]:
        return [None for _ in operations]


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch) -> Any:
    from mindspore.communication import GlobalComm, comm_func

    own = Mails()
    for name in ("all_reduce", "all_gather_into_tensor", "batch_isend_irecv"):
        monkeypatch.setattr(comm_func, name, getattr(own, name))
    monkeypatch.setattr(GlobalComm, "INITED", True)
    monkeypatch.setattr("mindspore.communication.get_rank", lambda: 3)
    return comm_func


@pytest.mark.parametrize("compat", [False, True])
def test_calls_between_ranks(compat: bool, tmp_path: Path, mails: Any) -> None:
    keys = {"compat": "msprobe-v2"} if compat else {}
    mon = monitor(tmp_path, monitors={"cc": {"enabled": True, "cc_pre_hook": True}}, **keys)
    imported = mails.all_reduce
    mon.start()
    during = mails.all_reduce
    mails.all_reduce(Tensor([1.0, 3.0]))
    result, handle = mails.all_reduce(Tensor([5.0]), async_op=True)
    assert result.asnumpy().tolist() == [10.0] and handle.wait() is None
    handle.wait()
    mails.all_gather_into_tensor(Tensor([4.0]))  # calls all_reduce itself

    class Operation:
        def __init__(self, *values: float) -> None:
            self.tensor = Tensor(list(values))

    mails.batch_isend_irecv([Operation(1.0, 2.0), Operation(6.0)])
    mails.batch_isend_irecv([])
    mon.step()
    mails.all_reduce(Tensor([7.0]))
    mon.step()
    mon.stop()
    assert mails.all_reduce is imported
    during(Tensor([9.0]))
    rows = table(tmp_path, "cc", rank=3)
    gathered = [row for row in rows if row["module_name"].startswith("all_gather")]
    assert shown(rows, "step", "module_name", "scope", "min", "max", "mean") == [
        ("0", "all_reduce/rank3/pre_0_0", "comm", "1.0", "3.0", "2.0"),
        ("0", "all_reduce/rank3/pre_1_0", "comm", "5.0", "5.0", "5.0"),
        ("0", "all_reduce/rank3/post_0_0", "comm", "2.0", "6.0", "4.0"),
        ("0", "all_reduce/rank3/post_1_0", "comm", "10.0", "10.0", "10.0"),
        *shown(gathered, "step", "module_name", "scope", "min", "max", "mean"),
        ("0", "batch_isend_irecv/rank3/pre_0_0", "comm", "1.0", "6.0", "3.0"),
        ("0", "batch_isend_irecv/rank3/post_0_0", "comm", "1.0", "6.0", "3.0"),
        ("1", "all_reduce/rank3/pre_0_0", "comm", "7.0", "7.0", "7.0"),
        ("1", "all_reduce/rank3/post_0_0", "comm", "14.0", "14.0", "14.0"),
    ]
    assert shown(gathered, "module_name", "max") == [
        ("all_gather_into_tensor/rank3/pre_0_0", "4.0"),
        ("all_gather_into_tensor/rank3/post_0_0", "8.0"),
    ]


def test_where_calls_between_ranks_come_from(
    tmp_path: Path, mails: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mon = monitor(tmp_path, monitors={"cc": {"enabled": True, "cc_log_only": True}})
    mon.start()
    for _ in range(2):
        mails.all_reduce(Tensor([1.0]))
        mon.step()
    mon.stop()
    told = [one.message for one in caplog.records if "all_reduce is called from" in one.message]
    assert len(told) == 1 and "test_where_calls_between_ranks_come_from" in told[0]
    assert not table(tmp_path, "cc", rank=3)


@pytest.mark.parametrize("chosen", [True, False])
def test_chosen_calls_in_the_older_form(chosen: bool, tmp_path: Path, mails: Any) -> None:
    """By lines of code, and by rank."""
    for at, own in enumerate(
        (
            {"cc_codeline": [r"test_msprobe\.py" if chosen else "elsewhere"]},
            {"module_ranks": [3 if chosen else 0]},
        )
    ):
        mon = monitor(tmp_path / str(at), monitors={"cc": {"enabled": True, "cc_distribution": own}})
        mon.start()
        mails.all_reduce(Tensor([1.0]))
        mon.step()
        mon.stop()
        assert len(table(tmp_path / str(at), "cc", rank=3)) == chosen


def test_no_communication_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mon = monitor(tmp_path, "cc")
    mon.start()
    mon.stop()
    assert any("mindspore.communication is not initialised" in one.message for one in caplog.records)


def test_both_modes_give_the_same_rows(tmp_path: Path) -> None:
    for name, mode in MODES.items():
        mindspore.set_context(mode=mode)
        net = network()
        optimizer = adam(net)
        mon = monitor(tmp_path / name, "optimizer", "param", patch_optimizer_step=False)

        class Counts(Callback):
            def on_train_step_end(self, run_context: Any, own: Any = mon) -> None:
                own.step()

        mon.start(net, optimizer)
        Model(net, Mean(), optimizer).train(1, data(), callbacks=[Counts()], dataset_sink_mode=False)
        mon.stop()
    for name in ("optimizer", "param"):
        graph, pynative = table(tmp_path / "graph", name), table(tmp_path / "pynative", name)
        for one, other in zip(graph, pynative, strict=True):
            assert {**one, **dict.fromkeys(OPS)} == {**other, **dict.fromkeys(OPS)}
            for key in OPS:
                assert float(one[key]) == pytest.approx(float(other[key]), rel=1e-4, abs=1e-7)
