from tests.hosts.hyperparallel.fake_g1 import BaseTrainer, TrainerState

__all__ = ["BaseTrainer", "TrainerState"]
