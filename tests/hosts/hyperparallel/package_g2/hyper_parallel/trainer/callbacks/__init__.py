from tests.hosts.hyperparallel.fake_g2 import (
    BaseCallback,
    CallbackHookNames,
    TrainerCallbackContext,
    TrainerControl,
)

__all__ = ["BaseCallback", "CallbackHookNames", "TrainerCallbackContext", "TrainerControl"]
