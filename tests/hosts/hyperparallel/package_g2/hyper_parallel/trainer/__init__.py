from tests.hosts.hyperparallel.fake_g2 import LLMTrainer, VLTrainer

__all__ = ["LLMTrainer", "VLTrainer"]
