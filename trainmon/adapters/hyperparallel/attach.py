"""``trainmon.attach_hyperparallel(trainer, config)``: one call before ``train()``, whatever the generation."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

from trainmon.adapters.hyperparallel import g1, g2, g3
from trainmon.adapters.hyperparallel.detect import callbacks_of, find_trainer, itself
from trainmon.adapters.hyperparallel.session import ACTIONS, Session
from trainmon.adapters.hyperparallel.settings import HostSettings, settings_of
from trainmon.events import TrainBegin
from trainmon.monitor import TrainMonitor
from trainmon.supervision import check_health

__all__ = ["attach_hyperparallel"]

_KINDS: dict[str, tuple[type, str, Sequence[str]]] = {
    "g1": (g1.FirstGeneration, "Callback", g1.HOOKS),
    "g2": (g2.SecondGeneration, "BaseCallback", g2.HOOKS),
    "g3": (g3.ThirdGeneration, "Callback", g3.HOOKS),
}


def attach_hyperparallel(
    trainer: Any,
    config: Any = None,
    *,
    backend: Literal["auto", "host", "torch"] = "auto",
    host_settings: bool = True,
    **overrides: Any,
) -> Session:
    """Starts watching a HyperParallel trainer; call it on all ranks, after the trainer was built and before ``train()``.

    The run begins with the trainer's, resumes where it does, and ends with it; ``detach()`` ends it before.

    Args:
        trainer: LLMTrainer, VLTrainer, TextTrainer, VLMTrainer, or the BaseTrainer in one.
        config: path of a YAML or JSON file (with ``callbacks:``, or trainmon's own), a mapping, or None for the defaults.
        backend: as of :func:`trainmon.attach`.
        host_settings: follow the host's own sections (monitor, logging, tensorboard, wandb, moe_monitor, debug) where the
            configuration says nothing.
        **overrides: top-level configuration keys.

    Raises:
        TypeError: not a HyperParallel trainer; says what was looked for.
        RuntimeError: the trainer is watched already.
        ConfigError: the configuration is wrong, or a rule asks for what the trainer can't do; nothing has begun.
    """
    inner, generation = find_trainer(trainer)
    if any(isinstance(getattr(one, "session", None), Session) for one in callbacks_of(inner, generation)):
        raise RuntimeError(
            "this trainer is watched already: detach() what attach_hyperparallel returned first"
        )
    settings = settings_of(inner) if host_settings else HostSettings()
    monitor = TrainMonitor(config, settings.config, **overrides)
    if monitor.config.health is not None:
        check_health(monitor.config.health, TrainBegin(actions=ACTIONS, host=f"hyperparallel_{generation}"))
    session = Session(inner, generation, monitor, backend, settings)
    kind, base, hooks = _KINDS[generation]
    callback = _subclass(kind, _base_class(inner, generation, base), hooks)(session)
    session.hangs(callback, _hang(inner, generation, callback))
    if generation == "g1":
        g1.replace_clipping(session)
    if generation != "g2":  # which tells of exceptions itself
        outer = itself(trainer)
        session.follow(inner, *([] if outer is inner else [outer]))
    return session


def _hang(trainer: Any, generation: str, callback: Any) -> Callable[[], None]:
    """Puts the callback into the host's list, and returns what takes it out."""
    held = callbacks_of(trainer, generation)
    if generation == "g2":
        manager = trainer.callback_handler
        manager.register(callback)
        return lambda: _unregister(manager, callback)
    held.insert(len(held) if generation == "g1" else g3.position(held), callback)

    def unhang() -> None:
        places = [place for place, one in enumerate(held) if one is callback]
        for place in places:
            del held[place]

    return unhang


def _unregister(manager: Any, callback: Any) -> None:
    if any(one is callback for one in manager.callbacks):
        manager.unregister(callback)


def _base_class(trainer: Any, generation: str, name: str) -> type | None:
    """The host's class of callbacks, where it can be found without importing anything."""
    held = callbacks_of(trainer, generation)
    for callback in held:
        for kind in type(callback).__mro__:
            if kind.__name__ == name and "on_step_end" in vars(kind):
                return kind
    keeper = type(trainer.callback_handler) if generation == "g2" else type(trainer)
    for module in ("hyper_parallel.trainer.callbacks.base", keeper.__module__):
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type):
            return found
    return None


def _subclass(kind: type, base: type | None, hooks: Sequence[str]) -> type:
    """The callback's class: a subclass of the host's, else one that has every hook."""

    def silent(self: Any, *_arguments: Any, **_keywords: Any) -> None:
        """Nothing to be done."""

    missing = {name: silent for name in hooks if base is None and not hasattr(kind, name)}
    bases = (kind,) if base is None else (kind, base)
    return types.new_class("TrainMonitorCallback", bases, exec_body=lambda body: body.update(missing))
