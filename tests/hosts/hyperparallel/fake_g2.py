"""A G2 trainer: `BaseCallback` with 22 hooks and a priority, `CallbackManager`, `TrainerControl`, `callback_handler`.

Stands for: base, callbacks, llm_trainer @76c38f5b; manager, tests @42b577b1 (contract 4, 8.2, 9.2, 12.1).
"""

# ruff: noqa: B027 - hooks are empty there too
from __future__ import annotations

import gc
import math
import threading
import time
import warnings
from abc import ABC
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from tests.hosts.hyperparallel import checkpoints_lm
from tests.hosts.hyperparallel.core_lm import Groups, LMTrainerCore
from tests.hosts.hyperparallel.moe import MoEMonitorCallback as CoreMoEMonitor


class CallbackHookNames(str, Enum):  # noqa: UP042 - the host's base classes
    ON_INIT_END = "on_init_end"
    ON_TRAIN_BEGIN = "on_train_begin"
    ON_TRAIN_END = "on_train_end"
    ON_EPOCH_BEGIN = "on_epoch_begin"
    ON_EPOCH_END = "on_epoch_end"
    ON_STEP_BEGIN = "on_step_begin"
    ON_STEP_END = "on_step_end"
    ON_FORWARD_END = "on_forward_end"
    ON_MICRO_BATCH_END = "on_micro_batch_end"
    ON_AFTER_GRAD_SYNC = "on_after_grad_sync"
    ON_BEFORE_OPTIMIZER_STEP = "on_before_optimizer_step"
    ON_LOG = "on_log"
    ON_SAVE = "on_save"
    ON_RESUME = "on_resume"
    ON_EXCEPTION = "on_exception"
    ON_EVALUATE_BEGIN = "on_evaluate_begin"
    ON_EVALUATE_END = "on_evaluate_end"
    ON_PREDICT = "on_predict"
    ON_PREDICTION_STEP = "on_prediction_step"
    ON_MEMORY_SNAPSHOT = "on_memory_snapshot"
    ON_COMMUNICATION_STEP = "on_communication_step"
    ON_PROFILER_STEP = "on_profiler_step"


HOOKS = tuple(hook.value for hook in CallbackHookNames)
OPTIONAL = ("on_forward_end", "on_micro_batch_end", "on_after_grad_sync")  # sent only to listeners
MAX_LOG_HISTORY = 1000


@dataclass
class TrainerControl:
    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_skip_step: bool = False
    should_skip_optimizer_step: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def flags(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls) if f.name != "metadata")

    def merge(self, other: TrainerControl) -> TrainerControl:
        for name in self.flags():
            setattr(self, name, getattr(self, name) or getattr(other, name))
        self.metadata.update(other.metadata)
        return self

    def _clear(self, keep: tuple[str, ...]) -> None:
        for name in self.flags():
            if name not in keep:
                setattr(self, name, False)
        self.metadata = {}

    def reset(self) -> None:
        self._clear(())

    def reset_step_flags(self) -> None:
        self._clear(("should_training_stop", "should_epoch_stop"))

    def reset_epoch_flags(self) -> None:
        self._clear(("should_training_stop",))

    def copy(self) -> TrainerControl:
        return TrainerControl(**{**self.to_dict(), "metadata": dict(self.metadata)})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainerControl:
        return cls(**values)

    def has_signal(self) -> bool:
        return any(getattr(self, name) for name in self.flags())


@dataclass
class TrainerState:
    """`micro_step`, `consumed_tokens` and `consumed_samples` stay 0, as in the host."""

    global_step: int = 0
    epoch: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    best_metric: float | None = None
    lr: float = 0.0
    is_training: bool = False
    is_evaluating: bool = False
    resume_step: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    micro_step: int = 0
    consumed_tokens: int = 0
    consumed_samples: int = 0
    max_log_history: int = MAX_LOG_HISTORY

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def add_log(self, record: dict[str, Any]) -> None:
        self.log_history.append(record)
        del self.log_history[: -self.max_log_history]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TrainerCallbackContext:
    """Built for each dispatch; `control` is the manager's live object, `logs` a copy."""

    state: TrainerState
    control: TrainerControl
    global_rank: int
    local_rank: int
    world_size: int
    is_world_rank0: bool
    is_local_rank0: bool
    logs: dict[str, Any]

    @property
    def rank(self) -> int:
        return self.global_rank


Control = TrainerControl | None


