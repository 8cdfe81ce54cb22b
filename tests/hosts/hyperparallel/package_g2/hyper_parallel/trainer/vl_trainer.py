from tests.hosts.hyperparallel.fake_g2 import VLTrainer

__all__ = ["VLTrainer"]
