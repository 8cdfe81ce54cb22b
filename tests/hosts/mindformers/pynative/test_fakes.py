"""What no training on one CPU can show: a loop that does what the host does on devices, in pipelines, with sharded
weights, of MindSpore's real cells, gradients and optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import trainmon
from trainmon.adapters.mindformers.pynative import PyNativeMonitor, outputs, session
from trainmon.adapters.mindformers.pynative.gradients import GradientHooks
from trainmon.adapters.mindformers.pynative.tracker import Tracker, loss_parts
from trainmon.adapters.mindspore_parts.parameters import ParameterList
from trainmon.events import GradientAccumulated, MicroGradient
from trainmon.sinks.jsonl import read_jsonl

MICROS = 2


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        random = np.random.RandomState(2)
        self.first = Parameter(Tensor(random.randn(3, 4), mindspore.float32), name="first")
        self.second = Parameter(Tensor(random.randn(4), mindspore.float32), name="second")

    def construct(self, input_ids: Any) -> Any:
        return ops.square(ops.tanh(ops.matmul(input_ids, self.first)) * self.second).mean()


class Loop:
    """The host's loop: on_step_begin, micro-batches, norm, clipping in place, update, on_step_end; sums in ``main_grad``.

    Attributes:
        truth: of each step: norms of micro-batches and of their sums, by name, and the global one before clipping.
    """

    def __init__(self, callback: Any, *, max_norm: float = 0.05, pipeline: int = 1, **monitor: Any) -> None:
        self.net = Net()
        self.optimizer = nn.Adam(self.net.trainable_params(), learning_rate=0.01)
        self.callback, self.max_norm = callback, max_norm
        self.args = SimpleNamespace(
            training=SimpleNamespace(max_norm=max_norm),
            monitor=SimpleNamespace(moe_monitor=None, **monitor),
            parallelism=SimpleNamespace(pipeline_parallel=pipeline),
        )
        self.state = SimpleNamespace(
            epoch=0.0,
            global_step=0,
            max_steps=3,
            epoch_step=100,
            global_batch_size=4,
            num_accumulation_steps=MICROS,
            consumed_samples=0,
        )
        self.truth: list[dict[str, Any]] = []
        self.loss: Callable[[Any], Any] = lambda loss: loss
        self.after_forward: Callable[[], None] = lambda: None

    def given(self, **more: Any) -> dict[str, Any]:
        return {"model": [self.net], "optimizer": self.optimizer, "lr_scheduler": None, **more}

    def call(self, hook: str, **more: Any) -> None:
        getattr(self.callback, hook)(self.args, self.state, **self.given(**more))

    def train(self, end: bool = True) -> None:
        self.call("on_train_begin")
        while self.state.global_step < self.state.max_steps:
            self.step()
        if end:
            self.call("on_train_end")

    def step(self) -> None:
        self.call("on_step_begin")
        parameters = self.net.trainable_params()
        forward = mindspore.value_and_grad(
            lambda ids: self.net(ids) / MICROS, None, self.optimizer.parameters
        )
        loss, micro, sums = 0.0, dict[str, list[float]](), dict[str, list[float]]()
        for number in range(MICROS):
            ids = Tensor(
                np.random.RandomState(7 * self.state.global_step + number).randn(2, 3), mindspore.float32
            )
            part, gradients = forward(ids)
            self.after_forward()
            loss = loss + part
            for parameter, gradient in zip(self.optimizer.parameters, gradients, strict=True):
                before = getattr(parameter, "main_grad", None)
                parameter.main_grad = gradient if before is None else before + gradient
                micro.setdefault(parameter.name, []).append(norm(gradient))
                sums.setdefault(parameter.name, []).append(norm(parameter.main_grad))
        total = norm(*(parameter.main_grad for parameter in parameters))
        coefficient = min(1.0, self.max_norm / (total + 1e-6))
        self.truth.append({"micro": micro, "sums": sums, "total": total, "loss": float(loss.asnumpy())})
        self.optimizer(tuple(one.main_grad * coefficient for one in self.optimizer.parameters))
        for parameter in parameters:
            parameter.main_grad = None
        self.state.global_step += 1
        self.state.consumed_samples += 4
        self.call(
            "on_step_end",
            loss=self.loss(loss),
            grad_norm=Tensor(total, mindspore.float32),
            monitor=None,
            has_last=True,
        )


def norm(*tensors: Any) -> float:
    return float(np.sqrt(sum(np.square(one.asnumpy().astype(np.float64)).sum() for one in tensors)))


def monitor(**keys: Any) -> PyNativeMonitor:
    return PyNativeMonitor(
        {"output_dir": ".", "run_name": "r", "sinks": {"log": False, "blackbox": False}, **keys}
    )


ALL = {
    "per_parameter": True,
    "micro": True,
    "micro_every": 1,
    "increment": True,
    "local": True,
    "device": True,
}


def limit(action: str, most: Any, series: str = "grad/norm") -> dict[str, Any]:
    """A rule."""
    return {"series": [series], "detector": "threshold", "parameters": {"above": most}, "action": action}


def records() -> list[dict[str, Any]]:
    return [one for one in read_jsonl(Path("r/rank_0/scalars.jsonl")) if "step" in one]


def kinds() -> list[str]:
    return [one["kind"] for one in read_jsonl(Path("r/rank_0/events.jsonl")) if "kind" in one]


def table() -> dict[tuple[int, str], dict[str, float | None]]:
    import csv

    (file,) = Path("r/rank_0/tensors").glob("gradients_*.csv")
    with file.open(newline="") as lines:
        return {
            (int(row["step"]), row["name"]): {
                key: float(value) if value else None
                for key, value in row.items()
                if key not in ("step", "name")
            }
            for row in csv.DictReader(lines)
        }


def same_norms(loop: Loop, rel: float) -> None:
    rows = table()
    for step, (true, record) in enumerate(zip(loop.truth, records(), strict=True), 1):
        assert record["grad/norm"] == pytest.approx(true["total"], rel=rel)
        assert record["grad/norm_device"] == pytest.approx(true["total"], rel=rel)
        assert record["grad/norm_clipped"] == pytest.approx(loop.max_norm, rel=1e-3)
        for name, norms in true["micro"].items():
            assert rows[step, name]["grad/norm"] == pytest.approx(true["sums"][name][-1], rel=rel)
            assert rows[step, name]["grad/norm_local"] == pytest.approx(true["sums"][name][-1], rel=rel)
            for number, value in enumerate(norms):
                assert rows[step, f"{name}@{number}"]["grad/norm_micro"] == pytest.approx(value, rel=rel)


def test_gradients_that_are_summed_in_main_grad() -> None:
    loop = Loop(monitor(gradients=ALL))
    loop.train()
    same_norms(loop, 1e-5)


def test_a_stage_of_a_pipeline_without_the_loss() -> None:
    """Several micro-batches are under way at a time: each parameter's own calls tell them apart."""
    loop = Loop(monitor(gradients=ALL), pipeline=2)
    loop.loss = lambda _loss: None
    loop.train()
    same_norms(loop, 1e-5)
    assert [record["loss/global"] for record in records()] == [None] * 3


