from tests.hosts.hyperparallel.fake_g3 import VLMTrainer

__all__ = ["VLMTrainer"]
