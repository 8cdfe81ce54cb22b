"""Second generation: ``BaseCallback`` with 22 hooks and a priority, in a CallbackManager.

Gives: steps, micro-batches (none under a pipeline), gradients before clipping, learning rates of the step, saves,
resumes, evaluations, epochs, exceptions; by a hook on the model samples and the wait for data. Can't give: forward and
backward times. Steps are skipped and the run ends through the host's TrainerControl.

The priority lies between the mixture of experts' monitor (-10), whose numbers are there then, and everybody else's (0):
rules of all ranks are asked before the host's own check may raise on rank 0 alone. Saves come after ``on_step_end``.
"""

from __future__ import annotations

from typing import Any

from trainmon.adapters.hyperparallel.reading import read
from trainmon.adapters.hyperparallel.session import Session, guarded
from trainmon.events import Action, Decision

__all__ = ["HOOKS", "PRIORITY", "SecondGeneration"]

PRIORITY = -5
HOOKS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_after_grad_sync", "on_resume", "on_forward_end", "on_micro_batch_end", "on_before_optimizer_step"),
    *(
        "on_step_end",
        "on_log",
        "on_save",
        "on_exception",
        "on_evaluate_begin",
        "on_evaluate_end",
        "on_predict",
    ),
    *("on_prediction_step", "on_memory_snapshot", "on_communication_step", "on_profiler_step"),
)


class SecondGeneration:
    """The hooks that matter. The host calls those that the class defines, so there is no other."""

    priority = PRIORITY

    def __init__(self, session: Session) -> None:
        self.session = session

    @guarded
    def on_train_begin(self, context: Any, **_payload: Any) -> None:
        self.session.begin(context.state.global_step, read(context.state, "max_steps"))

    @guarded
    def on_resume(self, context: Any, checkpoint_path: Any = None, **_payload: Any) -> None:
        self.session.loaded(context.state.global_step, checkpoint_path)

    @guarded
    def on_epoch_begin(self, context: Any, **_payload: Any) -> None:
        self.session.epoch(read(context.state, "epoch"), begins=True)

    @guarded
    def on_epoch_end(self, context: Any, **_payload: Any) -> None:
        self.session.left_over()
        self.session.epoch(read(context.state, "epoch"), begins=False)

    @guarded
    def on_step_begin(self, context: Any, **_payload: Any) -> None:
        state = context.state
        self.session.step_begin(state.global_step + 1, read(state, "max_steps"))

    @guarded
    def on_micro_batch_end(self, context: Any, loss: Any = None, tokens: Any = None, **_payload: Any) -> None:
        self.session.micro(loss, tokens)

    @guarded
    def on_after_grad_sync(self, context: Any, **_payload: Any) -> None:
        trainer = self.session.trainer
        # A pipeline's are not divided by the tokens yet.
        if self.session.stages == 1 and read(trainer, "pp_schedule") is None:
            self.session.reduced(self.session.limit)

    @guarded
    def on_before_optimizer_step(self, context: Any, grad_norm: Any = None, **_payload: Any) -> None:
        limit = self.session.limit
        decision = self.session.before_update(limit, grad_norm, clipped=grad_norm is not None)
        if decision.skip:
            context.control.should_skip_optimizer_step = True
        self._obey(context, decision)

    @guarded
    def on_step_end(
        self,
        context: Any,
        loss: Any = None,
        grad_norm: Any = None,
        metrics: Any = None,
        tokens: Any = None,
        **_payload: Any,
    ) -> None:
        skipped = bool(read(context, "control", "should_skip_optimizer_step"))
        # The host's is of the last micro-batch and this rank; layers that tell it of each have been asked.
        known = self.session.auxiliary.known
        auxiliary = metrics.get("aux_loss") if hasattr(metrics, "get") and not known else None
        decision = self.session.step_end(
            context.state.global_step,
            skipped=skipped,
            loss=loss,
            loss_parts=None if auxiliary is None else {"aux": auxiliary},
            grad_norm=grad_norm,
            tokens=tokens,
        )
        self._obey(context, decision)

    @guarded
    def on_save(
        self, context: Any, checkpoint_path: Any = None, success: bool = True, **_payload: Any
    ) -> None:
        if success:
            self.session.saved(context.state.global_step, checkpoint_path)

    @guarded
    def on_evaluate_begin(self, context: Any, **_payload: Any) -> None:
        self.session.evaluation(True)

    @guarded
    def on_evaluate_end(self, context: Any, **_payload: Any) -> None:
        self.session.evaluation(False)

    @guarded
    def on_exception(self, context: Any, exception: Any = None, **_payload: Any) -> None:
        if isinstance(exception, BaseException):
            self.session.exception(exception)

    @guarded
    def on_train_end(self, context: Any, **_payload: Any) -> None:
        self.session.end()

    def _obey(self, context: Any, decision: Decision) -> None:
        if Action.RAISE in decision.actions:
            self.session.stop(decision)
        if decision.stop:
            self.session.stops = True
            context.control.should_training_stop = True
