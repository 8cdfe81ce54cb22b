from tests.hosts.hyperparallel.fake_g3 import TrainerState

__all__ = ["TrainerState"]
