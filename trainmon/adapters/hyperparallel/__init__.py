"""HyperParallel's trainer, all three generations of its callbacks (docs/hyperparallel.md)."""

from trainmon.adapters.hyperparallel.attach import attach_hyperparallel
from trainmon.adapters.hyperparallel.session import Session

__all__ = ["Session", "attach_hyperparallel"]
