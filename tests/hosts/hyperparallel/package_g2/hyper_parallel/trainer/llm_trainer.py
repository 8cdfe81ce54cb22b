from tests.hosts.hyperparallel.fake_g2 import LLMTrainer

__all__ = ["LLMTrainer"]
