from tests.hosts.hyperparallel.config_g3 import TrainerConfig

__all__ = ["TrainerConfig"]
