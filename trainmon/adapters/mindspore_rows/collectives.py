"""Calls of MindSpore's communication functions: what goes in, and what is there when they are done.

Functions are replaced by wrappers while somebody listens, in every module that offers them; a wrapper that somebody
imported meanwhile does nothing but pass on afterwards. A call within a call is not counted. Asynchronous calls are read
when they are waited for. Operators inside a compiled graph are not calls.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from mindspore import Tensor
from mindspore.communication import GlobalComm

from trainmon.adapters.mindspore_rows.meter import Meter
from trainmon.adapters.rows_parts.call_sites import CallSites
from trainmon.adapters.rows_parts.kinds import AddCall, Failed, Say

__all__ = ["CollectiveHooks", "is_distributed"]

#: What msProbe covers, in the one module that it looks at.
_COVERED = (
    *(
        "all_reduce",
        "all_gather_into_tensor",
        "reduce",
        "reduce_scatter_tensor",
        "broadcast",
        "gather_into_tensor",
    ),
    *(
        "scatter_tensor",
        "all_to_all_single_with_output_shape",
        "all_to_all_with_output_shape",
        "send",
        "recv",
    ),
    *("isend", "irecv", "batch_isend_irecv"),
)
_MORE = (
    *(
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "all_to_all_single",
        "all_to_all_v_c",
    ),
    *("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven"),
)
_PLACES = (
    *(
        "mindspore.communication.comm_func",
        "mindspore.mint.distributed",
        "mindspore.mint.distributed.distributed",
    ),
    *("mindspore.ops.communication", "mindspore.ops.function.comm_func"),
)

_inside = threading.local()


def is_distributed() -> bool:
    """Whether communication is initialised by now."""
    return bool(GlobalComm.INITED)


class CollectiveHooks:
    """Wrappers of communication functions.

    Args:
        rank: for the tags.
        before: what goes in is wanted too.
        codelines, say: of :class:`CallSites`.
        as_msprobe: only the functions that msProbe covers.
    """

    def __init__(
        self,
        rank: int,
        meter: Meter,
        add: AddCall,
        failed: Failed,
        *,
        before: bool = False,
        codelines: Sequence[str] = (),
        say: Say | None = None,
        as_msprobe: bool = False,
    ) -> None:
        self._on = False
        self._rank, self._meter, self._add, self._failed = rank, meter, add, failed
        self._before = before
        self._names = _COVERED if as_msprobe else (*_COVERED, *_MORE)
        self._places = _PLACES[:1] if as_msprobe else _PLACES
        self._sites = CallSites(codelines, say, {__file__})
        self._count: Counter[str] = Counter()  # calls of the step
        self._waiting: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        modules = [importlib.import_module(place) for place in self._places if _is_there(place)]
        for name in self._names:
            wrappers: dict[int, Any] = {}
            for module in modules:
                original = vars(module).get(name)
                if callable(original):
                    wrapper = wrappers.setdefault(id(original), self._wrapped(name, original))
                    self._replace(module, name, wrapper)
        for kind in _handle_classes():
            self._replace(kind, "wait", self._wrapped_wait(kind.wait))

    def watched(self) -> str:
        """What is hooked, in words."""
        return "mindspore.communication"

    def arm(self, on: bool) -> None:
        """A step begins."""
        self._on = self._sites.arm() and on
        self._count.clear()
        self._waiting.clear()  # what nobody waits for in its step is let go

    def remove(self) -> None:
        """Idempotent. What others have put over a wrapper since stays."""
        self.arm(False)
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        before = vars(owner)[name]
        setattr(owner, name, replacement)

        def undo() -> None:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, before)

        self._undo.append(undo)

    # -- a call -----------------------------------------------------------------------------------------------------

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self._on or getattr(_inside, "call", False):
                return original(*arguments, **keywords)
            number = self._begin(name, arguments, keywords)
            _inside.call = True
            try:
                result = original(*arguments, **keywords)
            finally:
                _inside.call = False
            if number is not None:
                self._finish(name, number, arguments, keywords, result)
            return result

        return call

    def _begin(self, name: str, arguments: Sequence[Any], keywords: Any) -> int | None:
        """Which call of the operation it is in this step; None: it is none that is looked at."""
        try:
            if not self._sites.choose(name):
                return None
            number = self._count[name]
            self._count[name] += 1
            if self._before:
                self._take(name, "pre", number, _tensors([*arguments, *keywords.values()]))
            return number
        except Exception as error:
            self._failed(error)
            return None

    def _finish(self, name: str, number: int, arguments: Sequence[Any], keywords: Any, result: Any) -> None:
        try:
            # Functions return what is there afterwards, or have put it into their arguments.
            found = _tensors(result if isinstance(result, tuple) else [result])
            found = found or _tensors([*arguments, *keywords.values()])
            take = functools.partial(self._take, name, "post", number, found)
            handles = _handles(result)
            if handles:
                self._waiting[id(handles[-1])] = handles[-1], take
            else:
                take()
        except Exception as error:
            self._failed(error)

    def _take(self, name: str, when: str, number: int, values: list[list[Any]]) -> None:
        for at, tensors in enumerate(values):
            tag = f"{name}/rank{self._rank}/{when}_{number}_{at}"
            self._add(name, tag, when == "pre", self._meter.read(tensors))

    def _wrapped_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(handle: Any, *arguments: Any, **keywords: Any) -> Any:
            result = original(handle, *arguments, **keywords)
            _, done = self._waiting.pop(id(handle), (None, None))
            try:
                if done is not None and self._on:
                    done()
            except Exception as error:
                self._failed(error)
            return result

        return wait


def _is_there(place: str) -> bool:
    try:
        importlib.import_module(place)
    except ImportError:  # of another version
        return False
    return True


def _handle_classes() -> list[Any]:
    found: dict[int, Any] = {}
    modules: list[ModuleType] = [sys.modules[place] for place in _PLACES if place in sys.modules]
    for module in modules:
        for name in ("CommHandle", "CommHandle_"):
            kind = vars(module).get(name)
            if isinstance(kind, type) and "wait" in vars(kind):
                found[id(kind)] = kind
    return list(found.values())


def _handles(result: Any) -> list[Any]:
    """Those that somebody is going to wait for."""
    kinds = tuple(_handle_classes())
    values = result if isinstance(result, list | tuple) else [result]
    return [one for one in values if isinstance(one, kinds)]


def _tensors(values: Sequence[Any]) -> list[list[Any]]:
    """Those of each argument that is a tensor or a list with any; of batched operations theirs."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append([value])
        elif isinstance(value, list | tuple):
            tensors = [
                one for one in (getattr(each, "tensor", each) for each in value) if isinstance(one, Tensor)
            ]
            if tensors:
                found.append(tensors)
    return found
