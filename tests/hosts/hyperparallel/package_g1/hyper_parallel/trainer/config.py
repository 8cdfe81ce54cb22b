from tests.hosts.hyperparallel.config_lm import HyperTrainerConfig, parse_args

__all__ = ["HyperTrainerConfig", "parse_args"]
