"""The hosts whose trainers `trainmon launch` attaches to."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["HOSTS", "Host"]


@dataclass(frozen=True, slots=True)
class Host:
    """A package with trainers.

    Attributes:
        name: what people call it.
        package: the modules in and below it are watched when they are imported.
        trainers: the classes there; of one that builds another, only the outer one counts.
        inner: attribute of an outer one that holds the trainer it has built.
        attach: module and function of the adapter, called as `attach(trainer, config)`; what it returns is told
            `detach()` when another trainer takes its place.
    """

    name: str
    package: str
    trainers: tuple[str, ...]
    inner: str
    attach: tuple[str, str]

    def owns(self, module: str) -> bool:
        """Whether a module is the package or below it."""
        return module == self.package or module.startswith(self.package + ".")

    def attacher(self) -> Any:
        """The adapter's function."""
        module, name = self.attach
        return getattr(importlib.import_module(module), name)


HOSTS = (
    Host(
        "HyperParallel",
        "hyper_parallel.trainer",
        ("LLMTrainer", "VLTrainer", "TextTrainer", "VLMTrainer", "BaseTrainer"),
        "base",
        ("trainmon.adapters.hyperparallel", "attach_hyperparallel"),
    ),
)
