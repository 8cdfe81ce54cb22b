"""The names under which MindFormers builds the monitor, and which of its two trainers is building."""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import Any

__all__ = ["TrainMonitor", "is_pynative", "register"]

_PYNATIVE = "mindformers.pynative."


def is_pynative() -> bool:
    """Whether the PyNative trainer is among the callers: both may have been imported."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_PYNATIVE):
            return True
        frame = frame.f_back
    return False


class TrainMonitor:
    """What the entry of a YAML becomes: the callback of the trainer that builds it."""

    def __new__(cls, **keys: Any) -> Any:
        if is_pynative():
            kind = importlib.import_module("trainmon.adapters.mindformers.pynative").PyNativeMonitor
            return kind(**keys)
        from trainmon.adapters.mindformers.graph.callback import GraphMonitor

        return GraphMonitor(**keys)


def register() -> None:
    """Makes the name known to MindFormers."""
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    MindFormerRegister.register_cls(TrainMonitor, MindFormerModuleType.CALLBACK)
