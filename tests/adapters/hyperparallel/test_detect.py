"""Which trainers are taken for HyperParallel's, and what is said of others."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon
from trainmon.adapters.hyperparallel.detect import find_trainer


class Trainer:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def add_callback(self, callback: Any) -> None:
        """Trainers of all generations may have it."""


@pytest.mark.parametrize(
    ("generation", "attributes"),
    [
        ("g2", {"callback_handler": SimpleNamespace(callbacks=()), "user_callbacks": [], "_callbacks": []}),
        ("g1", {"user_callbacks": [], "_callbacks": []}),
        ("g3", {"_callbacks": []}),
    ],
)
def test_the_generation_is_found_by_what_keeps_the_callbacks(
    generation: str, attributes: dict[str, Any]
) -> None:
    inner = Trainer(**attributes)
    wrapper = Trainer(base=inner)
    for trainer in (inner, wrapper, weakref.proxy(inner), weakref.proxy(wrapper)):
        found, kind = find_trainer(trainer)
        assert found is inner and kind == generation


@pytest.mark.parametrize("trainer", [Trainer(), Trainer(base=Trainer()), Trainer(_callbacks=()), object()])
def test_others_are_refused_by_what_was_looked_for(trainer: Any) -> None:
    with pytest.raises(TypeError, match=r"callback_handler .* user_callbacks .* _callbacks"):
        trainmon.attach_hyperparallel(trainer)
