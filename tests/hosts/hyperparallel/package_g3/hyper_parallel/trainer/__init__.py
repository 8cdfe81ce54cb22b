from tests.hosts.hyperparallel.fake_g3 import BaseTrainer, TextTrainer, VLMTrainer

__all__ = ["BaseTrainer", "TextTrainer", "VLMTrainer"]
