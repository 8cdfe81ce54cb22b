"""How runs begin and end under ``Model.train`` and ``Model.fit``: stops, exceptions, restarts, evaluations, errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import nn  # noqa: E402
from mindspore.train import Callback, Model  # noqa: E402

import trainmon  # noqa: E402
from tests.hosts.mindspore.training import (  # noqa: E402
    Mean,
    Tied,
    adam,
    data,
    ended,
    events_of,
    monitor,
    network,
    rows,
    steps_of,
    train,
)


def limit(series: str, below: float, action: str) -> dict[str, Any]:
    """A rule that fires at once."""
    return {"series": series, "detector": "threshold", "parameters": {"above": below}, "action": action}


class Poison(Callback):
    """A weight becomes NaN before step 3."""

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 3:
            weight = run_context.original_args().optimizer.parameters[-1]
            values = weight.asnumpy().copy()
            values[0] = np.nan
            weight.set_data(mindspore.Tensor(values))


class Raises(Callback):
    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 2:
            raise ZeroDivisionError("the host's own")


def hooks(optimizer: Any) -> int:
    return len(optimizer._forward_pre_hook) + len(optimizer._forward_hook)


def test_a_nan_is_found(mode: str, tmp_path: Path) -> None:
    train(Poison(), monitor(tmp_path))
    records = steps_of(tmp_path)
    assert [record["grad/nonfinite"] > 0 for record in records] == [False, False, True, True, True, True]
    assert np.isnan(records[2]["grad/norm"]) and np.isnan(records[2]["loss/global"])
    told = [event for event in events_of(tmp_path) if event["kind"].startswith("nonfinite_")]
    assert told and {event["step"] for event in told} == {3}
    assert ended(tmp_path)["counters"]["nonfinite_steps"] == 4


def test_without_a_count_a_graph_still_tells_what_is_not_finite(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    train(Poison(), monitor(tmp_path, gradients={"nonfinite": False}))
    assert [bool(np.isnan(record["grad/norm"])) for record in steps_of(tmp_path)] == [False] * 2 + [True] * 4
    assert ended(tmp_path)["counters"]["nonfinite_steps"] == 4


def test_the_hosts_exception_ends_the_run(mode: str, tmp_path: Path) -> None:
    net = network()
    optimizer = adam(net)
    own = monitor(tmp_path)
    with pytest.raises(ZeroDivisionError, match="the host's own"):
        Model(net, Mean(), optimizer).train(1, data(), callbacks=[own, Raises()], dataset_sink_mode=False)
    record = ended(tmp_path)
    assert record["status"] == "failed" and "ZeroDivisionError" in record["reason"]
    assert record["last_step"] == 2 and len(steps_of(tmp_path)) == 2
    assert hooks(optimizer) == 0


def test_a_rule_stops_the_run(mode: str, tmp_path: Path) -> None:
    seen: list[str] = []

    class Follows(Callback):
        def on_train_epoch_end(self, run_context: Any) -> None:
            seen.append("epoch")

        def on_train_end(self, run_context: Any) -> None:
            seen.append("end")

    rule = limit("data/consumed_samples", 7.0, "stop")
    train(monitor(tmp_path, health={"rules": [rule]}), Follows())
    assert [record["step"] for record in steps_of(tmp_path)] == [1, 2]
    assert seen == ["epoch", "end"]
    assert ended(tmp_path)["status"] == "stopped"


def test_a_rule_raises(mode: str, tmp_path: Path) -> None:
    rule = limit("data/consumed_samples", 7.0, "raise")
    with pytest.raises(trainmon.TrainingStopped):
        train(monitor(tmp_path, health={"rules": [rule]}))
    assert ended(tmp_path)["status"] == "stopped"
    assert ended(tmp_path)["last_step"] == 2


def test_before_the_update_a_rule_raises_and_weights_are_left(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = network()
    before = [one.asnumpy().copy() for one in net.trainable_params()]
    keys = {"health": {"gate": "before_update", "rules": [limit("grad/norm", 0.0, "raise")]}}
    with pytest.raises(trainmon.TrainingStopped):
        train(monitor(tmp_path, **keys), net=net)
    for one, other in zip(net.trainable_params(), before, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other)


def test_wrong_configurations_are_errors_before_anything_begins(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "monitor.yaml"
    file.write_text("callbacks:\n  - type: TrainMonitor\n    gradientz: true\n")
    with pytest.raises(trainmon.ConfigError, match=r"monitor.yaml:3:5.*gradients"):
        trainmon.MindSporeMonitor(file)
    skip = {"gate": "before_update", "rules": [limit("grad/norm", 0.0, "skip_step")]}
    with pytest.raises(trainmon.ConfigError, match="the mindspore loop can't do skip_step"):
        monitor(tmp_path, health=skip)
    keys = {"health": {"gate": "before_update"}}
    if mode == "graph":
        with pytest.raises(trainmon.ConfigError, match="can't be looked into before its update"):
            monitor(tmp_path, **keys)
    else:
        monitor(tmp_path, **keys)
    assert not (tmp_path / "r").exists()


def test_a_run_goes_on_where_the_last_one_ended(mode: str, tmp_path: Path) -> None:
    """In another life with the epochs that the host leaves out, and as the user says."""
    net, _ = train(monitor(tmp_path), epochs=1)
    train(monitor(tmp_path), epochs=2, net=net, initial_epoch=1)
    train(monitor(tmp_path, resumed_step=6), epochs=1, net=net)
    assert [record["step"] for record in steps_of(tmp_path)] == list(range(1, 10))
    assert ended(tmp_path)["last_step"] == 9


def test_one_callback_one_model_two_trainings(mode: str, tmp_path: Path) -> None:
    """The graph is compiled once; the second run sees its gradients nevertheless."""
    net = network()
    model = Model(net, Mean(), adam(net))
    own = monitor(tmp_path)
    for _ in range(2):
        model.train(1, data(), callbacks=[own], dataset_sink_mode=False)
    model.train(1, data(), callbacks=[monitor(tmp_path, "other")], dataset_sink_mode=False)
    records = steps_of(tmp_path) + steps_of(tmp_path, "other")
    norms = [record["grad/norm"] for record in records]
    assert len(norms) == 9 and len(set(norms)) == 9 and None not in norms


def test_fit_enters_and_leaves_around_evaluations(mode: str, tmp_path: Path) -> None:
    net = network()
    model = Model(net, Mean(), adam(net), metrics={"loss"})
    model.fit(2, data(), data(), callbacks=[monitor(tmp_path)], dataset_sink_mode=False)
    assert [record["step"] for record in steps_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert ended(tmp_path)["status"] == "completed"
    model.eval(data(), callbacks=[monitor(tmp_path, "eval")])
    assert not (tmp_path / "eval").exists()


def test_what_fails_inside_never_reaches_the_host(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainmon.adapters.mindspore_parts import session

    def broken(*_arguments: Any) -> Any:
        raise ArithmeticError("broken within")

    monkeypatch.setattr(session, "read_outputs", broken)
    monkeypatch.setattr(session.Session, "_look_up", broken)
    monkeypatch.setattr(session.ParameterList, "gradients", broken)
    monkeypatch.setattr(session.CompiledGradients, "read", broken)
    plain, _ = train(epochs=1)
    seen, _ = train(monitor(tmp_path), epochs=1)
    np.testing.assert_array_equal(plain.hidden.weight.asnumpy(), seen.hidden.weight.asnumpy())
    told = [event["text"] for event in events_of(tmp_path)]
    assert sum("broken within" in text for text in told) >= 1


def test_what_nobody_looks_at_is_not_hooked(mode: str, tmp_path: Path) -> None:
    found: list[tuple[int, int]] = []

    class Looks(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            params = run_context.original_args()
            reducer = params.train_network.grad_reducer
            found.append(
                (hooks(params.optimizer), len(reducer._forward_hook) + hasattr(reducer, "_trainmon_slots"))
            )

    off = dict.fromkeys(("gradients", "weights", "moments", "updates"), False)
    train(monitor(tmp_path, **off), Looks(), epochs=1)
    train(monitor(tmp_path, "on"), Looks(), epochs=1)
    assert found[0] == (0, 0)
    assert found[-1] == ((0, 2) if mode == "graph" else (2, 0))


def test_a_cell_that_clips(mode: str, tmp_path: Path) -> None:
    """In PyNative gradients are seen behind it, in GRAPH before it; the norm that it returns is the one before."""

    class Clips(nn.TrainOneStepCell):
        def construct(self, *inputs: Any) -> Any:
            loss = self.network(*inputs)
            gradients = self.grad(self.network, self.weights)(*inputs, mindspore.ops.ones_like(loss))
            total = mindspore.Tensor(0.0, mindspore.float32)
            for one in gradients:
                total = total + mindspore.ops.reduce_sum(mindspore.ops.square(one))
            norm = mindspore.ops.sqrt(total)
            gradients = mindspore.ops.clip_by_global_norm(gradients, 0.1)
            loss = mindspore.ops.depend(loss, self.optimizer(gradients))
            return loss, False, 1.0, 0.01, norm

    net = network()
    cell = Clips(nn.WithLossCell(net, Mean()), adam(net))
    Model(cell).train(1, data(), callbacks=[monitor(tmp_path)], dataset_sink_mode=False)
    train(monitor(tmp_path, "plain"), epochs=1)
    record, plain = steps_of(tmp_path)[0], steps_of(tmp_path, "plain")[0]
    assert record["grad/norm"] == pytest.approx(plain["grad/norm"], rel=1e-4)
    assert record["weight/norm"] > 0 and record["moment/norm/exp_avg"] > 0
    if mode == "pynative":
        assert record["grad/norm_clipped"] == pytest.approx(0.1, rel=1e-3)


def test_a_compiled_step_in_pynative(tmp_path: Path) -> None:
    """Hooks on its optimizer would end in an error when it is compiled."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)

    class Compiled(nn.TrainOneStepCell):
        @mindspore.jit
        def construct(self, *inputs: Any) -> Any:
            loss = self.network(*inputs)
            gradients = self.grad(self.network, self.weights)(*inputs, mindspore.ops.ones_like(loss))
            return mindspore.ops.depend(loss, self.optimizer(gradients))

    net = network()
    cell = Compiled(nn.WithLossCell(net, Mean()), adam(net))
    Model(cell).train(1, data(), callbacks=[monitor(tmp_path)], dataset_sink_mode=False)
    train(monitor(tmp_path, "plain"), epochs=1)
    for one, other in zip(steps_of(tmp_path), steps_of(tmp_path, "plain"), strict=True):
        assert one["grad/norm"] == pytest.approx(other["grad/norm"], rel=1e-4)


