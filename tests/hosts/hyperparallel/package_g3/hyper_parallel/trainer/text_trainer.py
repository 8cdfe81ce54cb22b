from tests.hosts.hyperparallel.fake_g3 import TextTrainer

__all__ = ["TextTrainer"]
