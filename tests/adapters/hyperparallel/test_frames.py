"""The numbers of each generation are those of the plain loop on the same training."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon
from tests.adapters.hyperparallel.runs import (
    EACH,
    EVERYTHING,
    TRAINERS,
    build,
    compared,
    config,
    inner_of,
    life_of,
    plain,
    said,
    settings_of,
    steps_of,
    tables_of,
    train,
    with_attention,
)
from tests.hosts.hyperparallel import model as task
from tests.hosts.hyperparallel.replay import one_thread

#: Sums of floats in another order.
TOLERANCE = 2e-6


def assert_equal(own: Path, host: Path, steps: int, more: tuple[str, ...] = ()) -> None:
    """Every number of the plain loop is there, and the same; ``more``: what the host alone has."""
    expected, found = steps_of(own), steps_of(host)
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    for one, other in zip(map(compared, expected), map(compared, found), strict=True):
        for name in more:
            del other[name]
        assert one.keys() == other.keys()
        if "loss/gap" in one:  # a small difference of losses
            assert other.pop("loss/gap") == pytest.approx(one.pop("loss/gap"), abs=TOLERANCE)
        assert other == pytest.approx(one, rel=TOLERANCE, nan_ok=True)
    expected_rows, found_rows = tables_of(own), tables_of(host)
    assert len(expected_rows) > 20 * steps and expected_rows.keys() == found_rows.keys()
    assert found_rows == pytest.approx(expected_rows, rel=TOLERANCE, abs=1e-9)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("backend", ["host", "torch"])
def test_one_rank(tmp_path: Path, name: str, backend: Any) -> None:
    settings = settings_of(name)
    sections = dict(EVERYTHING)
    if backend == "torch":  # has no intervals of the stable rank
        del sections["spectral"]
    if "older" in name:  # which shows gradients only as the optimizer gets them
        sections["gradients"] = {"per_parameter": True}
    with one_thread():
        plain(settings, TRAINERS[name][2], config(tmp_path / "own", **sections))
        trainer = build(name, settings, tmp_path / "host")
        trainmon.attach_hyperparallel(trainer, config(tmp_path / "host", **sections), backend=backend)
        train(trainer)
    if "older" in name:
        for own, host in zip(steps_of(tmp_path / "own"), steps_of(tmp_path / "host"), strict=True):
            assert host["grad/norm_clipped"] == pytest.approx(min(own["grad/norm"], 0.25), rel=1e-5)
            for key in ("loss/global", "loss/gap", "grad/norm", "grad/clip_coef", "optim/lr", "weight/norm"):
                assert host[key] == pytest.approx(own[key], rel=1e-5)
        expected, found = tables_of(tmp_path / "own"), tables_of(tmp_path / "host")
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    else:
        assert_equal(tmp_path / "own", tmp_path / "host", 3)
    assert life_of(tmp_path / "host")["status"] == "completed" and not said(
        tmp_path / "host", "internal_error"
    )


@pytest.mark.parametrize("name", EACH)
def test_attention(tmp_path: Path, name: str) -> None:
    settings = settings_of(name)
    sections: dict[str, Any] = {"attention": {"every": 1}, "gradients": {"per_parameter": True}}
    with one_thread():
        plain(settings, TRAINERS[name][2], config(tmp_path / "own", **sections), with_attention)
        trainer = build(name, settings, tmp_path / "host")
        with_attention(inner_of(trainer).model)
        trainmon.attach_hyperparallel(trainer, config(tmp_path / "host", **sections))
        train(trainer)
    for one, other in zip(steps_of(tmp_path / "own"), steps_of(tmp_path / "host"), strict=True):
        assert other["attention/max_logit"] > 0.1 and other["attention/mean_sum"] > 1
        expected = {key: value for key, value in one.items() if key.startswith("attention/")}
        assert {key: other[key] for key in expected} == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("name", EACH)
def test_times_and_rates(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    tokens = 0.0
    for record in steps_of(tmp_path):
        step, tokens = record["data/tokens"] - tokens, record["data/tokens"]
        assert record["time/step"] > 0
        assert record["perf/tokens_per_second"] == pytest.approx(step / record["time/step"])
        assert record["perf/samples_per_second"] == pytest.approx(4 / record["time/step"])
        assert record["data/consumed_samples"] == 4 * record["step"]


#: Seconds of the test's own clock that a micro-batch takes to be read, and the model to run.
READ, RUN = 1.0, 16.0


@pytest.mark.parametrize("name", [name for name in TRAINERS if "older" not in name])
def test_waiting_for_data(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is read for a step, wherever the host reads it; not what the model and other callbacks take."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    trainer = build(name, settings_of(name, max_steps=4, epochs=3), tmp_path)
    inner = inner_of(trainer)
    loader, forward = inner.train_dataloader, inner.model.forward

    class Slow(type(loader)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                now[0] += READ
                yield batch

    def slow(*arguments: Any, **keywords: Any) -> Any:
        now[0] += RUN
        return forward(*arguments, **keywords)

    loader.__class__, inner.model.forward = Slow, slow
    end = inner.on_step_end

    def on_step_end(**told: Any) -> None:
        end(**told)
        now[0] += 64.0  # a callback behind ours

    inner.on_step_end = on_step_end
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    records = steps_of(tmp_path)
    assert len(records) == 4 and not said(tmp_path, "internal_error")
    if name == "g3_base":  # reads nothing through the trainer
        assert all(record["time/data_wait"] is None for record in records)
        return
    assert [record["time/data_wait"] for record in records] == [2 * READ] * 4
    shares = [record["time/data_wait_share"] for record in records[1:]]
    assert shares == [pytest.approx(2 * READ / record["time/step"]) for record in records[1:]]


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_a_pipeline_tells_neither_waits_nor_samples(tmp_path: Path, name: str) -> None:
    def in_chunks(configuration: Any) -> None:
        configuration.train.parallel.pp_chunks = 2

    trainer = build(name, settings_of(name), tmp_path, in_chunks)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    for record in steps_of(tmp_path):
        assert record["time/data_wait"] is None and record["perf/samples_per_second"] is None


def test_without_times_and_rates_the_model_has_no_hook(tmp_path: Path) -> None:
    for keys, hooks in (({"timing": False, "throughput": False}, 0), ({}, 1)):
        trainer = build("g1", settings_of("g1"), tmp_path)
        trainmon.attach_hyperparallel(trainer, config(tmp_path, **keys))
        seen: list[int] = []
        inner_of(trainer).after_backward = lambda *_, t=trainer, s=seen: s.append(
            len(inner_of(t).model._forward_pre_hooks)
        )
        train(trainer)
        assert set(seen) == {hooks} and not inner_of(trainer).model._forward_pre_hooks


@pytest.mark.parametrize("name", EACH)
def test_the_log_line_and_the_event_files_are_one_frame(tmp_path: Path, name: str) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads event files"
    )
    trainer = build(name, settings_of(name), tmp_path)
    keys = {**config(tmp_path), "sinks": {"tensorboard": True, "log": True}}
    trainmon.attach_hyperparallel(trainer, keys)
    train(trainer)
    (events,) = (tmp_path / "r").rglob("events.out.tfevents*")
    reader = accumulator.EventAccumulator(str(events)).Reload()
    lines = [line for line in (tmp_path / "r/rank_0/log.txt").read_text().splitlines() if "loss" in line]
    records = steps_of(tmp_path)
    for tag in ("loss/global", "grad/norm", "optim/lr"):
        points = [(point.step, point.value) for point in reader.Scalars(tag)]
        assert points == [(r["step"], pytest.approx(r[tag], rel=1e-6)) for r in records]
    assert len(lines) == 3 and all(
        f"{r['loss/global']:.5g}" in line for r, line in zip(records, lines, strict=True)
    )


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_the_rate_is_this_steps_and_not_what_the_host_prints(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    printed = [record["lr"] for record in inner_of(trainer).state.log_history]
    rates = [record["optim/lr"] for record in steps_of(tmp_path)]
    assert rates == [0.001953125, 0.00390625, 0.005859375] and printed[:2] == rates[1:]


def test_the_hosts_mean_of_means_stands_beside_the_token_weighted_loss(tmp_path: Path) -> None:
    settings = settings_of("g3_text")
    trainer = build("g3_text", settings, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    for record, step in zip(steps_of(tmp_path), task.plain_run(settings, "micro"), strict=True):
        losses, tokens = step["local"][0], step["tokens"][0]
        weighted = sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
        assert record["loss/global"] == pytest.approx(weighted, rel=1e-6)
        assert record["loss/part/foundation_loss"] == pytest.approx(step["loss"], rel=1e-6)
        assert abs(record["loss/gap"]) > 0.01


@pytest.mark.parametrize("name", [name for name in TRAINERS if "older" not in name])
def test_without_clipping_the_norm_is_measured(tmp_path: Path, name: str) -> None:
    settings = settings_of(name, max_grad_norm=0.0)
    trainer = build(name, settings, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    norms = [step["live_norm"] for step in task.plain_run(settings, TRAINERS[name][2])]
    records = steps_of(tmp_path)
    assert [record["grad/norm"] for record in records] == pytest.approx(norms, rel=1e-5)
    assert all(math.isclose(record["optim/lr"], 0.001953125 * record["step"]) for record in records)


@pytest.mark.parametrize("name", ["g3_text", "g3_base", "g3_older_base"])
@pytest.mark.parametrize("two", [False, True])
def test_float32_copies_and_chains(tmp_path: Path, name: str, two: bool) -> None:
    """16-bit parameters whose gradients move to copies when the optimizer steps; one optimizer or two."""
    settings = settings_of(name, fp32_main_params=True, two_optimizers=two)
    sections: dict[str, Any] = {
        "gradients": {"clipped": True, "per_parameter": True},
        "weights": {"every": 1, "source": "master", "per_parameter": True},
        "moments": {"every": 1},
    }
    with one_thread():
        trainer = build(name, settings, tmp_path)
        trainmon.attach_hyperparallel(trainer, config(tmp_path, **sections))
        train(trainer)
        steps = task.plain_run(task.settings(**{**settings, "fp32_main_params": False}), TRAINERS[name][2])
    for record, step in zip(steps_of(tmp_path), steps, strict=True):
        assert record["grad/norm"] == pytest.approx(step["grad_norm"], rel=0.05)
        assert record["grad/norm_clipped"] == pytest.approx(0.25, rel=0.01)
        assert record["weight/norm"] == pytest.approx(step["weights_norm"], rel=0.01)
        assert record["moment/norm/exp_avg"] > 0
    copies = [parameter.main_param for parameter in inner_of(trainer).model.parameters()]
    assert steps_of(tmp_path)[-1]["weight/norm"] == pytest.approx(task.norm(copies), rel=1e-6)
    names = {name for series, _, name in tables_of(tmp_path) if series in ("grad/norm", "weight/norm")}
    assert names == {name for name, _ in inner_of(trainer).model.named_parameters()}


@pytest.mark.parametrize("moe_monitor", [True, False])
@pytest.mark.parametrize("name", [name for name in TRAINERS if "older" not in name])
def test_the_auxiliary_loss_of_every_micro_batch(tmp_path: Path, name: str, moe_monitor: bool) -> None:
    """The host's is of the last micro-batch, where it has one at all."""
    settings = {**settings_of(name), "moe_monitor": moe_monitor and name in ("g1", "g2")}
    trainer = build(name, settings, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    kept: list[float] = []
    moe = inner_of(trainer).model.moe
    moe.register_forward_hook(lambda layer, *_: kept.append(float(layer.last_aux_loss)))
    train(trainer)
    tokens = [step["tokens"][0] for step in task.plain_run(settings, TRAINERS[name][2])]
    losses = list(zip(kept[::2], kept[1::2], strict=True))
    wanted = [
        sum(map(float.__mul__, pair, map(float, n))) / sum(n) for pair, n in zip(losses, tokens, strict=True)
    ]
    assert [record["loss/part/aux"] for record in steps_of(tmp_path)] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("moe_monitor", [True, False])
@pytest.mark.parametrize("name", ["g1", "g2"])
def test_experts_are_counted_whoever_empties_the_counters(
    tmp_path: Path, name: str, moe_monitor: bool
) -> None:
    settings = {**settings_of(name), "moe_monitor": moe_monitor}
    trainer = build(name, settings, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, moe={"per_expert": True}))
    train(trainer)
    before = [0.0] * 4
    rows = tables_of(tmp_path)
    for number, step in enumerate(task.plain_run(settings, "token"), start=1):
        counted = step["tokens_per_expert"]
        loads = [counted[e] - (0 if moe_monitor else before[e]) for e in range(4)]
        assert [rows["moe/load", str(number), f"moe/{e}"] for e in range(4)] == loads
        before = counted


