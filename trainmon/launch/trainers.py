"""Trainers of known hosts get the monitor when they are built."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from trainmon.config import ConfigError
from trainmon.config.load import Source
from trainmon.launch.hosts import Host
from trainmon.launch.imports import AfterImport

__all__ = ["Trainers"]


class Trainers:
    """Watches the trainers that a program builds, and attaches the monitor to one at a time.

    A trainer gets it when the constructor of its own class has returned: not a base class's, and not that of another
    trainer within. What can't be attached to by then (a trainer that is set up later) is tried again when it starts to
    train; if that fails, training doesn't start. Of several trainers the first one has it until its training is over, or
    another starts to train before it.

    Args:
        config: where the configuration stands.
        say: takes messages for the user.
        refuse: ends the program because the configuration asks for what this trainer can't do.

    Attributes:
        attached: trainers that have got the monitor.
        failed: why the last one that was built has none.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        config: Source,
        say: Callable[[str], None],
        refuse: Callable[[ConfigError], NoReturn],
    ) -> None:
        self._hosts, self._config, self._say, self._refuse = hosts, config, say, refuse
        self._inside = threading.local()
        self._watch = AfterImport(self._watched, self._imported)
        self._who: Callable[[], object] = lambda: None  # has the monitor
        self._state = "through"  # or attached, or training
        self._handle: Any = None
        self.attached = 0
        self.failed: Exception | None = None

    def install(self) -> None:
        self._watch.install()

    # -- finding the classes ----------------------------------------------------------------------------------------

    def _watched(self, module: str) -> bool:
        return any(host.owns(module) for host in self._hosts)

    def _imported(self, module: ModuleType) -> None:
        for host in self._hosts:
            if host.owns(module.__name__):
                for name in host.trainers:
                    found = vars(module).get(name)
                    if inspect.isclass(found):
                        self._wrap(found, host)

    def _wrap(self, cls: Any, host: Host) -> None:
        """Wraps the constructor and `train` that a class itself defines, and those of classes derived from it later."""
        own = vars(cls)
        if "_trainmon_watched" in own:
            return
        with contextlib.suppress(TypeError, AttributeError):  # a class that can't be changed
            cls._trainmon_watched = True
            inherits = "__init__" not in own and hasattr(cls.__init__, "_trainmon_watched")
            if cls.__init__ is not object.__init__ and not inherits:
                cls.__init__ = self._watching(cls.__init__, self._constructing, host)
            if inspect.isfunction(own.get("train")):
                cls.train = self._watching(own["train"], self._training, host)
            before = own.get("__init_subclass__")

            def __init_subclass__(derived: Any, /, **keywords: Any) -> None:
                if before is not None:
                    before.__get__(None, derived)(**keywords)
                else:
                    super(cls, derived).__init_subclass__(**keywords)
                self._wrap(derived, host)

            cls.__init_subclass__ = classmethod(__init_subclass__)

    def _watching(self, function: Any, around: Any, host: Host) -> Any:
        @functools.wraps(function)
        def watched(trainer: Any, /, *arguments: Any, **keywords: Any) -> Any:
            with around(trainer, host):
                return function(trainer, *arguments, **keywords)

        vars(watched)["_trainmon_watched"] = True
        return watched

    # -- what they do -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _constructing(self, trainer: Any, host: Host) -> Iterator[None]:
        with self._outermost("constructors") as outermost:
            yield
        if outermost and (self._state == "through" or self._who() is None):
            try:
                self._attach(trainer, host)
            except Exception as error:
                self.failed = error

    @contextlib.contextmanager
    def _training(self, trainer: Any, host: Host) -> Iterator[None]:
        with self._outermost("trainings") as outermost:
            if not outermost:
                yield
                return
            if not self._has_it(trainer, host):
                if self._state == "training":
                    self._say(
                        f"a second trainer, {type(trainer).__name__}, trains inside the first: it goes without"
                    )
                    yield
                    return
                self._attach(trainer, host)
            self._state = "training"
            try:
                yield
            except BaseException as error:
                with contextlib.suppress(AttributeError):  # an adapter that isn't told by its host
                    self._handle.exception(error)
                raise
            finally:
                self._state = "through"

    @contextlib.contextmanager
    def _outermost(self, kind: str) -> Iterator[bool]:
        """Whether no other call of this kind is under way in this thread."""
        depth = getattr(self._inside, kind, 0)
        setattr(self._inside, kind, depth + 1)
        try:
            yield depth == 0
        finally:
            setattr(self._inside, kind, depth)

    def _has_it(self, trainer: object, host: Host) -> bool:
        who = self._who()
        return who is not None and (who is trainer or getattr(who, host.inner, None) is trainer)

    def _attach(self, trainer: Any, host: Host) -> None:
        if self._handle is not None:
            self._handle.detach()
            self._handle = None
        try:
            self._handle = host.attacher()(trainer, self._config)
        except ConfigError as error:
            self._refuse(error)
        self._who, self._state, self.failed = _reference(trainer), "attached", None
        self.attached += 1


def _reference(trainer: Any) -> Callable[[], object]:
    try:
        return weakref.ref(trainer)
    except TypeError:
        return lambda: trainer
