"""Third generation: ``Callback(trainer)`` with 8 hooks, in the private list ``_callbacks``.

Gives: steps, micro-batches with their local losses, gradients before clipping, learning rates of the step, samples,
epochs, the loss that the host prints (``loss/part/<name>``; of the Text and VLM trainers a mean of micro-batch means).
Saves are seen by their directories, the wait for data in ``get_batch``. Can't give: forward and backward times,
evaluations. Only raising ends a run, and then the host neither saves nor calls ``on_train_end``; a step is skipped by
taking its gradients away.

Hooks are few, so more places are used while the run lasts: a hook on ``loss_fn``, which knows the local loss; one
before the model's forward, where the micro-batch before it is through; and ``prepare_optimizer_step``, replaced on the
instance, around which gradients are whole, before and after clipping. A trainer without it shows what its optimizers get:
there the outermost ``step`` is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from trainmon.adapters.hyperparallel.reading import read
from trainmon.adapters.hyperparallel.seams import Seams
from trainmon.adapters.hyperparallel.session import Session, guarded
from trainmon.adapters.torch_parts.modules import is_repeated, tensors_in
from trainmon.adapters.torch_parts.shards import without_graph

__all__ = ["HOOKS", "ThirdGeneration", "position"]

HOOKS = (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_micro_step_begin", "on_micro_step_end", "on_step_end"),
)


def position(callbacks: list[Any]) -> int:
    """Where the callback belongs in the host's list: behind the meters, whose numbers are there then, and before whoever
    prints them or saves: rules end a run before a bad state is saved."""
    names = [type(callback).__name__ for callback in callbacks]
    for place, name in enumerate(names):
        if "EnvironMeter" in name:
            return place + 1
    for place, name in enumerate(names):
        if "Checkpoint" in name:
            return place
    return len(callbacks)


class ThirdGeneration:
    """The hooks that matter; the others do nothing."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._handles: list[Any] = []
        self._pending: tuple[Any, Any] | None = (
            None  # loss and tokens of a micro-batch that may still run backward
        )
        self._samples: int | None = None

    # -- the host's hooks -------------------------------------------------------------------------------------------

    @guarded
    def on_epoch_begin(self, state: Any, **_more: Any) -> None:
        # Not before: a checkpointer behind us restores the step in on_train_begin.
        if not self._handles:
            self._install()
        trainer = self.session.trainer
        wanted = read(trainer, "config", "checkpoint", "restore_from")
        if state.global_step and wanted and not self.session.begun:
            known = None if wanted == "LATEST" else str(wanted)
            self.session.loaded(state.global_step, known or self._checkpoint(state.global_step))
        self.session.begin(state.global_step, read(trainer, "train_iters"))
        self.session.epoch(read(state, "epoch"), begins=True)

    @guarded
    def on_step_begin(self, state: Any, **_more: Any) -> None:
        # global_step is that of the step before, or already this one's: it depends on the trainer.
        if not self._handles:
            self._install()
        self._leave()
        self._keep()
        self.session.step_begin(self.session.next_step)

    @guarded
    def on_micro_step_begin(self, state: Any, *_batch: Any, **_more: Any) -> None:
        self._micro_ends()

    @guarded
    def on_step_end(
        self, state: Any, loss: Any = None, loss_dict: Any = None, grad_norm: Any = None, **_more: Any
    ) -> None:
        self._micro_ends()
        parts = dict(loss_dict) if isinstance(loss_dict, Mapping) else None
        samples, self._samples = self._samples, None
        decision = self.session.step_end(
            state.global_step,
            loss=loss,
            loss_parts=parts,
            grad_norm=self._norm(grad_norm),
            samples=samples,
        )
        self.session.stop(decision)

    @guarded
    def on_epoch_end(self, state: Any, **_more: Any) -> None:
        self._leave()
        self.session.epoch(read(state, "epoch"), begins=False)

    @guarded
    def on_train_end(self, state: Any, **_more: Any) -> None:
        self._leave()
        self.session.end()

    # -- checkpoints, which are not announced -----------------------------------------------------------------------

    def _checkpoint(self, step: int) -> str | None:
        """The directory of a step's checkpoint."""
        root = read(self.session.trainer, "config", "checkpoint", "checkpoint_dir")
        return None if root is None else os.path.join(str(root), f"global_step_{step}")

    @guarded
    def _keep(self) -> None:
        done = self.session.done_here
        if done and read(self.session.trainer, "config", "checkpoint", "save_ckpt"):
            self.session.checkpoints.look(self._checkpoint(done), done)

    # -- seams ------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        trainer, session = self.session.trainer, self.session
        session.on_release(self._remove)
        session.afterwards(self._keep)  # the last one is written when we have ended
        loss_fn, model = read(trainer, "loss_fn"), read(trainer, "model")
        if isinstance(loss_fn, torch.nn.Module):
            self._handles.append(loss_fn.register_forward_hook(self._loss, with_kwargs=True))
        if isinstance(model, torch.nn.Module):
            self._handles.append(model.register_forward_pre_hook(self._forward))
        if session.monitor.config.timing is not None:
            session.seams.around("get_batch", session.reading)
        if not session.seams.around("prepare_optimizer_step", self._prepare):
            held = read(trainer, "optimizer")
            for optimizer in held if isinstance(held, list | tuple) else [held]:
                steps = Seams(optimizer)
                steps.around("step", self._step)
                session.on_release(steps.undo)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _looks(self) -> bool:
        return self.session.running and torch.is_grad_enabled() and not is_repeated()

    @guarded
    def _forward(self, model: Any, _arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if model.training and self._looks():
            self._micro_ends()

    @guarded
    def _loss(self, _module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._looks():
            return
        self._micro_ends()  # of a trainer whose model is called elsewhere
        losses = tensors_in(output)
        counts = read(self.session.trainer, "current_token_counts")
        tokens = counts.get("foundation_tokens") if isinstance(counts, Mapping) else None
        self._pending = (without_graph(losses[0]) if losses else None), tokens
        labels = keywords.get("labels")
        if isinstance(labels, torch.Tensor) and labels.ndim >= 2:
            self._samples = (self._samples or 0) + int(labels.shape[0])

    def _micro_ends(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.session.micro(*pending)

    def _leave(self) -> None:
        """A step may have been left: what it gathered is not the next one's."""
        if self.session.running:
            self._micro_ends()
            self.session.left_over()
        self._pending = self._samples = None

    def _prepare(self, original: Any) -> Any:
        self._before_clipping()
        norm = original()
        self._after_clipping(norm)
        return norm

    @guarded
    def _before_clipping(self) -> None:
        self._micro_ends()
        self.session.reduced(self.session.limit)

    @guarded
    def _after_clipping(self, norm: Any) -> None:
        limit = self.session.limit
        decision = self.session.before_update(limit, self._norm(norm))
        self.session.stop(decision)
        if decision.skip:
            self.session.drop_gradients()

    def _step(self, original: Any) -> Any:
        """Of an older trainer's optimizer; without it the gradients wait for zero_grad."""
        self._before_step()
        return None if self.session.skips else original()

    @guarded
    def _before_step(self) -> None:
        self._micro_ends()
        limit = self.session.limit
        self.session.stop(self.session.before_update(limit, None))

    def _norm(self, norm: Any) -> Any:
        """With clipping off the host says 0 and knows nothing."""
        return None if self.session.limit is None else without_graph(norm)