@pytest.mark.parametrize("name", EACH)
def test_why_there_is_no_share_of_dropped_tokens(tmp_path: Path, name: str) -> None:
    for moe in (True, False):
        trainer = build(name, settings_of(name), tmp_path / str(moe))
        trainmon.attach_hyperparallel(trainer, config(tmp_path / str(moe), moe=moe))
        train(trainer)
    (told,) = said(tmp_path / "True", "dropless")
    assert "moe/drop_rate is not published: routing is dropless" in told["text"]
    assert not any("drop_rate" in series for record in steps_of(tmp_path / "True") for series in record)
    assert not said(tmp_path / "False", "dropless")


def test_experts_are_counted_once_under_recomputation(tmp_path: Path) -> None:
    """The host's counters hold what recomputation adds; the loads don't."""
    import torch
    from torch.utils.checkpoint import checkpoint

    settings = settings_of("g3_text")
    trainer = build("g3_text", settings, tmp_path)
    moe = inner_of(trainer).model.moe
    forward = type(moe).forward

    class Recomputed(type(moe)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda y: forward(self, y), x, use_reentrant=False)  # type: ignore[no-any-return]

    moe.__class__ = Recomputed
    trainmon.attach_hyperparallel(trainer, config(tmp_path, moe={"per_expert": True}))
    train(trainer)
    rows = tables_of(tmp_path)
    assert [rows["moe/load", "1", f"moe/{e}"] for e in range(4)] == [9, 13, 11, 15]
    steps = task.plain_run(settings, "micro")
    assert moe.tokens_per_expert.tolist() == [2 * n for n in steps[-1]["tokens_per_expert"]]
