from tests.hosts.hyperparallel.fake_g1 import LLMTrainer, VLTrainer

__all__ = ["LLMTrainer", "VLTrainer"]
