"""MindSpore's switch of deterministic computation, and its seed."""

from __future__ import annotations

from typing import Any

import mindspore

__all__ = ["settings", "switch_on"]


def switch_on(seed: int | None) -> list[str]:
    """Sets them; returns what may still differ."""
    if seed is not None:
        mindspore.set_seed(seed)
    if mindspore.get_context("deterministic") == "ON":
        return []  # by somebody else: MindSpore takes it once
    if hasattr(mindspore, "set_deterministic"):
        mindspore.set_deterministic(True)
    else:  # before 2.5
        mindspore.set_context(deterministic="ON")
    return []


def settings() -> dict[str, Any]:
    """By their names in MindSpore."""
    return {
        "mindspore.__version__": mindspore.__version__,
        "mindspore.get_seed": mindspore.get_seed(),
        "mindspore.get_context deterministic": mindspore.get_context("deterministic"),
    }
