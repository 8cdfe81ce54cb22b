"""What goes wrong around a watched HyperParallel trainer: endings, leftovers, errors, detaching."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon  # noqa: E402
from tests.adapters.hyperparallel.runs import (  # noqa: E402
    EACH,
    TRAINERS,
    build,
    config,
    inner_of,
    life_of,
    said,
    settings_of,
    spoil,
    steps_of,
    train,
)
from tests.hosts.hyperparallel import fake_g1, fake_g2, fake_g3  # noqa: E402
from tests.hosts.hyperparallel import model as task  # noqa: E402
from trainmon.adapters.hyperparallel.detect import callbacks_of, find_trainer  # noqa: E402
from trainmon.adapters.hyperparallel.session import Session  # noqa: E402
from trainmon.config import ConfigError  # noqa: E402

NEW = [name for name in TRAINERS if "older" not in name]
NO_NAN = {"series": ["loss/global", "grad/*"], "detector": "nonfinite", "name": "no NaN"}


def rules(gate: str, *actions: str) -> dict[str, Any]:
    return {"health": {"gate": gate, "rules": [{**NO_NAN, "action": ["log", *actions]}]}}


def weights_of(trainer: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in inner_of(trainer).model.parameters()]


def unwatched(name: str, settings: dict[str, Any], directory: Path) -> list[Any]:
    trainer = build(name, settings, directory)
    train(trainer)
    return weights_of(trainer)


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- detaching, and who holds whom -----------------------------------------------------------------------------------


def traces_of(trainer: Any) -> tuple[Any, ...]:
    """What an adapter may leave on a trainer."""
    inner, generation = find_trainer(trainer)
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in (*inner.model.modules(), getattr(inner, "loss_fn", inner.model))
    )
    tensors = sum(len(p._post_accumulate_grad_hooks or {}) for p in inner.model.parameters())
    optimizer = getattr(inner.optimizer, "chained_optimizers", [inner.optimizer])[0]
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    callbacks = [type(callback).__name__ for callback in callbacks_of(inner, generation)]
    return (
        hooks,
        tensors,
        steps,
        callbacks,
        sorted(key for key, value in vars(inner).items() if callable(value)),
    )


@pytest.mark.parametrize("name", TRAINERS)
def test_detached_nothing_is_left(tmp_path: Path, name: str) -> None:
    settings = settings_of(name)
    trainer = build(name, settings, tmp_path / "watched")
    before = traces_of(trainer)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path / "watched", activations={"every": 1}))
    with pytest.raises(RuntimeError, match="watched already"):
        trainmon.attach_hyperparallel(trainer)
    session.detach()
    session.detach()
    assert traces_of(trainer) == before
    train(trainer)
    assert same(weights_of(trainer), unwatched(name, settings, tmp_path / "alone"))


@pytest.mark.parametrize("name", NEW)
def test_detached_under_way(tmp_path: Path, name: str) -> None:
    settings = settings_of(name)
    trainer = build(name, settings, tmp_path / "watched")
    before = traces_of(trainer)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path / "watched", activations={"every": 1}))

    def after_backward(step: int, index: int, count: int) -> None:
        if (step, index) == (2, 1):
            session.detach()

    inner_of(trainer).after_backward = after_backward
    train(trainer)
    del inner_of(trainer).after_backward
    assert traces_of(trainer) == before
    assert [record["step"] for record in steps_of(tmp_path / "watched")] == [1]
    assert life_of(tmp_path / "watched")["status"] == "detached"
    assert same(weights_of(trainer), unwatched(name, settings, tmp_path / "alone"))


@pytest.mark.parametrize("name", TRAINERS)
def test_a_completed_run_leaves_the_callback_alone(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name), tmp_path)
    before = traces_of(trainer)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path, activations={"every": 1}))
    train(trainer)
    session.detach()
    assert traces_of(trainer) == before and life_of(tmp_path)["status"] == "completed"


def test_a_trainer_that_is_gone(tmp_path: Path) -> None:
    """Its proxies raise at any touch; nothing of ours keeps it alive or touches it."""
    trainer = build("g3_text", settings_of("g3_text"), tmp_path)
    session = trainmon.attach_hyperparallel(weakref.proxy(trainer), config(tmp_path))
    train(trainer)
    callback, gone = session.callback, weakref.ref(trainer.base)
    del trainer
    gc.collect()
    assert gone() is None and session.trainer is None
    state = fake_g3.TrainerState(3, 1)
    for hook in fake_g3.HOOKS:
        getattr(callback, hook)(state, **({"micro_batch": {}} if hook == "on_micro_step_begin" else {}))
    session.detach()


# -- places in the host's order --------------------------------------------------------------------------------------


def test_behind_the_meter_and_before_the_checkpointer(tmp_path: Path) -> None:
    trainer = build("g3_text", settings_of("g3_text", save_steps=2), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    names = [type(callback).__name__ for callback in trainer.base._callbacks]
    assert (
        names[:2] == ["EnvironMeterCallback", "TrainMonitorCallback"] and names[-1] == "CheckpointerCallback"
    )


def test_behind_the_experts_monitor_and_before_the_host_s_check(tmp_path: Path) -> None:
    trainer = build("g2", settings_of("g2"), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    names = [type(callback).__name__ for callback in trainer.base.callback_handler.callbacks]
    assert names[:2] == ["MoEMonitorCallback", "TrainMonitorCallback"]


@pytest.mark.parametrize("name", EACH)
def test_it_is_one_of_the_hosts_callbacks(tmp_path: Path, name: str) -> None:
    session = trainmon.attach_hyperparallel(build(name, settings_of(name), tmp_path), config(tmp_path))
    kind = {"g1": fake_g1.Callback, "g2": fake_g2.BaseCallback, "g3_text": fake_g3.Callback}[name]
    assert isinstance(session.callback, kind) and session.generation == name[:2]


def test_what_is_not_listened_to_is_not_sent(tmp_path: Path) -> None:
    trainer = build("g2", settings_of("g2"), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    handler = trainer.base.callback_handler
    assert handler.has_listeners("on_micro_batch_end") and handler.has_listeners("on_after_grad_sync")
    assert not handler.has_listeners("on_forward_end")


# -- data, resumes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_data_that_ends(tmp_path: Path, name: str) -> None:
    """Three micro-batches an epoch, two a step: a shorter step, or a step that is left."""
    settings = settings_of(name, loader_len=3, loader_says=4 if name == "g3_text" else 3)
    trainer = build(name, settings, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, loss={"micro": True}))
    train(trainer)
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)) and records
    assert life_of(tmp_path)["status"] == "completed"
    left = said(tmp_path, "step_left")
    if name in ("g1", "g2"):
        assert len(records) == 3 and not left  # the short group is a step of its own
        assert [record["data/tokens"] for record in records] == [12, 19, 31]
        wanted = [step["loss"] for step in task.plain_run(settings, "token")]
        assert [record["loss/global"] for record in records] == pytest.approx(wanted, rel=1e-6)
    elif name == "g3_text":
        assert "after 1 micro-batches" in left[0]["text"] and "still there" in left[0]["text"]
    else:
        assert not left


def test_gradients_of_a_step_that_was_left_add_up_and_its_loss_does_not(tmp_path: Path) -> None:
    settings = settings_of("g3_text", loader_len=3, loader_says=4, max_steps=4, epochs=4)
    trainer = build("g3_text", settings, tmp_path)
    seen: list[tuple[float, float]] = []
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    end = trainer.base.on_step_end

    def on_step_end(**told: Any) -> None:
        seen.append((told["loss_dict"]["foundation_loss"], float(told["grad_norm"])))
        end(**told)

    trainer.base.on_step_end = on_step_end
    train(trainer)
    records = steps_of(tmp_path)
    assert len(records) == len(seen) >= 2 and said(tmp_path, "step_left")
    assert [record["grad/norm"] for record in records] == pytest.approx([norm for _, norm in seen], rel=1e-5)
    assert [record["loss/mean_of_means"] for record in records] == pytest.approx(
        [loss for loss, _ in seen], rel=1e-6
    )


@pytest.mark.parametrize("name", NEW)
def test_a_step_that_is_begun_twice_is_one_to_every_section(tmp_path: Path, name: str) -> None:
    """At the end of an epoch a step begins in vain; in the third generation's text trainer after a micro-batch."""
    data = {"loader_len": 5, "loader_says": 6} if name == "g3_text" else {}
    trainer = build(name, settings_of(name, max_steps=6, epochs=3, **data), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, loss={"every": 4}, gradients={"every": 2}))
    train(trainer)
    records = steps_of(tmp_path)
    last = len(records)
    assert last >= 4
    assert [r["step"] for r in records if "loss/global" in r] == [n for n in (1, 4) if n <= last]
    assert [r["step"] for r in records if "grad/norm" in r] == [n for n in (1, 2, 4, 6) if n <= last]


