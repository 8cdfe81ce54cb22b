"""Hooks that a host calls, out of which nothing comes that it doesn't expect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from trainmon.config import ConfigError
from trainmon.health import TrainingStopped

__all__ = ["guarded"]

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """A method out of which nothing comes but a rule's decision to end the run, and a configuration that can't be used;
    ``self._failed`` takes the rest."""

    @functools.wraps(hook)
    def safe(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return hook(self, *arguments, **keywords)
        except (TrainingStopped, ConfigError):
            raise
        except Exception as error:
            self._failed(error)
            return None

    return safe  # type: ignore[return-value]
