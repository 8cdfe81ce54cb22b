from tests.hosts.hyperparallel.fake_g3 import BaseTrainer

__all__ = ["BaseTrainer"]
