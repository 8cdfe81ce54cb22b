"""A G1 trainer: `Callback(trainer)` with 13 hooks, hard-coded dispatch, `user_callbacks`.

Stands for: callbacks @080c6e7, @088d1ee; base @e3e3a0e1; llm_trainer @fbed2bc1; config.py @427916e6, @8d3e6e34;
tests @050de391 (contract 3, 8.1, 9.1, 10, 12.1). What the contract doesn't say, here so: hooks that all built-in
callbacks get walk a copy of the lists, the others `user_callbacks` itself; a load restores weights, then the saved
state, then the rest.
"""

from __future__ import annotations

import copy
import gc
import math
import re
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.hyperparallel import checkpoints_lm
from tests.hosts.hyperparallel.core_lm import Groups, LMTrainerCore
from tests.hosts.hyperparallel.moe import MoEMonitorCallback as CoreMoEMonitor

HOOKS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_step_end",
    "on_log",
    "on_save",
    "on_load",
    "on_evaluate",
)


@dataclass
class TrainerState:
    max_steps: int
    global_step: int = 0
    epoch: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    substep_info: dict[str, Any] = field(default_factory=dict)


class Callback:
    """What a user's callback subclasses; it holds the trainer strongly."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer

    def on_init_end(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_train_begin(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_epoch_begin(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_epoch_end(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_step_begin(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_substep_end(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_pre_optimizer_step(
        self, state: TrainerState, *, grad_norm: float | None = None, **kwargs: Any
    ) -> None: ...
    def on_step_end(
        self, state: TrainerState, *, loss: float, grad_norm: float | None = None, **kwargs: Any
    ) -> None: ...
    def on_log(self, state: TrainerState, *, metrics: dict[str, Any], **kwargs: Any) -> None: ...
    def on_save(self, state: TrainerState, *, checkpoint_dir: str, **kwargs: Any) -> None: ...
    def on_load(self, state: TrainerState, *, checkpoint_dir: str, **kwargs: Any) -> None: ...
    def on_evaluate(
        self, state: TrainerState, *, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None: ...


def _option(trainer: BaseTrainer, section: str, name: str, default: Any) -> Any:
    """From `args.<section>` alone: a section that is only under `args.train` is not seen (the host's mismatch)."""
    return getattr(getattr(trainer.args, section, None), name, default)


class LoggingCallback(Callback):
    def on_step_begin(self, state: TrainerState, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(
        self, state: TrainerState, *, loss: float, grad_norm: float | None = None, **kwargs: Any
    ) -> None:
        steps = _option(self.trainer, "logging", "log_steps", 10)
        if steps <= 0 or state.global_step % steps:
            return
        took = time.perf_counter() - self._began
        record = {
            "step": state.global_step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.trainer.lr_scheduler.get_last_lr()[0],
            "step_time": took,
            "tokens_per_sec": self.trainer._last_global_tokens / max(took, 1e-9),
            "aux_loss": self.trainer.moe_monitor_callback.last_mean_aux_loss,
        }
        state.log_history.append(record)
        self.trainer.on_log(metrics=record)


class Stub(Callback):
    """A built-in that warns when its section is enabled, and does nothing."""

    section = ""

    def __init__(self, trainer: BaseTrainer) -> None:
        super().__init__(trainer)
        if _option(trainer, self.section, "enabled", False):
            warnings.warn(f"{self.section}: not implemented", stacklevel=2)


class EvaluateCallback(Stub):
    section = "eval"


class ProfilerCallback(Stub):
    section = "profiler"


class WandbCallback(Stub):
    section = "wandb"


class TensorBoardCallback(Stub):
    section = "tensorboard"


class MemoryMonitorCallback(Stub):
    section = "memory_monitor"


class ProgressCallback(Callback):
    """Shows nothing here."""


class HFExportCallback(Callback):
    """Exports nothing here."""


class TrainingStateMonitorCallback(Callback):
    """Contract 10.1: this rank's loss and the norm of its post-clip gradients, kept; nothing is written.

    `last_local_loss` is the last micro-batch's, `last_device_local_loss` weighted by tokens over the step's.
    """

    def __init__(self, trainer: BaseTrainer) -> None:
        super().__init__(trainer)
        self._cfg = getattr(trainer.args.train, "monitor", None) or getattr(trainer.args, "monitor", None)
        self.last_local_loss: float | None = None
        self.last_device_local_loss: float | None = None
        self.last_local_grad_norm: float | None = None
        self._step, self._sum, self._tokens = -1, 0.0, 0

    def _off(self) -> bool:
        return self._cfg is None or not self._cfg.monitor_on

    def on_substep_end(self, state: TrainerState, **kwargs: Any) -> None:
        if self._off():
            return
        if state.global_step != self._step:
            self._step, self._sum, self._tokens = state.global_step, 0.0, 0
        loss, tokens = state.substep_info["raw_loss"], state.substep_info["micro_tokens"]
        self._sum, self._tokens = self._sum + loss * tokens, self._tokens + tokens
        self.last_local_loss, self.last_device_local_loss = loss, self._sum / max(1, self._tokens)

    def on_pre_optimizer_step(
        self, state: TrainerState, *, grad_norm: float | None = None, **kwargs: Any
    ) -> None:
        if self._off():
            return
        patterns = self._cfg.target or [""]
        squares = 0.0
        for name, parameter in self.trainer.model.named_parameters():
            matches = any(re.search(pattern, name) for pattern in patterns)
            if matches is not bool(self._cfg.invert) and parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                squares += float(local.double().square().sum())
        self.last_local_grad_norm = math.sqrt(squares)


class CheckpointCallback(Callback):
    """Saves and resumes. An asynchronous save writes the live trainer from its own thread."""

    def __init__(self, trainer: BaseTrainer) -> None:
        super().__init__(trainer)
        self.writer = checkpoints_lm.Writer()
        self._thread: threading.Thread | None = None
        self._last_saved = -1

    def on_train_begin(self, state: TrainerState, **kwargs: Any) -> None:
        path = _option(self.trainer, "checkpoint", "load_path", None)
        if path is None:
            return
        try:
            saved = checkpoints_lm.load(Path(path), self.trainer)
            state.global_step, state.epoch = saved["global_step"], saved["epoch"]
            self.trainer.on_load(checkpoint_dir=str(path))
        except checkpoints_lm.FORGIVEN as error:
            warnings.warn(f"failed to load {path}: {error}", stacklevel=2)

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        every = _option(self.trainer, "checkpoint", "save_steps", 0)
        if every <= 0 or state.global_step % every:
            return
        self._join()
        if not _option(self.trainer, "checkpoint", "save_async", False):
            self._save(state)
            return
        self._thread = threading.Thread(target=self._save, args=(copy.copy(state),), daemon=True)
        self._thread.start()

    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None:
        self._join()
        if _option(self.trainer, "checkpoint", "save_steps", 0) > 0 and self._last_saved != state.global_step:
            self._save(state)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, state: TrainerState) -> None:
        step = state.global_step
        directory = Path(_option(self.trainer, "checkpoint", "output_dir", "outputs")) / f"step_{step}"
        try:
            self.writer(directory, self.trainer, {"global_step": step, "epoch": state.epoch})
            self._last_saved = step
            self.trainer.on_save(checkpoint_dir=str(directory))
        except checkpoints_lm.FORGIVEN as error:
            warnings.warn(f"failed to save {directory}: {error}", stacklevel=2)


class MoEMonitorCallback(Callback):
    """Zeroes `tokens_per_expert` before a user's on_step_end, if enabled."""

    def __init__(self, trainer: BaseTrainer) -> None:
        super().__init__(trainer)
        self._core: CoreMoEMonitor | None = None
        if _option(trainer, "moe_monitor", "enabled", False):
            self._core = CoreMoEMonitor(
                trainer.model,
                lr=_option(trainer, "moe_monitor", "lr", 1e-3),
                dp_group=trainer._dp_group_info,
                num_recomputations=_option(trainer, "moe_monitor", "num_recomputations", 1),
            )

    @property
    def last_mean_aux_loss(self) -> float | None:
        return self._core.last_mean_aux_loss if self._core is not None else None

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        if self._core is not None:
            self._core.on_step_end()


class GradientHealthCallback(Callback):
    """Raises on rank 0 alone: the other ranks are left in their next collective."""

    def on_pre_optimizer_step(
        self, state: TrainerState, *, grad_norm: float | None = None, **kwargs: Any
    ) -> None:
        if not _option(self.trainer, "debug", "check_nan_inf", False):
            return
        if grad_norm is not None and not math.isfinite(grad_norm) and self.trainer.rank == 0:
            raise RuntimeError(f"grad_norm is {grad_norm} at step {state.global_step}")


class GCCallback(Callback):
    """Turns the collector off for good when `debug.gc_steps` is set."""

    def __init__(self, trainer: BaseTrainer) -> None:
        super().__init__(trainer)
        self._every = _option(trainer, "debug", "gc_steps", 0)
        if self._every > 0:
            gc.disable()

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        if self._every > 0 and state.global_step % self._every == 0:
            gc.collect()


BUILT_IN = {
    "logging": LoggingCallback,
    "eval": EvaluateCallback,
    "profiler": ProfilerCallback,
    "wandb": WandbCallback,
    "tensorboard": TensorBoardCallback,
    "progress": ProgressCallback,
    "checkpoint": CheckpointCallback,
    "hf_export": HFExportCallback,
    "moe_monitor": MoEMonitorCallback,
    "training_state_monitor": TrainingStateMonitorCallback,
    "gradient_health": GradientHealthCallback,
    "memory_monitor": MemoryMonitorCallback,
    "gc": GCCallback,
}
ORDER = {  # where not all of them, in the order above, get the event
    "on_train_begin": (
        "memory_monitor",
        "moe_monitor",
        "training_state_monitor",
        "profiler",
        "wandb",
        "tensorboard",
        "checkpoint",
        "progress",
    ),
    "on_step_begin": ("logging",),
    "on_substep_end": ("moe_monitor", "training_state_monitor"),
    "on_pre_optimizer_step": ("training_state_monitor", "gradient_health", "logging", "wandb", "tensorboard"),
    "on_train_end": (
        "checkpoint",
        "hf_export",
        "progress",
        "training_state_monitor",
        "tensorboard",
        "wandb",
        "profiler",
    ),
}


class BaseTrainer(LMTrainerCore):
    """The G1 base: builds everything from `args`, trains, dispatches."""

    def __init__(self, args: Any) -> None:
        self._setup(args)
        self.state = TrainerState(max_steps=args.train.max_steps)
        for name, kind in BUILT_IN.items():
            setattr(self, f"{name}_callback", kind(self))
        self.user_callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.user_callbacks.append(callback)

    def _dispatch(self, hook: str, **kwargs: Any) -> None:
        if hook in ORDER:
            for name in ORDER[hook]:
                getattr(getattr(self, f"{name}_callback"), hook)(self.state, **kwargs)
            for callback in self.user_callbacks:
                getattr(callback, hook)(self.state, **kwargs)
            return
        names = list(BUILT_IN)
        if hook == "on_step_end":
            names.remove("training_state_monitor")
            names.insert(0, "training_state_monitor")
        for callback in [*(getattr(self, f"{name}_callback") for name in names), *self.user_callbacks]:
            getattr(callback, hook)(self.state, **kwargs)

    def on_init_end(self) -> None:
        self._dispatch("on_init_end")

    def on_train_begin(self) -> None:
        self._dispatch("on_train_begin")

    def on_train_end(self) -> None:
        self._dispatch("on_train_end")

    def on_epoch_begin(self) -> None:
        self._dispatch("on_epoch_begin")

    def on_epoch_end(self) -> None:
        self._dispatch("on_epoch_end")

    def on_step_begin(self) -> None:
        self._dispatch("on_step_begin")

    def on_substep_end(self) -> None:
        self._dispatch("on_substep_end")

    def on_pre_optimizer_step(self, *, grad_norm: float | None) -> None:
        self._dispatch("on_pre_optimizer_step", grad_norm=grad_norm)

    def on_step_end(self, *, loss: float, grad_norm: float | None) -> None:
        self._dispatch("on_step_end", loss=loss, grad_norm=grad_norm)

    def on_log(self, *, metrics: dict[str, Any]) -> None:
        self._dispatch("on_log", metrics=metrics)

    def on_save(self, *, checkpoint_dir: str) -> None:
        self._dispatch("on_save", checkpoint_dir=checkpoint_dir)

    def on_load(self, *, checkpoint_dir: str) -> None:
        self._dispatch("on_load", checkpoint_dir=checkpoint_dir)

    def dispatch_evaluate_event(self, metrics: dict[str, Any] | None = None) -> None:
        """Nothing in the host calls it."""
        self._dispatch("on_evaluate", metrics=metrics)

    def _after_micro_batch(self, index: int, loss: float, tokens: int) -> None:
        self.state.substep_info = {"raw_loss": loss, "micro_tokens": tokens}
        self.on_substep_end()

    def train_step(self, batches: Groups) -> tuple[float, float | None]:
        """Everything of a step but its first and last event: a StopIteration in here ends the epoch."""
        group = next(batches)
        self.state.global_step += 1
        loss = self._train_micro_batches(group, self.state.global_step)
        grad_norm = self._clip()
        self.on_pre_optimizer_step(grad_norm=grad_norm)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return loss, grad_norm

    def train(self) -> None:
        """After an exception there is no on_train_end, and the process group stays up."""
        state = self.state
        self.on_train_begin()
        for epoch in range(self.args.train.num_train_epochs):
            if state.global_step >= state.max_steps:
                break
            state.epoch = epoch
            self.sampler.set_epoch(epoch)
            self.on_epoch_begin()
            batches = Groups(self.train_dataloader, self._grad_accum)
            while state.global_step < state.max_steps:
                self.on_step_begin()
                try:
                    loss, grad_norm = self.train_step(batches)
                except StopIteration:
                    break
                self.on_step_end(loss=loss, grad_norm=grad_norm)
            self.on_epoch_end()
        self.on_train_end()
        self._destroy()


class LLMTrainer:
    """Holds the BaseTrainer as `base`; it has no `add_callback` of its own."""

    def __init__(self, args: Any) -> None:
        self.base = BaseTrainer(args)
        self.base.on_init_end()

    def train(self) -> None:
        self.base.train()


class VLTrainer(LLMTrainer):
    """The same loop; the tiny model has no images."""
