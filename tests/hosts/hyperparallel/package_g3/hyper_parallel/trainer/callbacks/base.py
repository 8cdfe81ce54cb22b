from tests.hosts.hyperparallel.fake_g3 import Callback, TrainerState

__all__ = ["Callback", "TrainerState"]
