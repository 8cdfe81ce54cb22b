"""G3's built-in callbacks (contract 5, 10.2, 12.2), shared by the newest fake and the older one."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from tests.hosts.hyperparallel import model as task
from tests.hosts.hyperparallel.checkpoints_lm import load_weights, save_weights

HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_micro_step_begin",
    "on_micro_step_end",
)
POINTER = "latest_checkpoint_iteration.txt"


@dataclass
class TrainerState:
    global_step: int = 0
    epoch: int = 0


class Hooks:
    def on_train_begin(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_epoch_begin(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_epoch_end(self, state: TrainerState, **kwargs: Any) -> None: ...
    def on_step_begin(self, state: TrainerState, micro_batches: Any = None, **kwargs: Any) -> None: ...
    def on_step_end(
        self, state: TrainerState, loss: float, loss_dict: dict[str, float], grad_norm: float, **kwargs: Any
    ) -> None: ...
    def on_micro_step_begin(
        self, state: TrainerState, micro_batch: dict[str, Any], **kwargs: Any
    ) -> None: ...
    def on_micro_step_end(self, state: TrainerState, **kwargs: Any) -> None: ...


class Callback(Hooks):
    """Holds the trainer by a weak proxy: not hashable, and dead once the trainer is."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = weakref.proxy(trainer)
        self.mesh = trainer.mesh


class StrongCallback(Hooks):
    """As of older G3."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.mesh = trainer.mesh


def several(one: Any) -> list[Any]:
    """Optimizers and schedulers may be lists."""
    return one if isinstance(one, list) else [one]


class EnvironMeterCallback(Callback):
    """Replaces the trainer's two dicts of metrics in on_step_end; `training/lr` is the next step's."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._consumed_tokens = self._consumed_samples = 0.0
        self._clear()

    def _clear(self) -> None:
        self._began, self._inputs, self._tokens, self._samples = time.perf_counter(), 0, 0, 0

    def _add(self, batch: dict[str, Any]) -> None:
        counted = batch.get("token_count")
        self._inputs += batch["input_ids"].numel()
        self._tokens += int(task.valid_labels(batch)[0] if counted is None else counted)
        self._samples += len(batch["input_ids"])

    def on_step_begin(self, state: TrainerState, micro_batches: Any = None, **kwargs: Any) -> None:
        self._clear()
        for batch in micro_batches or ():
            self._add(batch)

    def on_micro_step_begin(self, state: TrainerState, micro_batch: dict[str, Any], **kwargs: Any) -> None:
        self._add(micro_batch)

    def on_step_end(
        self, state: TrainerState, loss: float, loss_dict: dict[str, float], grad_norm: float, **kwargs: Any
    ) -> None:
        took = time.perf_counter() - self._began
        sums = torch.tensor([self._inputs, self._tokens, self._samples], dtype=torch.float64)
        distributed.all_reduce(sums)
        inputs, tokens, samples = sums.tolist()
        self._consumed_tokens += tokens
        self._consumed_samples += samples
        training = {
            "training/total_loss": loss,
            "training/grad_norm": grad_norm,
            "training/lr": max(lr for one in several(self.trainer.lr_scheduler) for lr in one.get_last_lr()),
            **{f"training/{name}": value for name, value in loss_dict.items()},
        }
        self.trainer.step_train_metrics = training
        self.trainer.step_env_metrics = {
            **training,
            "performance/step_time": took,
            "performance/tokens_per_second": tokens / max(took, 1e-9),
            "data/step_input_tokens": inputs,
            "data/step_tokens": tokens,
            "data/consumed_tokens": self._consumed_tokens,
            "data/step_samples": samples,
            "data/consumed_samples": self._consumed_samples,
        }


class LoggingCallback(Callback):
    """Merges what model and optimizers say through `get_logging_metrics`, and prints on rank 0."""

    def on_step_end(
        self, state: TrainerState, loss: float, loss_dict: dict[str, float], grad_norm: float, **kwargs: Any
    ) -> None:
        trainer = self.trainer
        for source in (trainer.model, *several(trainer.optimizer)):
            ask = getattr(source, "get_logging_metrics", None)
            for name, value in (ask() if ask is not None else {}).items():
                if name in trainer.step_env_metrics:
                    raise ValueError(f"the metric {name} is there already")
                trainer.step_env_metrics[name] = trainer.step_train_metrics[name] = float(value)
        every = trainer.config.training.logging_steps
        if trainer.global_rank == 0 and every > 0 and state.global_step % every == 0:
            shown = ", ".join(f"{name}: {value:.6g}" for name, value in trainer.step_env_metrics.items())
            print(f"step {state.global_step}: {shown}")


