"""Older G3 trainers: callbacks hold the trainer strongly, the update is inline, a limit of 0 zeroes all gradients.

Stands for: base @0016d837, and @d30061c2, which had `add_callback`; text_trainer @8c00e217, which never sent
on_micro_step_begin (contract 1, 5). No trace was recorded of them.
"""

from __future__ import annotations

from typing import Any

from tests.hosts.hyperparallel.callbacks_g3 import HOOKS, TrainerState
from tests.hosts.hyperparallel.callbacks_g3 import StrongCallback as Callback
from tests.hosts.hyperparallel.core_g3 import CoreTrainer, TextLoop

__all__ = ["HOOKS", "BaseTrainer", "BaseTrainerWithAddCallback", "Callback", "TextTrainer", "TrainerState"]


class BaseTrainer(CoreTrainer):
    """@0016d837: no seam to replace but the optimizer's step."""

    def update(self) -> float:
        grad_norm = float(self._clip())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        return grad_norm


class BaseTrainerWithAddCallback(BaseTrainer):
    """@d30061c2: `add_callback` appends to `_callbacks`."""

    def add_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)


class TextTrainer(TextLoop):
    base_class = BaseTrainer
    sends_micro_step_begin = False
