from trainmon.adapters.mindformers import TrainingStateMonitor, TrainMonitor  # noqa: F401