class BaseCallback(ABC):  # noqa: B024 - the host's has no abstract method either
    """No trainer and no constructor arguments; a lower priority comes first."""

    priority: int = 0

    def on_init_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_train_begin(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_train_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_epoch_begin(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_epoch_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_step_begin(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_step_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_forward_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_micro_batch_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_after_grad_sync(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_before_optimizer_step(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_log(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_save(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_resume(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_exception(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_evaluate_begin(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_evaluate_end(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_predict(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_prediction_step(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_memory_snapshot(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_communication_step(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...
    def on_profiler_step(self, context: TrainerCallbackContext, **payload: Any) -> Control: ...


class CallbackManager:
    """Looks at classes only: a hook that was put on an instance of BaseCallback is not called."""

    def __init__(self, trainer: Any = None, callbacks: list[Any] | None = None) -> None:
        self.trainer = trainer
        self._callbacks: list[Any] = []
        self._control = TrainerControl()
        for callback in callbacks or ():
            self.register(callback)

    @property
    def callbacks(self) -> tuple[Any, ...]:
        return tuple(self._callbacks)

    @property
    def aggregate_control(self) -> TrainerControl:
        return self._control

    def register(self, callback: Any) -> None:
        self._callbacks.append(callback)
        self._callbacks.sort(key=lambda one: one.priority)

    def unregister(self, callback: Any) -> None:
        self._callbacks.remove(callback)

    @staticmethod
    def _listens(callback: Any, event: str) -> bool:
        return getattr(type(callback), event) is not getattr(BaseCallback, event)

    def has_listeners(self, event: str) -> bool:
        return any(self._listens(callback, str(event)) for callback in self._callbacks)

    def dispatch(self, event: str, **payload: Any) -> TrainerControl:
        if self.trainer is None:
            raise RuntimeError("no trainer to build a context from")
        context = self.trainer._build_context()
        for callback in self._callbacks:
            if self._listens(callback, event):
                returned = getattr(callback, event)(context, **payload)
                if returned is not None:
                    self._control.merge(returned)
        return self._control

    def reset_step_control(self) -> None:
        self._control.reset_step_flags()

    def reset_epoch_control(self) -> None:
        self._control.reset_epoch_flags()


def _sub_cfg(args: Any, *names: str) -> Any:
    """`args.train.<x>`, else `args.<x>`."""
    for name in names:
        for place in (args.train, args):
            found = getattr(place, name, None)
            if found is not None:
                return found
    return None


class LoggingCallback(BaseCallback):
    """Builds the record, and asks for on_log; what callbacks before it added to `metrics` comes with it."""

    def __init__(self, cfg: Any) -> None:
        self._every = getattr(cfg, "log_steps", 10)
        self._began = time.perf_counter()

    def on_step_begin(self, context: TrainerCallbackContext, **payload: Any) -> Control:
        self._began = time.perf_counter()

    def on_step_end(self, context: TrainerCallbackContext, **payload: Any) -> Control:
        state, metrics = context.state, payload["metrics"]
        if self._every <= 0 or state.global_step % self._every:
            return None
        took = time.perf_counter() - self._began
        usual = ("loss", "grad_norm", "lr")
        record = {
            "step": state.global_step,
            **{name: metrics[name] for name in usual},
            "step_time": took,
            "tokens_per_sec": payload["tokens"] / max(took, 1e-9),
            **{name: value for name, value in metrics.items() if name not in (*usual, "tokens")},
        }
        state.add_log(record)
        context.logs.update(record)
        return TrainerControl(should_log=True, metadata={"log_record": record})


class Stub(BaseCallback):
    """A built-in that warns when its section is enabled, and does nothing."""

    def __init__(self, cfg: Any) -> None:
        if getattr(cfg, "enabled", False):
            warnings.warn(f"{type(self).__name__}: not implemented", stacklevel=2)


class EvaluateCallback(Stub): ...


class ProfilerCallback(Stub): ...


class WandbCallback(Stub): ...


class TensorBoardCallback(Stub): ...


class MemoryMonitorCallback(Stub):
    """The host's adds memory_* keys to metrics on a device; there is none here."""


class ProgressCallback(BaseCallback):
    """Shows nothing here."""


class MoEMonitorCallback(BaseCallback):
    """Adds `aux_loss` to metrics and zeroes the counters before callbacks of priority 0 see on_step_end."""

    priority = -10

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg
        self._core: CoreMoEMonitor | None = None

    def on_init_end(self, context: TrainerCallbackContext, **payload: Any) -> Control:
        if getattr(self._cfg, "enabled", False):
            self._core = CoreMoEMonitor(
                payload["model"],
                lr=self._cfg.lr,
                tp_group=payload["tp_group"],
                cp_group=payload["cp_group"],
                dp_group=payload["dp_group"],
                num_recomputations=self._cfg.num_recomputations,
            )

    def on_step_end(self, context: TrainerCallbackContext, **payload: Any) -> Control:
        if self._core is not None:
            self._core.on_step_end()
            payload["metrics"]["aux_loss"] = self._core.last_mean_aux_loss


class GradientHealthCallback(BaseCallback):
    """Raises on rank 0 alone."""

    def __init__(self, cfg: Any) -> None:
        self._check = getattr(cfg, "check_nan_inf", False)

    def on_before_optimizer_step(self, context: TrainerCallbackContext, **payload: Any) -> Control:
        norm = payload["grad_norm"]
        if self._check and norm is not None and not math.isfinite(norm) and context.is_world_rank0:
            raise RuntimeError(f"grad_norm is {norm} at step {context.state.global_step}")


class GCCallback(BaseCallback):
    """Turns the collector off for good when `debug.gc_steps` is set."""

    def __init__(self, cfg: Any) -> None:
        self._every = getattr(cfg, "gc_steps", 0)
        if self._every > 0:
            gc.disable()

    def on_step_end(self, context: TrainerCallbackContext, **payload: Any) -> Control:
        if self._every > 0 and context.state.global_step % self._every == 0:
            gc.collect()


def build_default_callbacks(args: Any) -> list[BaseCallback]:
    return [
        LoggingCallback(_sub_cfg(args, "logging")),
        EvaluateCallback(_sub_cfg(args, "eval")),
        ProfilerCallback(_sub_cfg(args, "profile", "profiler")),
        WandbCallback(_sub_cfg(args, "wandb")),
        TensorBoardCallback(_sub_cfg(args, "tensorboard")),
        ProgressCallback(),
        MoEMonitorCallback(_sub_cfg(args, "moe_monitor")),
        GradientHealthCallback(_sub_cfg(args, "debug")),
        MemoryMonitorCallback(_sub_cfg(args, "memory_monitor")),
        GCCallback(_sub_cfg(args, "debug")),
    ]


class BaseTrainer(LMTrainerCore):
    """The G2 base: a method for each hook, checkpoints of its own, control flags honoured."""

    def __init__(self, args: Any, callbacks: list[Any] | None = None, setup: bool = True) -> None:
        self.args = args
        self.state = TrainerState(
            max_steps=args.train.max_steps, num_train_epochs=args.train.num_train_epochs
        )
        self.callback_handler = CallbackManager(self, callbacks)
        self._callback_logs: dict[str, Any] = {}
        self.writer = checkpoints_lm.Writer()
        self._thread: threading.Thread | None = None
        self._last_saved = -1
        if setup:
            self._setup(args)

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.register(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.unregister(callback)

    def _build_context(self) -> TrainerCallbackContext:
        return TrainerCallbackContext(
            state=self.state,
            control=self.callback_handler.aggregate_control,
            global_rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            is_world_rank0=self.rank == 0,
            is_local_rank0=self.local_rank == 0,
            logs=dict(self._callback_logs),
        )

    def _after_forward(self, outputs: Any, batch: dict[str, Any]) -> None:
        if self._sends["on_forward_end"]:
            self.on_forward_end(outputs=outputs, micro_batch=batch)

    def _after_micro_batch(self, index: int, loss: float, tokens: int) -> None:
        if self._sends["on_micro_batch_end"]:
            self.on_micro_batch_end(micro_batch_index=index, loss=loss, tokens=tokens)

    def train_step(self, batches: Groups) -> tuple[float, float | None]:
        """A StopIteration in here, a hook's too, ends the epoch."""
        handler = self.callback_handler
        group = next(batches)
        self.state.global_step += 1
        self._sends = {event: handler.has_listeners(event) for event in OPTIONAL}
        loss = self._train_micro_batches(group, self.state.global_step)
        if self._sends["on_after_grad_sync"]:
            self.on_after_grad_sync()
        grad_norm = self._clip()
        self.on_before_optimizer_step(grad_norm=grad_norm, grad_norm_after_clip=grad_norm)
        if not handler.aggregate_control.should_skip_optimizer_step:
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return loss, grad_norm

    def _finish_step(self, loss: float, grad_norm: float | None) -> None:
        lr, tokens = self.lr_scheduler.get_last_lr()[0], self._last_global_tokens
        self.state.update(lr=lr)
        metrics = {"loss": loss, "grad_norm": grad_norm, "tokens": tokens, "lr": lr}
        self._callback_logs = metrics
        self.on_step_end(loss=loss, grad_norm=grad_norm, metrics=metrics, tokens=tokens, lr=lr)
        self._handle_step_control(metrics)

    def _handle_step_control(self, metrics: dict[str, Any]) -> None:
        control = self.callback_handler.aggregate_control
        if control.should_log:
            record = control.metadata.get("log_record", metrics)
            self._callback_logs = record
            self.on_log(metrics=record)
        if control.should_evaluate:
            self.state.update(is_evaluating=True)
            self.on_evaluate_begin()
            self.on_evaluate_end(metrics={})
            self.state.update(is_evaluating=False)
        every = getattr(_sub_cfg(self.args, "checkpoint"), "save_steps", 0)
        if control.should_save or (every > 0 and self.state.global_step % every == 0):
            self._save_checkpoint()

    def _save_checkpoint(self, final: bool = False) -> None:
        self._join()
        step, epoch = self.state.global_step, self.state.epoch
        if final or not getattr(_sub_cfg(self.args, "checkpoint"), "save_async", False):
            self._write_checkpoint(step, epoch)
            return
        self._thread = threading.Thread(target=self._write_checkpoint, args=(step, epoch), daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_checkpoint(self, step: int, epoch: int) -> None:
        """on_save comes for a failed save too; what it raises kills the training."""
        path = Path(getattr(_sub_cfg(self.args, "checkpoint"), "output_dir", "outputs")) / f"step_{step}"
        extra = {"global_step": step, "epoch": epoch, "consumed_tokens": 0, "consumed_samples": 0}
        success = True
        try:
            self.writer(path, self, extra)
            self._last_saved = step
        except checkpoints_lm.FORGIVEN as error:
            warnings.warn(f"failed to save {path}: {error}", stacklevel=2)
            success = False
        place = str(path)
        self.on_save(
            checkpoint_path=place, checkpoint_dir=place, success=success, metadata={"global_step": step}
        )

    def _resume(self) -> None:
        path = getattr(_sub_cfg(self.args, "checkpoint"), "load_path", None)
        if path is None:
            return
        try:
            saved = checkpoints_lm.load(Path(path), self)
        except checkpoints_lm.FORGIVEN as error:
            warnings.warn(f"failed to load {path}: {error}", stacklevel=2)
            return
        step = saved["global_step"]
        self.state.update(global_step=step, epoch=saved["epoch"], resume_step=step)
        self.on_resume(checkpoint_path=str(path), metadata={"global_step": step})

    def train(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.on_exception(exception=error)
            raise
        finally:
            self._destroy()

    def _train(self) -> None:
        state, handler = self.state, self.callback_handler
        control = handler.aggregate_control
        state.update(is_training=True)
        self._resume()
        self.on_train_begin()
        for epoch in range(state.num_train_epochs):
            if state.global_step >= state.max_steps:
                break
            state.epoch = epoch
            self.sampler.set_epoch(epoch)
            handler.reset_epoch_control()
            self.on_epoch_begin()
            batches = Groups(self.train_dataloader, self._grad_accum)
            while state.global_step < state.max_steps:
                handler.reset_step_control()
                self.on_step_begin()
                if control.should_training_stop or control.should_epoch_stop:
                    break
                if control.should_skip_step:
                    state.global_step += 1
                    continue
                try:
                    loss, grad_norm = self.train_step(batches)
                except StopIteration:
                    break
                self._finish_step(loss, grad_norm)
                if control.should_training_stop or control.should_epoch_stop:
                    break
            self.on_epoch_end()
            if control.should_training_stop:
                break
        self._join()
        if (
            getattr(_sub_cfg(self.args, "checkpoint"), "save_steps", 0) > 0
            and self._last_saved != state.global_step
        ):
            self._save_checkpoint(final=True)
        self.on_train_end()


def _sender(event: str) -> Any:
    def send(self: BaseTrainer, **payload: Any) -> TrainerControl:
        return self.callback_handler.dispatch(event, **payload)

    send.__name__, send.__qualname__ = event, f"BaseTrainer.{event}"
    return send


for _event in HOOKS:
    setattr(BaseTrainer, _event, _sender(_event))


class LLMTrainer:
    """Default callbacks first, then the user's; `base` is the BaseTrainer."""

    def __init__(self, args: Any, callbacks: list[Any] | None = None) -> None:
        self.base = base = BaseTrainer(args, [*build_default_callbacks(args), *(callbacks or ())])
        base.on_init_end(
            args=args,
            model=base.model,
            optimizer=base.optimizer,
            lr_scheduler=base.lr_scheduler,
            mesh=base.mesh,
            dp_group=base._dp_group_info,
            tp_group=None,
            cp_group=None,
        )

    def train(self) -> None:
        self.base.train()


class VLTrainer(LLMTrainer):
    """The same loop; the tiny model has no images."""
