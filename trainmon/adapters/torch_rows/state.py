"""What optimizers keep of their parameters, looked up live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainmon.adapters.torch_parts.optimizers import optimizers_of

__all__ = ["state_of", "states_of"]


def states_of(optimizer: Any) -> Iterator[Mapping[Any, Any]]:
    """The mappings by parameter of one or several optimizers, now."""
    try:
        inner: Sequence[Any] = optimizers_of(optimizer)
    except TypeError:
        inner = [optimizer]
    for one in inner:
        state = getattr(one, "state", None)
        if isinstance(state, Mapping):
            yield state


def state_of(parameter: torch.Tensor, states: Sequence[Mapping[Any, Any]]) -> Mapping[str, Any]:
    """A parameter's own or its master's; empty if there is none."""
    for key in (parameter, getattr(parameter, "main_param", None)):
        for state in states:
            own = None if key is None else state.get(key)
            if isinstance(own, Mapping) and own:
                return own
    return {}
