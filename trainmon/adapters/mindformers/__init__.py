"""MindFormers: ``callbacks: - type: TrainMonitor`` for both of its trainers (docs/mindformers.md).

To import this registers the name ``TrainMonitor`` with MindFormers; ``auto_register: trainmon_mf.TrainMonitor`` does the
same from a YAML alone. ``TrainingStateMonitor`` takes the host's own monitor's place, if a YAML says so.
"""

from __future__ import annotations

from typing import Any

from trainmon.adapters.mindformers.entry import TrainMonitor, register

__all__ = ["TrainMonitor", "TrainingStateMonitor"]

register()


def __getattr__(name: str) -> Any:
    if name == "TrainingStateMonitor":  # of the GRAPH trainer, whose own class it stands for
        from trainmon.adapters.mindformers.graph.state_monitor import TrainingStateMonitor

        return TrainingStateMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
