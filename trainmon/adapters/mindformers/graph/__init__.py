"""MindFormers' GRAPH trainer: a callback of MindSpore that knows the trainer and what its step returns."""

from trainmon.adapters.mindformers.graph.callback import GraphMonitor

__all__ = ["GraphMonitor"]
