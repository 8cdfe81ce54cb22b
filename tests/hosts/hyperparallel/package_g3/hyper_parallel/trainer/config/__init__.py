from tests.hosts.hyperparallel.config_g3 import ConfigResolutionError, TrainerConfig, parse_args

__all__ = ["ConfigResolutionError", "TrainerConfig", "parse_args"]