@pytest.mark.parametrize("name", NEW)
def test_a_resumed_run_goes_on_with_the_step(tmp_path: Path, name: str) -> None:
    whole = settings_of(name, save_steps=2, max_steps=4)
    trainer = build(name, {**whole, "max_steps": 2}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    resume = "LATEST" if name.startswith("g3") else str(tmp_path / "checkpoints/step_2")
    trainer = build(name, {**whole, "resume": resume}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    rates = [0.001953125, 0.00390625, 0.005859375, 0.0078125]
    assert [record["optim/lr"] for record in records] == rates
    tokens = [record["data/tokens"] for record in records]
    assert tokens[0] > 0 and tokens[2:] == [
        tokens[1] + tokens[0],
        2 * tokens[1],
    ]  # the epoch's data once more
    life = life_of(tmp_path)
    assert (life["life"], life["resumed_step"], life["status"]) == (2, 2, "completed")
    assert not said(tmp_path, "not_resumed")


@pytest.mark.parametrize("way", ["file", "dict", "missing"])
@pytest.mark.parametrize("name", NEW)
def test_the_next_life_goes_on_from_the_state(tmp_path: Path, name: str, way: str) -> None:
    whole = settings_of(name, save_steps=2, max_steps=4)
    trainer = build(name, {**whole, "max_steps": 2}, tmp_path)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert session.save_state(tmp_path / "state")
    resume = "LATEST" if name.startswith("g3") else str(tmp_path / "checkpoints/step_2")
    trainer = build(name, {**whole, "resume": resume}, tmp_path)
    again = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    if way == "dict":
        again.load_state_dict(session.state_dict())
    else:
        again.load_state(tmp_path / ("state" if way == "file" else "nothing"))
    train(trainer)
    assert len(said(tmp_path, "health_restored")) == (way != "missing")
    assert len(said(tmp_path, "state_not_read")) == (way == "missing")
    assert not said(tmp_path, "state_of_another_step") and not said(tmp_path, "internal_error")


@pytest.mark.parametrize("save_steps", [1, 2])
@pytest.mark.parametrize("name", NEW)
def test_what_rules_have_learnt_is_in_the_hosts_checkpoint(
    tmp_path: Path, name: str, save_steps: int
) -> None:
    """An alarm after three steps in a row, of which the first two are an earlier life's."""
    rule = {
        "series": "loss/global",
        "detector": "threshold",
        "parameters": {"above": 0.1},
        "name": "high",
        "consecutive": 3,
    }
    keys = {"health": {"defaults": False, "rules": [rule]}}
    whole = settings_of(name, save_steps=save_steps, max_steps=4)
    trainer = build(name, {**whole, "max_steps": 2}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, **keys))
    train(trainer)
    assert not [event for event in said(tmp_path) if "high" in event["text"]]
    resume = "LATEST" if name.startswith("g3") else str(tmp_path / "checkpoints/step_2")
    trainer = build(name, {**whole, "resume": resume}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, **keys))
    train(trainer)
    alarms = [event["step"] for event in said(tmp_path) if "high" in event["text"]]
    assert alarms and alarms[0] == 3
    assert len(list((tmp_path / "checkpoints").rglob("trainmon_state.json"))) >= 2


