from tests.hosts.hyperparallel.fake_g2 import BaseTrainer, TrainerState

__all__ = ["BaseTrainer", "TrainerState"]
