"""What modules are given and give, in words, as msProbe's older monitor has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmon.backend.statistics import Facts

__all__ = ["Structure", "add_gradient", "described"]

#: By module and ``input``, ``output``, ``input_grad``, ``output_grad``: the container's kind under ``config``, and each
#: element's size and dtype by position.
Structure = dict[str, dict[str, dict[str, str]]]
_GRADIENTS = {"grad_input": "input_grad", "grad_output": "output_grad"}


def add_gradient(found: Structure, name: str, facts: Facts | None) -> None:
    """Adds one element's gradient unless an earlier call's is there.

    Args:
        name: of its row: ``fc1.grad_input.0``.
        facts: None: there is none.
    """
    module, kind, at = name.rsplit(".", 2)
    own = found.setdefault(module, {}).setdefault(_GRADIENTS[kind], {})
    if at not in own:
        own[at] = "no gradient" if facts is None else f"size={facts.shape}, dtype={facts.dtype}"
        own.pop("config", None)
        own["config"] = f"tuple[{len(own)}]"


def described(value: Any, tensor: Any) -> dict[str, str]:
    """What a module is given or gives: a container's kind under ``config`` and its elements by position or key; a tensor
    alone under ``tensor``.

    Args:
        tensor: the framework's type.
    """

    def text(one: Any) -> str:
        if isinstance(one, tensor):
            return f"size={tuple(one.shape)}, dtype={one.dtype}"
        return f"{type(one).__name__}[{len(one)}]" if isinstance(one, tuple | list) else type(one).__name__

    if isinstance(value, tensor):
        return {"config": "tensor", "tensor": text(value)}
    if isinstance(value, tuple | list):
        elements = {str(at): text(one) for at, one in enumerate(value)}
    elif isinstance(value, Mapping):
        elements = {str(key): text(one) for key, one in value.items()}
    else:
        return {"config": type(value).__name__}
    return {"config": f"{type(value).__name__}[{len(value)}]", **elements}
