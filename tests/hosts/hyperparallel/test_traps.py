"""Traps of the contract that no recorded trace shows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as distributed  # noqa: E402

from tests.hosts.hyperparallel import config_g3, config_lm, fake_g1, fake_g2, fake_g3, fake_g3_older  # noqa: E402
from tests.hosts.hyperparallel.callbacks_g3 import POINTER  # noqa: E402
from tests.hosts.hyperparallel.model import settings  # noqa: E402


@pytest.fixture(autouse=True)
def group_down() -> Any:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def lm_args(**changes: Any) -> Any:
    return config_lm.from_settings(settings(**changes))


def g3_config(directory: Path | str = "unused", **changes: Any) -> Any:
    return config_g3.from_settings(settings(**changes), str(directory))


def listener(base: Any, hooks: tuple[str, ...], *arguments: Any) -> Any:
    """A callback that keeps the names of its events."""

    def hook(event: str) -> Any:
        return lambda mine, *_, **__: mine.seen.append(event)

    made = type("Listener", (base,), {event: hook(event) for event in hooks})(*arguments)
    made.seen = []
    return made


def test_g1_wants_all_hooks_and_sends_the_rest_first() -> None:
    class Half:
        def on_train_begin(self, state: Any, **kwargs: Any) -> None: ...

    trainer = fake_g1.LLMTrainer(lm_args())
    assert not hasattr(trainer, "add_callback")
    trainer.base.add_callback(Half())
    with pytest.raises(AttributeError, match="on_epoch_begin"):
        trainer.train()
    assert distributed.is_initialized()


@pytest.mark.parametrize("fake", [fake_g1, fake_g2])
def test_a_pipeline_sends_no_micro_batch_events(fake: Any) -> None:
    args = lm_args(max_steps=1)
    args.train.parallel.pp_chunks = 2
    if fake is fake_g1:
        trainer = fake.LLMTrainer(args)
        callback = listener(fake.Callback, fake.HOOKS, trainer.base)
        trainer.base.add_callback(callback)
    else:
        callback = listener(fake.BaseCallback, fake.HOOKS)
        trainer = fake.LLMTrainer(args, callbacks=[callback])
    trainer.train()
    assert isinstance(trainer.base.model, torch.nn.ModuleList)
    assert "on_step_end" in callback.seen
    assert not {"on_substep_end", "on_micro_batch_end", "on_forward_end"} & set(callback.seen)


def test_recompute_counts_tokens_twice_and_changes_names() -> None:
    args = lm_args(max_steps=1, moe_monitor=False)
    args.train.parallel.recompute = True
    trainer = fake_g1.LLMTrainer(args)
    trainer.train()
    moe = trainer.base.model.moe._checkpoint_wrapped_module
    assert int(moe.tokens_per_expert.sum()) == 2 * 2 * 2 * 2 * 6  # twice: micro-batches, rows, length, top 2
    assert "moe._checkpoint_wrapped_module.experts" in dict(trainer.base.model.named_parameters())


def test_main_gradients_are_where_the_clip_finds_them() -> None:
    config = g3_config(max_steps=1)
    config.fsdp_config.wrap = "main_grad"
    trainer = fake_g3.TextTrainer(config)
    alive: list[tuple[bool, bool]] = []
    prepare = trainer.base.prepare_optimizer_step

    def prepare_optimizer_step() -> Any:
        parameters = list(trainer.base.model.parameters())
        alive.append(
            (all(p.grad is None for p in parameters), all(p.main_grad is not None for p in parameters))
        )
        return prepare()

    trainer.base.prepare_optimizer_step = prepare_optimizer_step
    trainer.train()
    assert alive == [(True, True)]


def test_g2_looks_at_classes() -> None:
    callback = listener(fake_g2.BaseCallback, ("on_train_end",))
    callback.on_step_end = lambda *_, **__: callback.seen.append("on_step_end")
    fake_g2.LLMTrainer(lm_args(max_steps=1), callbacks=[callback]).train()
    assert callback.seen == ["on_train_end"]


def test_g2_refuses_objects_that_are_no_callbacks() -> None:
    with pytest.raises(AttributeError, match="priority"):
        fake_g2.LLMTrainer(lm_args(), callbacks=[object()])

    class Half:
        priority = 0

        def on_init_end(self, context: Any, **payload: Any) -> None: ...

        def on_train_begin(self, context: Any, **payload: Any) -> None:
            raise KeyError("the real error")

    with pytest.raises(AttributeError, match="on_exception"):  # which hides it
        fake_g2.LLMTrainer(lm_args(), callbacks=[Half()]).train()
    assert not distributed.is_initialized()


def test_g2_without_a_trainer_dispatches_nothing() -> None:
    with pytest.raises(RuntimeError):
        fake_g2.CallbackManager().dispatch("on_train_begin")


def test_g2_control_is_live_and_a_stop_waits_for_its_places() -> None:
    class Stops(fake_g2.BaseCallback):
        seen: list[str] = []  # noqa: RUF012

        def on_train_begin(self, context: Any, **payload: Any) -> Any:
            context.control.should_training_stop = True

        def on_epoch_begin(self, context: Any, **payload: Any) -> Any:
            self.seen.append("on_epoch_begin")

        def on_forward_end(self, context: Any, **payload: Any) -> Any:
            self.seen.append("on_forward_end")

        def on_train_end(self, context: Any, **payload: Any) -> Any:
            self.seen.append("on_train_end")

    fake_g2.LLMTrainer(lm_args(), callbacks=[Stops()]).train()
    assert Stops.seen == ["on_epoch_begin", "on_train_end"]


def test_g3_proxy_dies_with_the_trainer() -> None:
    trainer = fake_g3.TextTrainer(g3_config())
    callback = listener(fake_g3.Callback, (), trainer.base)
    assert callback.trainer is not trainer.base
    with pytest.raises(TypeError):
        hash(callback.trainer)
    base = trainer.base
    base.train_dataloader = base.model = base.optimizer = base.lr_scheduler = None
    del trainer, base
    with pytest.raises(ReferenceError):
        hasattr(callback.trainer, "state")
    with pytest.raises(ReferenceError):
        getattr(callback.trainer, "state", None)


def test_g3_a_chain_of_two_has_no_optimizer() -> None:
    base = fake_g3.TextTrainer(g3_config(two_optimizers=True)).base
    with pytest.raises(ValueError, match="several"):
        getattr(base.optimizer, "optimizer", None)
    assert not hasattr(base.optimizer, "state")
    assert len(base.lr_scheduler.get_last_lr()) == len(base.optimizer.chained_optimizers) == 2


def test_g3_optimizers_may_be_a_list() -> None:
    config = g3_config(max_steps=1, two_optimizers=True)
    config.optimizer.listed = True
    trainer = fake_g3.TextTrainer(config)
    assert isinstance(trainer.base.optimizer, list) and isinstance(trainer.base.lr_scheduler, list)
    before = [p.detach().clone() for p in trainer.base.model.parameters()]
    trainer.train()
    assert all(not torch.equal(a, b) for a, b in zip(before, trainer.base.model.parameters(), strict=True))


@pytest.mark.parametrize("source", [None, "somewhere"])
def test_g3_with_a_source_reads_before_the_step(source: str | None) -> None:
    config = g3_config(max_steps=1, loader_len=1, loader_says=None)  # half a step's data
    config.dataset.source = source
    trainer = fake_g3.TextTrainer(config)
    callback = listener(fake_g3.Callback, fake_g3.HOOKS, trainer.base)
    trainer.base._callbacks.append(callback)
    trainer.train()
    begun = [] if source else ["on_step_begin", "on_micro_step_begin"]
    assert callback.seen == ["on_train_begin", "on_epoch_begin", *begun, "on_epoch_end", "on_train_end"]


def test_earlier_expert_layer_is_invisible_to_the_monitor() -> None:
    args = lm_args(max_steps=2)
    args.model.moe = "earlier"
    trainer = fake_g1.LLMTrainer(args)
    trainer.train()
    assert (
        int(trainer.base.model.moe.tokens_per_expert.sum()) == 2 * 2 * 2 * 2 * 6
    )  # steps, micro-batches, ...
    assert trainer.base.moe_monitor_callback.last_mean_aux_loss is None


@pytest.mark.parametrize("target", [None, ["^head", "bias$"], [".*"]])
def test_g1_training_state_monitor(target: list[str] | None) -> None:
    args = lm_args(max_steps=1)
    args.train.monitor = config_lm.MonitorConfig(monitor_on=True, target=target, invert=target == [".*"])
    trainer = fake_g1.LLMTrainer(args)
    norms: list[float] = []

    class Norm(fake_g1.Callback):
        def on_pre_optimizer_step(self, state: Any, *, grad_norm: Any = None, **kwargs: Any) -> None:
            chosen = [
                p.grad
                for name, p in self.trainer.model.named_parameters()
                if target is None or (target != [".*"] and (name.startswith("head") or name.endswith("bias")))
            ]
            norms.append(float(sum(float(g.double().square().sum()) for g in chosen)) ** 0.5)

    trainer.base.add_callback(Norm(trainer.base))
    trainer.train()
    monitor = trainer.base.training_state_monitor_callback
    assert monitor.last_local_grad_norm == pytest.approx(norms[0], abs=0.0, rel=1e-6)
    assert monitor.last_local_loss == trainer.base.state.substep_info["raw_loss"]
    assert monitor.last_device_local_loss == pytest.approx(3.302290678, rel=1e-6)  # one rank: the step's loss


def test_g3_metric_door() -> None:
    trainer = fake_g3.TextTrainer(g3_config(max_steps=1))
    trainer.base.model.get_logging_metrics = lambda: {"mine": torch.tensor(2.0)}
    trainer.train()
    assert trainer.base.step_env_metrics["mine"] == trainer.base.step_train_metrics["mine"] == 2.0
    trainer = fake_g3.TextTrainer(g3_config(max_steps=1))
    trainer.base.model.get_logging_metrics = lambda: {"training/lr": 0.0}
    with pytest.raises(ValueError, match="training/lr"):
        trainer.train()


def test_g3_saves_by_epoch_and_finds_the_latest_complete(tmp_path: Path) -> None:
    config = g3_config(tmp_path, save_steps=8, max_steps=3)
    config.checkpoint.save_epochs = 1
    fake_g3.TextTrainer(config).train()
    assert (tmp_path / POINTER).read_text("utf-8") == "3\n"
    assert sorted(d.name for d in tmp_path.iterdir() if d.is_dir()) == ["global_step_2", "global_step_3"]
    (tmp_path / "global_step_3" / ".metadata").unlink()  # incomplete now, though the pointer names it
    trainer = fake_g3.TextTrainer(g3_config(tmp_path, resume="LATEST"))
    trainer.base.on_train_begin()
    assert trainer.base.state.global_step == 2
    trainer = fake_g3.TextTrainer(g3_config(tmp_path / "nothing", resume="LATEST"))
    with pytest.warns(UserWarning, match="afresh"):
        trainer.base.on_train_begin()
    assert trainer.base.state.global_step == 0


def test_older_g3_has_no_seams_and_clips_to_zero() -> None:
    base = fake_g3_older.TextTrainer(g3_config(max_steps=1, max_grad_norm=0.0)).base
    assert not hasattr(base, "prepare_optimizer_step")
    assert not hasattr(base, "add_callback")
    callback = listener(fake_g3_older.Callback, fake_g3_older.HOOKS, base)
    assert callback.trainer is base
    base._callbacks.append(callback)
    update, live = base.optimizer.step, []

    def step() -> None:
        live.extend(float(p.grad.abs().max()) for p in base.model.parameters())
        update()

    base.optimizer.step = step
    trainer = fake_g3_older.TextTrainer.__new__(fake_g3_older.TextTrainer)
    trainer.base = base
    trainer.train()
    assert set(live) == {0.0}
    assert "on_micro_step_begin" not in callback.seen
    with_door = fake_g3_older.BaseTrainerWithAddCallback(g3_config())
    with_door.add_callback(callback)
    assert with_door._callbacks[-1] is callback


YAML = "callbacks:\n- type: TrainMonitor\n"


def test_no_configuration_takes_a_callbacks_section(tmp_path: Path) -> None:
    here = Path(__file__).parent
    for number, parse in ((1, config_lm.parse_args), (2, config_lm.parse_args), (3, config_g3.parse_args)):
        usual = here / f"package_g{number}" / "tiny.yaml"
        parse([str(usual)])
        file = tmp_path / f"{number}.yaml"
        file.write_text(usual.read_text("utf-8") + YAML, "utf-8")
        with pytest.raises(ValueError, match="callbacks"):
            parse([str(file)])


def test_configurations_differ_in_strictness(tmp_path: Path) -> None:
    here = Path(__file__).parent
    lm, g3 = str(here / "package_g1" / "tiny.yaml"), str(here / "package_g3" / "tiny.yaml")
    with pytest.warns(UserWarning, match=r"train\.trainmon"):
        args = config_lm.parse_args([lm, "--train.trainmon.every=1", "--train.optimizer.lr=1e-4"])
    assert args.train.optimizer.lr == "1e-4"  # YAML's, unchecked
    assert not hasattr(args, "logging")  # no aliases: what G1's trainer looks for isn't there
    assert config_g3.parse_args([g3, "--optimizer.lr=1e-4"]).optimizer.lr == 1e-4
    for wrong in ("--training.trainmon=1", "--debug.check_nan_inf=true", "--training.train_iters=many"):
        with pytest.raises(config_g3.ConfigResolutionError):
            config_g3.parse_args([g3, wrong])


def test_a_failing_save_of_another_class_kills_g1(tmp_path: Path) -> None:
    args = config_lm.from_settings(settings(save_steps=1, max_steps=1), str(tmp_path))
    trainer = fake_g1.LLMTrainer(args)

    def fails(*_: Any) -> None:
        raise KeyError("no such thing")

    trainer.base.checkpoint_callback.writer.model = fails
    with warnings.catch_warnings(), pytest.raises(KeyError):
        warnings.simplefilter("ignore")
        trainer.train()
