"""A stand-in for the package hyper_parallel, which MindFormers' PyNative trainer imports and no index has for a CPU.

What one device needs of it is there: any module, classes without content, a platform, and what gives MindSpore's tensors
``backward`` and ``grad`` over MindSpore's own C entry points. Nothing here distributes anything.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, _c_expression

__all__ = ["install"]

#: Older versions also import what measures translations, which no training needs.
_NAMES = ("hyper_parallel", "nltk")


class DTensor(Tensor):
    """Of one device: nothing is one."""


class HSDPModule:
    """Of one device: nothing is one."""


class SkipDTensorDispatch:
    """Changes nothing, around a block or a function."""

    def __enter__(self) -> SkipDTensorDispatch:
        return self

    def __exit__(self, *_error: Any) -> None:
        return None

    def __call__(self, function: Any) -> Any:
        return function


class _Platform:
    """One device; what is called of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    return None


def _function_of_others(*_arguments: Any, **_keywords: Any) -> Any:
    raise NotImplementedError("the stand-in for hyper_parallel is for one device")


def _backward_compat(*_arguments: Any, **_keywords: Any) -> None:
    """Tensors get what they lack for a loop that calls ``loss.backward()``."""
    from mindspore.common.api import _pynative_executor

    def backward(
        self: Any, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        gradient = mindspore.ops.ones_like(self) if gradient is None else gradient
        if not isinstance(gradient, Tensor):
            gradient = Tensor(gradient, self.dtype)
        _c_expression.run_backward(
            (self,), (gradient,), retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
        )

    place = property(lambda self: self._grad, lambda self, value: setattr(self, "_grad", value))
    wanted = property(
        lambda self: self._requires_grad, lambda self, value: setattr(self, "_requires_grad", value)
    )
    given: dict[str, Any] = {
        "backward": backward,
        "grad": place,
        "is_leaf": property(lambda self: self._is_leaf),
        "detach": lambda self: _c_expression.pyboost_detach(self),  # noqa: PLW0108 (a builtin binds no self)
    }
    for name, value in given.items():
        if name not in vars(Tensor):
            setattr(Tensor, name, value)
    if "requires_grad" not in vars(Tensor):
        Tensor.requires_grad = wanted
    _pynative_executor.set_grad_flag(True)


_OWN: dict[str, Any] = {
    "DTensor": DTensor,
    "HSDPModule": HSDPModule,
    "SkipDTensorDispatch": SkipDTensorDispatch,
    "enable_mindspore_backward_compat": _backward_compat,
    "get_platform": _Platform,
    "parallelize_value_and_grad": _function_of_others,
}


class _Module(types.ModuleType):
    """Has every class that is asked for, empty, and every function, for others than us."""

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            return _OWN[name]
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if re.match(r"_?[A-Z]", name) and not name.isupper():
            made = type(name, (), {"__module__": self.__name__, "__init__": _nothing})
        else:
            made = _function_of_others
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in _NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install() -> Callable[[], None]:
    """From now on the package is there; returns what takes it away."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)
