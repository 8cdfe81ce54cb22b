"""Calls of torch.distributed: what goes in, and what is there when they are done.

Functions are replaced by wrappers while somebody listens, in ``torch.distributed`` and where it defines them; a wrapper
that somebody imported meanwhile does nothing but pass on afterwards. ``isend`` and ``irecv`` stay themselves where they
are defined, because torch tells them apart by identity there, and ``P2POp`` is given the originals.

A call within a call is not counted: ``send`` is no ``isend`` beside. Asynchronous calls are read when they are waited
for, those that a manager collects when it has issued them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import distributed_c10d

from trainmon.adapters.rows_parts.call_sites import CallSites
from trainmon.adapters.rows_parts.kinds import AddCall, Failed, Say
from trainmon.adapters.torch_rows.communication import (
    BY_IDENTITY,
    COVERED,
    FUNCTIONAL,
    METHODS,
    MORE,
    WITHIN,
    functional,
    key_of,
    tensors_of,
    unwrapped,
    works_of,
)
from trainmon.adapters.torch_rows.meter import Meter

__all__ = ["CollectiveHooks", "is_distributed"]

_inside = threading.local()


def is_distributed() -> bool:
    """Whether there is a process group by now."""
    return distributed.is_available() and distributed.is_initialized()


class CollectiveHooks:
    """Wrappers of the functions of torch.distributed.

    Args:
        rank: for the tags.
        before: what goes in is wanted too.
        codelines, say: of :class:`CallSites`.
        as_msprobe: calls within calls count too, and what torch made of a received tensor only of rank 0's.

    Attributes:
        on: whether this step is looked at.
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
        self.on = False
        self._rank, self._meter, self._add, self._failed = rank, meter, add, failed
        self._before, self._as_msprobe = before, as_msprobe
        self._sites = CallSites(codelines, say, {__file__})
        self._waiting: dict[int, tuple[Any, list[Callable[[], None]]]] = {}
        self._waiting_longer: dict[int, tuple[Any, list[Callable[[], None]]]] = {}  # since the step before
        self._coalesced: list[Callable[[], None]] = []  # calls that a manager has not issued yet
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        for name in COVERED if self._as_msprobe else (*COVERED, *MORE):
            original = getattr(distributed_c10d, name, None)
            if original is not None:
                self._replace_in_both(name, original, self._wrapped(name, original))
        manager = distributed_c10d._coalescing_manager
        self._replace_in_both("_coalescing_manager", manager, self._wrapped_manager(manager))
        if not self._as_msprobe:
            self._replace_more()
        self._replace(distributed_c10d.Work, "wait", self._wrapped_wait(distributed_c10d.Work.wait))
        for name in ("__new__", "__init__"):
            self._replace(distributed_c10d.P2POp, name, _unwrapping(getattr(distributed_c10d.P2POp, name)))

    def _replace_in_both(self, name: str, original: Any, wrapper: Any) -> None:
        for module in (distributed, distributed_c10d):
            keeps_identity = name in BY_IDENTITY and module is distributed_c10d
            if getattr(module, name, None) is original and not keeps_identity:
                self._replace(module, name, wrapper)

    def _replace_more(self) -> None:
        for method, name in METHODS.items():
            original = vars(distributed_c10d.ProcessGroup).get(method)
            if original is not None:
                self._replace(distributed_c10d.ProcessGroup, method, self._wrapped(name, original))
        module = functional()
        for name in FUNCTIONAL if module is not None else ():
            original = getattr(module, name, None)
            if original is not None:
                self._replace(module, name, self._wrapped(f"functional.{name}", original))
        if module is not None:
            self._replace(module, "wait_tensor", self._wrapped_wait(module.wait_tensor))

    def watched(self) -> str:
        """What is hooked, in words."""
        return "torch.distributed"

    def arm(self, on: bool) -> None:
        """A step begins."""
        self.on = self._sites.arm() and on
        # Works that nobody waits for, in their step or the next, are let go.
        self._waiting_longer = self._waiting if on else {}
        self._waiting = {}
        self._coalesced = []

    def remove(self) -> None:
        """Idempotent. What others have put over a wrapper since stays."""
        self.arm(False)
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        before = vars(owner)[name]
        setattr(owner, name, replacement)

        def undo() -> None:
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, before)

        self._undo.append(undo)

    # -- a call -----------------------------------------------------------------------------------------------------

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self.on or getattr(_inside, "call", False) or torch.compiler.is_compiling():
                return original(*arguments, **keywords)
            wanted = self._begin(name, arguments, keywords)
            _inside.call = True
            try:
                result = original(*arguments, **keywords)
            finally:
                _inside.call = False
            if wanted:
                self._finish(name, arguments, keywords, result)
            return result

        call.__dict__["_trainmon_original"] = original
        return call

    def _begin(self, name: str, arguments: Sequence[Any], keywords: Any) -> bool:
        try:
            if not self._sites.choose(name):
                return False
            if self._before:
                for operation, values in self._seen_as(name, arguments, keywords):
                    self._take(operation, values, True)
            return True
        except Exception as error:
            self._failed(error)
            return False

    def _finish(self, name: str, arguments: Sequence[Any], keywords: Any, result: Any) -> None:
        try:
            seen = list(self._seen_as(name, arguments, keywords))
            for operation, values in reversed(seen):  # what is within is done first
                works = works_of(result) if operation == name else []
                if self._as_msprobe and operation == name == "recv" and result:
                    continue  # taken for something to wait for
                if name.startswith("functional."):
                    values = unwrapped(result)
                take = functools.partial(self._take, operation, values, False)
                if distributed_c10d._world.pg_coalesce_state and not works:
                    self._coalesced.append(take)
                else:
                    self._when_done(works, take)
        except Exception as error:
            self._failed(error)

    def _seen_as(
        self, name: str, arguments: Sequence[Any], keywords: Any
    ) -> Iterable[tuple[str, list[list[torch.Tensor]]]]:
        """The operations that a call counts as, with the tensors of each argument that has any."""
        yield name, tensors_of(arguments, keywords)
        if not self._as_msprobe:
            return
        if name in WITHIN:
            yield WITHIN[name], tensors_of(arguments, keywords)
        elif name == "batch_isend_irecv":
            for one in next(iter((*arguments, *keywords.values())), ()):
                yield one.op.__name__, [[one.tensor]]

    def _take(self, operation: str, values: list[list[torch.Tensor]], before: bool) -> None:
        for at, tensors in enumerate(values):
            tag = f"{operation}/rank{self._rank}/{'pre' if before else 'post'}_{at}"
            self._add(operation, tag, before, self._meter.read(tensors))

    def _when_done(self, works: list[Any], take: Callable[[], None]) -> None:
        if not works:
            take()
            return
        open_works = {key_of(work) for work in works}

        def done(key: int) -> None:
            open_works.discard(key)
            if not open_works and self.on:
                take()

        for work in works:
            waiting = self._waiting.setdefault(key_of(work), (work, []))
            waiting[1].append(functools.partial(done, key_of(work)))

    def _wrapped_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
            result = original(work, *arguments, **keywords)
            if not (self._waiting or self._waiting_longer):
                return result
            try:
                key = key_of(getattr(work, "elem", work))
                waited = self._waiting.pop(key, None) or self._waiting_longer.pop(key, None)
                for done in () if waited is None else waited[1]:
                    done()
            except Exception as error:
                self._failed(error)
            return result

        return wait

    def _wrapped_manager(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Calls inside it are issued when it ends."""

        @contextlib.contextmanager
        @functools.wraps(original)
        def manager(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            within = original(*arguments, **keywords)
            together = within.__enter__()
            try:
                yield together
            except BaseException:
                self._coalesced = []
                if not within.__exit__(*sys.exc_info()):
                    raise
                return
            inside, _inside.call = getattr(_inside, "call", False), True
            try:
                within.__exit__(None, None, None)
            finally:
                _inside.call = inside
            calls, self._coalesced = self._coalesced, []
            try:
                self._when_done(list(together.works), functools.partial(_all, calls))
            except Exception as error:
                self._failed(error)

        return manager


def _all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _unwrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``P2POp`` that is given torch's own functions, whatever stands for them now."""

    @functools.wraps(original)
    def method(first: Any, op: Any, *arguments: Any, **keywords: Any) -> Any:
        return original(first, getattr(op, "_trainmon_original", op), *arguments, **keywords)

    return method