def test_a_pipeline_prints_losses_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has no lines of them then."""
    lines: list[str] = []
    monkeypatch.setattr(outputs, "teller", lambda: lines.append)
    for pipeline, there in ((1, False), (2, True)):
        lines.clear()
        loop = Loop(
            monitor(run_name=f"r{pipeline}"), pipeline=pipeline, train_state=SimpleNamespace(local_loss=True)
        )
        loop.args.monitor.moe_monitor = SimpleNamespace(
            save_tokens_per_expert_interval=None, target_layers=None
        )
        loop.train()
        found = [json.loads(line) for line in lines]
        assert bool(found) == there
    for step, numbers in enumerate(loop.truth, 1):
        losses = [one["local_loss"] for one in found if one["step"] == step]
        assert len(losses) == MICROS and sum(losses) == pytest.approx(numbers["loss"], rel=1e-6)


def test_a_schedule_that_gives_no_loss_says_zero() -> None:
    loop = Loop(monitor())
    loop.loss = lambda _loss: 0.0
    loop.train()
    assert [record["loss/global"] for record in records()] == [0.0] * 3


def test_on_a_device_sums_stay_there_until_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read whole, and all is read at once."""
    monkeypatch.setattr(
        session, "mindspore", SimpleNamespace(get_context=lambda _key: "Ascend", float32=mindspore.float32)
    )
    loop = Loop(monitor(gradients=ALL, weights={"every": 1}, moments={"every": 1}))
    reads: list[int] = []
    whole = Tensor.asnumpy

    def count(self: Any) -> Any:
        reads.append(int(self.size))
        return whole(self)

    loop.call("on_train_begin")
    for step in range(3):
        monkeypatch.setattr(Tensor, "asnumpy", count)
        loop.step()
        monkeypatch.setattr(Tensor, "asnumpy", whole)
        # Of the loop's own: two norms for each micro-batch and parameter, one of all, the loss.
        assert len(reads) <= (step + 1) * (2 * 2 * MICROS + 2 + 1 + 4)
    weights = norm(*loop.net.trainable_params())
    loop.call("on_train_end")
    same_norms(loop, 1e-5)
    last = records()[-1]
    assert last["weight/norm"] == pytest.approx(weights, rel=1e-6)
    assert last["moment/norm/exp_avg"] == pytest.approx(norm(*loop.optimizer.moment1), rel=1e-6)


