from tests.hosts.hyperparallel.fake_g1 import LLMTrainer

__all__ = ["LLMTrainer"]
