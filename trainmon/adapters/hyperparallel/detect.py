"""Which trainer this is: the inner one behind a wrapper, and its generation.

``add_callback`` tells nothing: trainers of all generations have it. What they keep callbacks in does.
"""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["GENERATIONS", "callbacks_of", "find_trainer", "itself"]

#: Where a generation keeps its callbacks, in the order in which they are looked for.
GENERATIONS = (("g2", "callback_handler"), ("g1", "user_callbacks"), ("g3", "_callbacks"))


def find_trainer(trainer: Any) -> tuple[Any, str]:
    """The trainer that runs the loop, and its generation.

    Args:
        trainer: it, a wrapper that holds it as ``.base`` (LLMTrainer, TextTrainer ...), or a weak proxy of either.

    Raises:
        TypeError: it is none of those that are known; says what was looked for.
    """
    inner = itself(getattr(trainer, "base", None) or trainer)
    for generation, place in GENERATIONS:
        kept = getattr(inner, place, None)
        if kept is not None and (generation == "g2" or isinstance(kept, list)):
            return inner, generation
    raise TypeError(
        f"{type(inner).__name__} is no HyperParallel trainer that trainmon knows: neither it nor its .base has a "
        "callback_handler (a CallbackManager), a list user_callbacks or a list _callbacks; if this is a newer trainer, "
        "trainmon.attach(model, optimizer) works in any loop"
    )


def callbacks_of(trainer: Any, generation: str) -> Any:
    """The live list of callbacks; of the second generation a tuple."""
    kept = getattr(trainer, dict(GENERATIONS)[generation])
    return kept.callbacks if generation == "g2" else kept


def itself(trainer: Any) -> Any:
    """What a weak proxy stands for: a proxy can be neither hashed nor referred to weakly."""
    if type(trainer) in weakref.ProxyTypes:
        return trainer.__dir__.__self__
    return trainer