def test_hooks_that_are_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded parameters: backward runs on others. Norms are null, which is said; what the optimizer gets is seen."""
    monkeypatch.setattr(Parameter, "register_hook", lambda self, hook: SimpleNamespace(remove=lambda: None))
    loop = Loop(monitor(gradients=ALL))
    loop.train()
    assert kinds().count("gradients_unseen") == 1
    for true, record in zip(loop.truth, records(), strict=True):
        assert record["grad/norm_device"] is None
        assert record["grad/norm"] == pytest.approx(true["total"], rel=1e-5)
    assert table()[1, "first"]["grad/norm"] == pytest.approx(loop.truth[0]["sums"]["first"][-1], rel=1e-5)


class Seen:
    """An engine that keeps what it is offered."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def listens(self, _kind: Any) -> bool:
        return True

    wants = listens

    def offer(self, _kind: Any, make: Callable[[], Any]) -> None:
        event = make()
        self.events.append((type(event), event.name, np.array(event.gradient, np.float64)))

    def guard(self, work: Callable[[], None]) -> None:
        work()


class Replicated:
    """A gradient that three ranks hold alike, as a distributed tensor."""

    placements = ("Replicate",)

    def __init__(self, piece: Any) -> None:
        self.piece, self.dtype = piece, piece.dtype

    def to_local(self) -> Any:
        return self.piece


def hooks_on(parameter: Any) -> tuple[Seen, Callable[[Any], None]]:
    seen, kept = Seen(), list[Any]()

    class Watched:
        name, size, shape, dtype = parameter.name, parameter.size, parameter.shape, parameter.dtype
        main_grad = None

        def register_hook(self, hook: Any) -> Any:
            kept.append(hook)
            return SimpleNamespace(remove=lambda: None)

    watched = Watched()
    network = SimpleNamespace(trainable_params=lambda: [watched])
    hooks = GradientHooks(ParameterList(network, None, True), seen, lambda: 0, True)  # type: ignore[arg-type]
    hooks.install()
    hooks.arm()

    def backward(gradient: Any) -> None:
        assert kept[0](gradient) is None  # it stays what it is
        before, wide = watched.main_grad, gradient.to_local() if hasattr(gradient, "to_local") else gradient
        wide = wide.astype(mindspore.float32)
        watched.main_grad = wide if before is None else before + wide

    return seen, backward


def test_norms_are_never_divided_by_a_replica_factor() -> None:
    parameter = Parameter(Tensor([0.0, 0.0], mindspore.float32), name="w")
    seen, backward = hooks_on(parameter)
    for _ in range(2):
        backward(Replicated(Tensor([3.0, 4.0], mindspore.float32)))
    norms = [float(np.linalg.norm(values)) for _, _, values in seen.events]
    assert norms == [5.0, 5.0, 5.0, 10.0]
    assert [kind for kind, _, _ in seen.events] == [MicroGradient, GradientAccumulated] * 2


@pytest.mark.parametrize("dtype", [mindspore.bfloat16, mindspore.float16])
def test_gradients_of_16_bits_add_up_in_32(dtype: Any) -> None:
    """1 + 2^-9 is 1 in bfloat16; 300 squared is infinite in float16."""
    parameter = Parameter(Tensor([0.0, 0.0], mindspore.float32), name="w")
    seen, backward = hooks_on(parameter)
    backward(Tensor([1.0, 300.0], dtype))
    backward(Tensor([2.0**-9, 300.0], dtype))
    last = [values for kind, _, values in seen.events if kind is GradientAccumulated][-1]
    assert last.tolist() == [1.0 + 2.0**-9, 600.0]