@pytest.mark.parametrize("name", NEW)
def test_the_time_left_counts_to_the_hosts_last_step(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name, max_steps=14, epochs=14), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    left = [record["time/eta"] for record in steps_of(tmp_path)]
    assert len(left) == 14 and left[0] is None and left[-1] == 0
    assert left[-2] > 0


@pytest.mark.parametrize("name", EACH)
def test_a_checkpoint_that_was_not_loaded_is_said(tmp_path: Path, name: str) -> None:
    """The host begins anew, with a warning or without a word."""
    wanted = "LATEST" if name == "g3_text" else str(tmp_path / "nowhere")
    trainer = build(name, settings_of(name, save_steps=2, resume=wanted), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert len(steps_of(tmp_path)) == 3
    (told,) = said(tmp_path, "not_resumed")
    assert wanted in told["text"] and told["level"] == ("info" if wanted == "LATEST" else "warning")


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_saves_on_another_thread(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name, save_steps=1, save_async=True), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert len(steps_of(tmp_path)) == 3 and not said(tmp_path, "internal_error")


# -- the second generation's control ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "hook", "seen", "ends_at"),
    [
        ("should_skip_step", "on_step_begin", [1, 3, 4], 4),
        ("should_skip_optimizer_step", "on_before_optimizer_step", [1, 2, 3, 4], 4),
        ("should_training_stop", "on_micro_batch_end", [1, 2], 2),
        ("should_epoch_stop", "on_before_optimizer_step", [1, 2, 3, 4], 4),
        ("should_evaluate", "on_step_end", [1, 2, 3, 4], 4),
        ("should_save", "on_step_end", [1, 2, 3, 4], 4),
    ],
)
def test_what_others_ask_of_the_host(
    tmp_path: Path, flag: str, hook: str, seen: list[int], ends_at: int
) -> None:
    trainer = build("g2", settings_of("g2", max_steps=4), tmp_path)

    def ask(callback: Any, context: Any, **_payload: Any) -> Any:
        step = context.state.global_step + (hook == "on_step_begin")
        return fake_g2.TrainerControl(**{flag: True}) if step == 2 else None

    trainer.base.add_callback(type("Other", (fake_g2.BaseCallback,), {hook: ask})())
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == seen
    assert trainer.base.state.global_step == ends_at and life_of(tmp_path)["status"] == "completed"
    if flag == "should_skip_optimizer_step":  # and of the schedule
        rates = [record["optim/lr"] for record in records]
        assert rates == [0.001953125, 0.00390625, 0.00390625, 0.005859375]
    assert not said(tmp_path, "internal_error") and not said(tmp_path, "optimizer_silent")


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("broken"), StopIteration()])
@pytest.mark.parametrize("name", NEW)
def test_nothing_comes_out_of_the_monitor(
    tmp_path: Path, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(name)

    def breaks(*_arguments: Any, **_keywords: Any) -> None:
        raise error

    for method in ("micro", "reduced", "epoch", "saved"):
        monkeypatch.setattr(Session, method, breaks)
    trainer = build(name, settings, tmp_path / "watched")
    trainmon.attach_hyperparallel(trainer, config(tmp_path / "watched"))
    train(trainer)
    assert inner_of(trainer).state.global_step == 3
    assert len(steps_of(tmp_path / "watched")) == 3
    (once,) = said(tmp_path / "watched", "internal_error")
    assert type(error).__name__ in once["text"]
    monkeypatch.undo()
    assert same(weights_of(trainer), unwatched(name, settings, tmp_path / "alone"))


@pytest.mark.parametrize("name", EACH)
def test_the_hosts_own_error_ends_the_run(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))

    def after_backward(step: int, index: int, count: int) -> None:
        if step == 2:
            raise FloatingPointError("on purpose")

    inner_of(trainer).after_backward = after_backward
    with pytest.raises(FloatingPointError, match="on purpose"):
        train(trainer)
    life = life_of(tmp_path)
    assert (life["status"], life["last_step"]) == ("failed", 1) and "on purpose" in life["reason"]
    assert "train" not in vars(trainer)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", ["g1", "g2", "g3_base"])
