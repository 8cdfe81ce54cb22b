"""Whether a run is healthy: rules over merged values, one state, what they ask for, and the first cause of a NaN."""

from trainmon.health.stopped import TrainingStopped

__all__ = ["TrainingStopped"]
