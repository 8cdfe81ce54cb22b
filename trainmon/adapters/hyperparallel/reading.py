"""What is read of a host's objects, which may lack any of it."""

from __future__ import annotations

from typing import Any

__all__ = ["checkpoint_wanted", "max_grad_norm", "read"]


def read(thing: Any, *path: str) -> Any:
    """An attribute of an attribute ...; None where something is missing."""
    for name in path:
        if thing is None:
            return None
        thing = getattr(thing, name, None)
    return thing


def checkpoint_wanted(trainer: Any) -> str | None:
    """Which checkpoint the host was told to go on from; None: none."""
    for path in (
        ("args", "train", "checkpoint", "load_path"),
        ("args", "checkpoint", "load_path"),
        ("config", "checkpoint", "restore_from"),
    ):
        wanted = read(trainer, *path)
        if wanted:
            return str(wanted)
    return None


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
