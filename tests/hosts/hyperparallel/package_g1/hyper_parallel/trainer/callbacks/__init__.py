from tests.hosts.hyperparallel.fake_g1 import Callback

__all__ = ["Callback"]
