"""``trainmon launch [--monitor FILE] -- train.py ARGS``: a training script of a known host, under TrainMonitor."""

from trainmon.launch.command import USAGE, main

__all__ = ["USAGE", "main"]
