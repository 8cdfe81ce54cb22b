"""What is read of a host's objects, which may lack any of it."""

from __future__ import annotations

from typing import Any

__all__ = ["max_grad_norm", "read"]


def read(thing: Any, *path: str) -> Any:
    """An attribute of an attribute ...; None where something is missing."""
    for name in path:
        if thing is None:
            return None
        thing = getattr(thing, name, None)
    return thing


def max_grad_norm(trainer: Any) -> float | None:
    """What gradients are clipped to; None: they are not, or it can't be told."""
    for path in (
        ("args", "train", "optimizer", "max_grad_norm"),
        ("args", "optimizer", "max_grad_norm"),
        ("args", "train", "max_grad_norm"),
        ("config", "training", "max_grad_norm"),
    ):
        value = read(trainer, *path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if value > 0 else None
    return None
