"""MindFormers' PyNative trainer (docs/mindformers.md)."""

from trainmon.adapters.mindformers.pynative.callback import PyNativeMonitor

__all__ = ["PyNativeMonitor"]