def test_ctrl_c_ends_the_run_by_whatever_train_was_called(tmp_path: Path, name: str, inner: bool) -> None:
    trainer = build(name, settings_of(name), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))

    def after_backward(step: int, index: int, count: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    inner_of(trainer).after_backward = after_backward
    with pytest.raises(KeyboardInterrupt):
        train(inner_of(trainer) if inner else trainer)
    assert (life_of(tmp_path)["status"], life_of(tmp_path)["last_step"]) == ("interrupted", 1)
    assert "train" not in vars(trainer) and "train" not in vars(inner_of(trainer))


def test_a_rule_that_the_trainer_cant_follow_is_refused_at_once(tmp_path: Path) -> None:
    trainer = build("g1", settings_of("g1"), tmp_path)
    before = traces_of(trainer)
    with pytest.raises(ConfigError):
        trainmon.attach_hyperparallel(trainer, config(tmp_path, **rules("late", "rollback")))
    assert traces_of(trainer) == before


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINERS)
def test_a_bad_step_is_skipped(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, **rules("before_update", "skip_step")))
    spoil(trainer, 2)
    train(trainer)
    assert all(weight.isfinite().all() for weight in weights_of(trainer))
    records = steps_of(tmp_path)
    everywhere = sum(
        weight.numel() for weight in weights_of(trainer)
    )  # by the clip, which older trainers don't show
    assert [record["grad/nonfinite"] for record in records] == [0, everywhere if "older" in name else 1, 0]
    assert [record["health/skipped_steps"] for record in records] == [0, 1, 1]
    if "older" not in name:
        assert any("head.weight" in json.dumps(event) for event in said(tmp_path))


