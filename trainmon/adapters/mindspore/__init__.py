"""MindSpore's ``Model.train`` and ``Model.fit``, GRAPH and PyNative (docs/mindspore.md)."""

from trainmon.adapters.mindspore.callback import MindSporeMonitor

__all__ = ["MindSporeMonitor"]
