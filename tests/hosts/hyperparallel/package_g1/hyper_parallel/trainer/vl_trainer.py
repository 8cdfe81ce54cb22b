from tests.hosts.hyperparallel.fake_g1 import VLTrainer

__all__ = ["VLTrainer"]
