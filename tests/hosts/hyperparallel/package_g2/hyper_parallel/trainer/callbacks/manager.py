from tests.hosts.hyperparallel.fake_g2 import CallbackManager

__all__ = ["CallbackManager"]
