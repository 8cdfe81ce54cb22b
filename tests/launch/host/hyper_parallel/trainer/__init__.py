"""Trainers of the real package's names and nesting, with no training in them: what `trainmon launch` looks at."""

from .base import BaseTrainer
from .text_trainer import TextTrainer, VLMTrainer

__all__ = ["BaseTrainer", "TextTrainer", "VLMTrainer"]