@pytest.mark.parametrize("action", ["stop", "raise"])
@pytest.mark.parametrize("gate", ["late", "before_update"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_rule_ends_the_run(tmp_path: Path, name: str, gate: str, action: str) -> None:
    trainer = build(name, settings_of(name, save_steps=1), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path, **rules(gate, action)))
    spoil(trainer, 2)
    if name == "g2" and action == "stop":
        train(trainer)
    else:
        with pytest.raises(trainmon.TrainingStopped, match="no NaN"):
            train(trainer)
    assert inner_of(trainer).state.global_step <= 2
    life = life_of(tmp_path)
    assert life["status"] == "stopped" and "no NaN" in life["reason"]
    finite = all(weight.isfinite().all() for weight in weights_of(trainer))
    assert finite is (gate == "before_update")
    if name.startswith("g3"):  # the callback stands before the checkpointer
        saved = {path.name for path in (tmp_path / "checkpoints").glob("global_step_*")}
        assert saved == {"global_step_1"}


def test_the_host_s_own_check_comes_after_the_rules(tmp_path: Path) -> None:
    for name in ("g1", "g2"):
        trainer = build(name, settings_of(name, check_nan_inf=True), tmp_path / name)
        trainmon.attach_hyperparallel(trainer, config(tmp_path / name, **rules("before_update", "raise")))
        spoil(trainer, 2)
        with pytest.raises(trainmon.TrainingStopped):
            train(trainer)


def test_names_are_without_wrappers(tmp_path: Path) -> None:
    def wrapped(configuration: Any) -> None:
        configuration.fsdp_config.wrap = "ddp"

    trainer = build("g3_text", settings_of("g3_text"), tmp_path, wrapped)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert list(session.watch.parameters.parameter_names()) == [
        name for name, _ in task.TinyMoeLM().named_parameters()
    ]


def test_the_configuration_may_be_the_hosts_file(tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(
        f"train: {{max_steps: 3}}\ncallbacks:\n  - type: TrainMonitor\n    output_dir: {tmp_path}\n    run_name: r\n"
    )
    trainer = build("g1", settings_of("g1"), tmp_path)
    trainmon.attach_hyperparallel(trainer, str(path))
    train(trainer)
    assert life_of(tmp_path)["status"] == "completed"