def test_the_last_batch_of_an_epoch_may_be_smaller(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = network()
    Model(net, Mean(), adam(net)).train(
        1, data(lambda: rows(10)), callbacks=[monitor(tmp_path)], dataset_sink_mode=False
    )
    assert [record["data/consumed_samples"] for record in steps_of(tmp_path)] == [4, 8, 10]


def test_sparse_gradients_are_left_alone(tmp_path: Path) -> None:
    """In a graph they come as rows; a hook on such a parameter would be an error when the step is compiled."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)

    class Sparse(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingLookup(11, 6, target="CPU", sparse=True)
            self.out = nn.Dense(6, 11)

        def construct(self, ids: Any) -> Any:
            return self.out(self.table(ids).mean(1))

    def lazy(net: Any) -> Any:
        optimizer = nn.LazyAdam(net.trainable_params(), 0.01)
        optimizer.target = "CPU"
        return optimizer

    train(monitor(tmp_path), net=Sparse(), optimizer=lazy, epochs=1)
    assert [record["grad/norm"] > 0 for record in steps_of(tmp_path)] == [True] * 3
    assert [event["kind"] for event in events_of(tmp_path)].count("gradients_sparse") == 1
    (file,) = (tmp_path / "r/rank_0/tensors").glob("gradients_*.csv")
    assert "out.weight" in file.read_text()


def test_the_time_left_counts_to_the_last_step(mode: str, tmp_path: Path) -> None:
    train(monitor(tmp_path), epochs=4)
    left = [record["time/eta"] for record in steps_of(tmp_path)]
    known = [one for one in left if one is not None]  # not before some steps were timed
    assert known[-1] == left[-1] == 0 and len(known) > 1 and all(one > 0 for one in known[:-1])


def test_a_seed_repeats_a_run(mode: str, tmp_path: Path) -> None:
    """Dropout and all; what it would take to repeat it stands in its record."""

    class Drops(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = Tied(), nn.Dropout(p=0.5)

        def construct(self, ids: Any) -> Any:
            return self.drop(self.inner(ids))

    for run in ("first", "second"):
        trainmon.deterministic(11, frameworks=("mindspore",))
        train(monitor(tmp_path, run), net=Drops().set_train(), epochs=1)
    first, second = steps_of(tmp_path, "first"), steps_of(tmp_path, "second")
    for key in ("loss/global", "grad/norm", "weight/norm"):
        assert [record[key] for record in first] == [record[key] for record in second], key
    settings = ended(tmp_path, "first")["reproduction"]
    assert settings["mindspore.get_seed"] == 11


def test_a_norm_that_is_too_large_three_times_in_a_row(mode: str, tmp_path: Path) -> None:
    rule = {**limit("grad/norm", 0.0, "stop"), "consecutive": 3}
    train(monitor(tmp_path, health={"rules": [rule]}))
    assert [record["step"] for record in steps_of(tmp_path)][-1] == 3 and ended(tmp_path)[
        "status"
    ] == "stopped"


class Reduces(nn.TrainOneStepCell):
    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        gradients = self.grad(self.network, self.weights)(*inputs, mindspore.ops.ones_like(loss))
        gradients = self.grad_reducer(gradients)
        gradients = mindspore.ops.clip_by_global_norm(gradients, 0.1)
        return mindspore.ops.depend(loss, self.optimizer(gradients))


class ClipsAhead(nn.TrainOneStepCell):
    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        gradients = self.grad(self.network, self.weights)(*inputs, mindspore.ops.ones_like(loss))
        gradients = self.grad_reducer(mindspore.ops.clip_by_global_norm(gradients, 0.1))
        return mindspore.ops.depend(loss, self.optimizer(gradients))


def test_a_cell_of_ones_own_and_its_reducer(tmp_path: Path) -> None:
    """One hook behind the reducer where gradients there are what they should be, else one a parameter: the same norms."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    norms = {}
    for kind, hooked in ((Reduces, 1), (ClipsAhead, 0), (nn.TrainOneStepCell, 1)):
        net = network()
        cell = kind(nn.WithLossCell(net, Mean()), adam(net))
        found: list[int] = []

        class Looks(Callback):
            def on_train_step_end(self, run_context: Any, cell: Any = cell, found: Any = found) -> None:
                found.append(len(cell.grad_reducer._forward_hook))

        run = kind.__name__
        Model(cell).train(1, data(), callbacks=[monitor(tmp_path, run), Looks()], dataset_sink_mode=False)
        assert found == [hooked] * 3 and not cell.grad_reducer._forward_hook, run
        norms[run] = steps_of(tmp_path, run)[0]["grad/norm"]
    assert norms["Reduces"] == pytest.approx(norms["TrainOneStepCell"], rel=1e-6)
    assert norms["ClipsAhead"] == pytest.approx(norms["TrainOneStepCell"], rel=1e-6)


def test_the_wait_for_data(mode: str, tmp_path: Path) -> None:
    """From a step's end to the next one's begin; what lies between epochs is no wait."""

    def slow() -> Iterator[tuple[Any, Any]]:
        for row in rows():
            time.sleep(0.05)
            yield row

    net = network()
    Model(net, Mean(), adam(net)).train(2, data(slow), callbacks=[monitor(tmp_path)], dataset_sink_mode=False)
    records = steps_of(tmp_path)
    waits = [record["time/data_wait"] for record in records]
    assert [wait is None for wait in waits] == [True, False, False] * 2
    # Rows of a batch take 0.2 s; what is there already when a long first step is over does not.
    assert max(wait for wait in waits if wait is not None) > 0.1
    for record, wait in zip(records, waits, strict=True):
        assert wait is None or 0 <= wait <= record["time/step"]
