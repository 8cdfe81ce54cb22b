"""A tensor that stands for one of a device: its numbers can be had only through reads that are counted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

#: What brings a device's numbers to the host and waits for them.
_READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__")


class Counted(torch.Tensor):
    """Wraps a tensor without sharing its memory: no pointer, no DLPack, no buffer.

    Attributes:
        reads: names of the reads so far, of all such tensors.
    """

    reads: ClassVar[list[str]] = []
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Counted:
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=False
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("data_ptr", "__dlpack__", "untyped_storage"):
            raise AssertionError(f"{name} of a tensor whose memory is a device's")
        if name in _READS:
            cls.reads.append(name)
            args = tree_map(_inner, args)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            cls.reads.append("_local_scalar_dense")
        result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs or {}))
        if not function._schema.returns:  # foreach operations in place
            return None
        if function.overloadpacket.__name__.endswith("_"):  # in place: the same object comes back
            return args[0]
        return tree_map(lambda value: Counted(value) if isinstance(value, torch.Tensor) else value, result)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Counted) else value


def on_device(model: torch.nn.Module) -> torch.nn.Module:
    """The model with counted parameters."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(Counted(parameter.detach().clone()))
    return model