def test_what_a_router_does_again_in_the_backward_pass_is_not_counted() -> None:
    class Router(nn.Cell):
        def construct(self, h: Any) -> Any:
            return h, h, Tensor([1.0, 2.0], mindspore.float32)

    class Experts(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()
            self.tokens_per_expert = Parameter(
                Tensor([0.0, 0.0], mindspore.float32), name="t", requires_grad=False
            )

        def construct(self, h: Any) -> Any:
            return self.router(h)[0]

    loop = Loop(monitor(moe={"per_expert": True}))
    experts = Experts()
    inner = loop.net.construct
    loop.net.mlp = experts
    loop.net.construct = lambda input_ids: inner(experts(input_ids))
    loop.after_forward = lambda: experts(Tensor([[1.0]], mindspore.float32))  # recomputation
    loop.train()
    rows = next(iter(Path("r/rank_0/tensors").glob("moe_*.csv"))).read_text().splitlines()
    assert any(row.startswith("1,mlp/1,") and row.split(",")[2] == str(2.0 * MICROS) for row in rows), rows[
        :4
    ]


def test_losses_that_the_host_has_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own callback runs first and leaves them in the store of the step."""
    kept = {"load-balancing-loss": 0.25, "mtp-1-loss": 2.0, "loss": 3.0, "indexer-loss": float("nan")}
    assert loss_parts(kept) == {"aux": 0.25, "mtp_1": 2.0}
    monkeypatch.setattr(Tracker, "data", lambda self: kept)
    Loop(monitor()).train()
    assert [record["loss/part/aux"] for record in records()[1:]] == [0.25] * 2
    assert [record["loss/part/mtp_1"] for record in records()[1:]] == [2.0] * 2


def test_logits_of_which_nothing_was_kept_are_null() -> None:
    """They stand at zero then: no largest logit of zero is made up, and other layers keep theirs."""
    loop = Loop(monitor(attention={"every": 1}))
    tensors = [
        Parameter(Tensor([0.0, 0.0], mindspore.float32)),
        Parameter(Tensor([-3.0, 1.5], mindspore.float32)),
    ]
    loop.net.get_max_attention_logit = lambda: {
        f"layers.{number}.core.max_logits_val": tensor for number, tensor in enumerate(tensors)
    }
    loop.train()
    last = records()[-1]
    assert last["attention/max_logit/layers.1.core"] == 1.5
    assert last.get("attention/max_logit/layers.0.core") is None


def test_the_same_callback_watches_a_second_training() -> None:
    own = monitor()
    first = Loop(own)
    first.train(end=False)  # left by an exception that somebody caught
    second = Loop(own)
    second.train()
    lives = json.loads(Path("r/run.json").read_text())["lives"]
    assert [life["status"] for life in lives] == ["completed", "completed"] or lives[0][
        "status"
    ] == "unfinished"
    assert lives[-1]["last_step"] == 3
    # Nothing of ours is left on the first model.
    before = len(records())
    first.net(Tensor(np.ones((2, 3)), mindspore.float32))
    assert len(records()) == before


def test_what_nobody_looks_at_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind, name in ((Parameter, "register_hook"), (nn.Cell, "register_forward_pre_hook")):
        original = getattr(kind, name)

        def counted(self: Any, *given: Any, name: str = name, original: Any = original, **keys: Any) -> Any:
            calls.append(name)
            return original(self, *given, **keys)

        monkeypatch.setattr(kind, name, counted)
    off = dict.fromkeys(("gradients", "weights", "throughput", "timing", "moe", "loss", "health"), False)
    Loop(monitor(**off)).train()
    assert calls == []
    Loop(monitor()).train()
    assert "register_forward_pre_hook" in calls and "register_hook" not in calls


def test_numbers_that_arrive_as_text() -> None:
    """As of a host that parsed the YAML itself."""
    own = PyNativeMonitor(health={"rules": [limit("log", "1e-5")]}, run_name="1e-5")
    assert own.monitor.config.run_name == "1e-5"
    with pytest.raises(trainmon.ConfigError, match="every"):
        PyNativeMonitor(weights={"every": "1e1"})


def test_an_error_is_raised_where_the_rules_say_so() -> None:
    loop = Loop(monitor(health={"rules": [limit("raise", 0.0)]}))
    with pytest.raises(trainmon.TrainingStopped):
        loop.train()
    assert json.loads(Path("r/run.json").read_text())["lives"][-1]["status"] == "stopped"


def test_a_rule_before_the_update_leaves_the_weights() -> None:
    loop = Loop(monitor(health={"gate": "before_update", "rules": [limit("raise", -1.0, "grad/nonfinite")]}))
    weights = [one.asnumpy().copy() for one in loop.net.trainable_params()]
    with pytest.raises(trainmon.TrainingStopped):
        loop.train()
    for one, before in zip(loop.net.trainable_params(), weights, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), before)