class TqdmCallback(Callback):
    """Shows nothing here."""


class EvaluateCallback(Callback):
    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        if trainer.config.training.eval_steps or trainer.config.training.eval_epochs:
            warnings.warn("evaluation is not implemented", stacklevel=2)


class GarbageCollectionCallback(Callback):
    """Collects every `gc_steps`; the collector stays on."""

    def on_step_end(
        self, state: TrainerState, loss: float, loss_dict: dict[str, float], grad_norm: float, **kwargs: Any
    ) -> None:
        every = self.trainer.config.training.gc_steps
        if every > 0 and state.global_step % every == 0:
            gc.collect()


class ProfilingCallback(Callback):
    """torch.profiler from `start_step` to `stop_step`, in its own count of steps: a resume starts at 1 again."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._step = 0
        self._profiler: Any = None

    def on_step_begin(self, state: TrainerState, micro_batches: Any = None, **kwargs: Any) -> None:
        cfg, self._step = self.trainer.config.profiler, self._step + 1
        if (
            cfg.enabled
            and self._step == cfg.start_step
            and self.trainer.global_rank in (cfg.rank_ids or [self.trainer.global_rank])
        ):
            self._profiler = torch.profiler.profile(profile_memory=cfg.memory)
            self._profiler.start()

    def on_step_end(
        self, state: TrainerState, loss: float, loss_dict: dict[str, float], grad_norm: float, **kwargs: Any
    ) -> None:
        cfg = self.trainer.config.profiler
        if self._profiler is not None and self._step >= cfg.stop_step:
            profiler = self._profiler
            self.abort()
            if cfg.output_path is not None:
                Path(cfg.output_path).mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(f"{cfg.output_path}/rank{self.trainer.global_rank}.json")

    def abort(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


class CheckpointerCallback(Callback):
    """Restores in on_train_begin, saves every so many steps and epochs and at the end, once a step at most.

    An asynchronous save is staged at once and written by a thread (the host: by a child process); the pointer to
    the latest follows when the write is awaited: before the next save, at the end of the training.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._cfg = trainer.config.checkpoint
        self.root = Path(self._cfg.checkpoint_dir)
        self._last_saved = -1
        self._writing: threading.Thread | None = None
        self._written_step = -1
        self._error: BaseException | None = None
        self.write: Callable[[Path, dict[str, Any]], None] = self._write  # a test may let it fail

    def on_train_begin(self, state: TrainerState, **kwargs: Any) -> None:
        directory = self._source()
        if directory is None:
            return
        trainer, rank = self.trainer, self.trainer.global_rank
        trainer.model.load_state_dict(load_weights(directory / f"_rank{rank}_.safetensors"))
        if self._cfg.restore_optimizer:
            saves = torch.load(directory / f"_rank{rank}_.bytes")
            for optimizer, saved in zip(several(trainer.optimizer), saves, strict=True):
                optimizer.load_state_dict(saved)
        if self._cfg.restore_train_state:
            extra = torch.load(directory / "extra_state" / f"extra_state_rank_{rank}.pt", weights_only=False)
            state.global_step, state.epoch = extra["global_step"], extra["epoch"]
            trainer.start_step = state.global_step % trainer.train_steps
            for scheduler, saved in zip(several(trainer.lr_scheduler), extra["lr_scheduler"], strict=True):
                scheduler.load_state_dict(saved)
            torch.set_rng_state(extra["rng_state"]["torch_cpu"])
            random.setstate(extra["rng_state"]["python"])
            if self._cfg.restore_dataloader_state and extra["train_dataloader"] is not None:
                trainer.train_dataloader.load_state_dict(extra["train_dataloader"])

    def on_step_end(
        self, state: TrainerState, loss: float, loss_dict: dict[str, float], grad_norm: float, **kwargs: Any
    ) -> None:
        self._raise_failure()
        if self._cfg.save_ckpt and self._cfg.save_steps > 0 and state.global_step % self._cfg.save_steps == 0:
            self._save()

    def on_epoch_end(self, state: TrainerState, **kwargs: Any) -> None:
        every = self._cfg.save_epochs
        if self._cfg.save_ckpt and every > 0 and (state.epoch + 1) % every == 0:
            if self._last_saved != state.global_step:
                self._save()

    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None:
        if self._cfg.save_ckpt and self._last_saved != state.global_step:
            self._save(force_sync=True)
        self.wait()

    def _source(self) -> Path | None:
        wanted = self._cfg.restore_from
        if wanted is None:
            return None
        if wanted != "LATEST":
            if not Path(wanted).is_dir():
                raise FileNotFoundError(wanted)
            return Path(wanted)
        pointer = self.root / POINTER
        if pointer.exists():
            target = self.root / f"global_step_{pointer.read_text('utf-8').strip()}"
            if any(target.glob("*.metadata")):
                return target
        found = [d for d in self.root.glob("global_step_*") if any(d.glob("*.metadata"))]
        if not found:
            warnings.warn(f"no checkpoint in {self.root}: starting afresh", stacklevel=2)
            return None
        return max(found, key=lambda d: int(d.name.rpartition("_")[2]))

    def _save(self, force_sync: bool = False) -> None:
        self.wait()
        trainer, state = self.trainer, self.trainer.state
        directory = self.root / f"global_step_{state.global_step}"
        (directory / "extra_state").mkdir(parents=True, exist_ok=True)
        loader = trainer.train_dataloader
        extra = {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "lr_scheduler": [scheduler.state_dict() for scheduler in several(trainer.lr_scheduler)],
            "train_dataloader": loader.state_dict() if hasattr(loader, "state_dict") else None,
            "rng_state": {"torch_cpu": torch.get_rng_state(), "python": random.getstate()},
        }
        torch.save(extra, directory / "extra_state" / f"extra_state_rank_{trainer.global_rank}.pt")
        staged = {
            "rank": trainer.global_rank,
            "model": copy.deepcopy(trainer.model.state_dict()),
            "optimizer": copy.deepcopy([optimizer.state_dict() for optimizer in several(trainer.optimizer)]),
        }
        self._last_saved = self._written_step = state.global_step
        if force_sync or not self._cfg.is_async:
            self.write(directory, staged)
            self._point()
            return
        self._writing = threading.Thread(target=self._write_later, args=(directory, staged), daemon=True)
        self._writing.start()

    def _write(self, directory: Path, staged: dict[str, Any]) -> None:
        rank = staged["rank"]
        save_weights(staged["model"], directory / f"_rank{rank}_.safetensors")
        torch.save(staged["optimizer"], directory / f"_rank{rank}_.bytes")
        (directory / ".metadata").write_text("{}", "utf-8")

    def _write_later(self, directory: Path, staged: dict[str, Any]) -> None:
        try:
            self.write(directory, staged)
        except BaseException as error:
            self._error = error

    def _raise_failure(self) -> None:
        """Of a write that has ended; one that is under way is left alone."""
        if self._writing is not None and not self._writing.is_alive() and self._error is not None:
            self._writing, error, self._error = None, self._error, None
            raise error

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._raise_failure()
            self._writing = None
            self._point()

    def _point(self) -> None:
        distributed.barrier()
        if self.trainer.global_rank == 0:
            (self.root / POINTER).write_text(f"{self._written_step}\n", "utf-8")
        distributed.barrier()


def built_in(trainer: Any) -> list[Hooks]:
    """The list, in the host's order; the checkpointer only when there is something to save or to restore."""
    made: list[Hooks] = [
        EnvironMeterCallback(trainer),
        LoggingCallback(trainer),
        TqdmCallback(trainer),
        EvaluateCallback(trainer),
        GarbageCollectionCallback(trainer),
        ProfilingCallback(trainer),
    ]
    checkpoint = trainer.config.checkpoint
    if checkpoint.save_ckpt or checkpoint.restore_from is not None:
        made.append(CheckpointerCallback(trainer))
    return made


def epochs(train_iters: int, train_steps: int) -> int:
    return max(1, math.ceil(train_iters / train_steps))
