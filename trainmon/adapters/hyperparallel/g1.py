"""First generation: ``Callback(trainer)`` with 13 hooks, in the list ``user_callbacks``, after all of the host's own.

Gives: steps, micro-batches (none under a pipeline), gradients before clipping, learning rates of the step, saves and
loads, epochs; by a hook on the model samples and the wait for data. Can't give: forward and backward times,
evaluations. Only raising ends a run, and then the host neither saves nor calls ``on_train_end``; a step is skipped by
taking its gradients away.

There is no hook between backward and clipping: the trainer's private method that clips is replaced on the instance. With
clipping off it is not called, and ``on_pre_optimizer_step`` finds the same gradients. A pipeline's are divided by the
tokens and clipped in one: there the host's own norm is taken.
"""

from __future__ import annotations

from typing import Any

from trainmon.adapters.hyperparallel.reading import read
from trainmon.adapters.hyperparallel.session import Session, guarded
from trainmon.events import Decision

__all__ = ["HOOKS", "FirstGeneration", "replace_clipping"]

#: All hooks of this generation; an object that lacks one is an error when it fires.
HOOKS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *(
        "on_substep_end",
        "on_pre_optimizer_step",
        "on_step_end",
        "on_log",
        "on_save",
        "on_load",
        "on_evaluate",
    ),
)


def replace_clipping(session: Session) -> None:
    """Looks at gradients before the host clips them, and asks the rules before ``on_pre_optimizer_step``, in which the
    host's own check may raise on rank 0 alone."""

    def around(original: Any) -> Any:
        callback = session.callback
        callback.before_clipping()
        norm = original()
        callback.after_clipping(norm)
        return norm

    session.seams.around("_non_pp_clip_grad_norm", around)


class FirstGeneration:
    """The hooks that matter; the others do nothing."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @guarded
    def before_clipping(self) -> None:
        self.session.reduced(self.session.limit)

    @guarded
    def after_clipping(self, norm: Any) -> None:
        self._obey(self.session.before_update(self.session.limit, norm))

    @guarded
    def on_train_begin(self, state: Any, **_more: Any) -> None:
        self.session.begin(state.global_step, read(state, "max_steps"))

    @guarded
    def on_epoch_begin(self, state: Any, **_more: Any) -> None:
        self.session.epoch(read(state, "epoch"), begins=True)

    @guarded
    def on_epoch_end(self, state: Any, **_more: Any) -> None:
        self.session.left_over()
        self.session.epoch(read(state, "epoch"), begins=False)

    @guarded
    def on_step_begin(self, state: Any, **_more: Any) -> None:
        self.session.step_begin(state.global_step + 1, read(state, "max_steps"))

    @guarded
    def on_substep_end(self, state: Any, **more: Any) -> None:
        info = read(state, "substep_info") or {}
        self.session.micro(more.get("raw_loss", info.get("raw_loss")), info.get("micro_tokens"))

    @guarded
    def on_pre_optimizer_step(self, state: Any, grad_norm: Any = None, **_more: Any) -> None:
        limit = self.session.limit
        self._obey(self.session.before_update(limit, grad_norm, clipped=grad_norm is not None))

    @guarded
    def on_step_end(self, state: Any, loss: Any = None, grad_norm: Any = None, **_more: Any) -> None:
        tokens = read(self.session.trainer, "_last_global_tokens")
        decision = self.session.step_end(state.global_step, loss=loss, grad_norm=grad_norm, tokens=tokens)
        self.session.stop(decision)

    @guarded
    def on_save(self, state: Any, checkpoint_dir: Any = None, **_more: Any) -> None:
        self.session.saved(state.global_step, checkpoint_dir)

    @guarded
    def on_load(self, state: Any, checkpoint_dir: Any = None, **_more: Any) -> None:
        self.session.loaded(state.global_step, checkpoint_dir)

    @guarded
    def on_train_end(self, state: Any, **_more: Any) -> None:
        self.session.end()

    def _obey(self, decision: Decision) -> None:
        self.session.stop(decision)
        if decision.skip:
            self.session.drop_gradients()
