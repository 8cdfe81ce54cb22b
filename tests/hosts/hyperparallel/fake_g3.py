"""The newest G3 trainers: `Callback(trainer)` with a weak proxy, 8 hooks, `_callbacks`, the seams around the update.

Stands for: callbacks, state.py @1df8e006; base @86034775; text_trainer @0a491a4e (without `dataset.source`); vlm_trainer
@0e8cc3df; config/trainer.py @0c221dea (contract 5, 6, 8.3, 9.3, 12.2). It has no `add_callback`.
"""

from __future__ import annotations

from typing import Any

from tests.hosts.hyperparallel.callbacks_g3 import (
    HOOKS,
    Callback,
    CheckpointerCallback,
    TrainerState,
    several,
)
from tests.hosts.hyperparallel.core_g3 import CoreTrainer, TextLoop, VLMLoop

__all__ = [
    "HOOKS",
    "BaseTrainer",
    "Callback",
    "CheckpointerCallback",
    "TextTrainer",
    "TrainerState",
    "VLMTrainer",
]


class BaseTrainer(CoreTrainer):
    """Looks both seams up on the instance at every step, so that a replacement is honoured."""

    def prepare_optimizer_step(self) -> Any:
        """The norm before clipping, as a tensor; 0.0, with nothing clipped, when `max_grad_norm` <= 0."""
        return self._clip() if self.config.training.max_grad_norm > 0 else 0.0

    def step_optimizers_and_schedulers(self) -> None:
        for optimizer in several(self.optimizer):
            optimizer.step()
        for optimizer in several(self.optimizer):
            optimizer.zero_grad()
        for scheduler in several(self.lr_scheduler):
            scheduler.step()

    def update(self) -> float:
        grad_norm = float(self.prepare_optimizer_step())
        self.step_optimizers_and_schedulers()
        return grad_norm


class TextTrainer(TextLoop):
    base_class = BaseTrainer


class VLMTrainer(VLMLoop):
    base_class = BaseTrainer
