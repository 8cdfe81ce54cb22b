"""Methods of a trainer that are replaced on the instance, where it has no hook, and put back.

The stand-in looks the original up when it is called and holds the trainer weakly, so that neither lives longer for it;
but for a method that may be the last thing that is asked of a trainer, as in ``Trainer(args).train()``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Seams"]

Around = Callable[[Callable[[], Any]], Any]


class Seams:
    """What was replaced on an object.

    Args:
        owner: the object.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def around(self, name: str, what: Around, *, keeps: bool = False) -> bool:
        """Calls of the method ``name`` go through ``what``, which is given a call of the original and returns what the
        caller gets; with ``keeps`` the owner lives until :meth:`undo`. False: there is no such method."""
        owner = self._owner()
        if owner is None or name in self._replaced:
            return False
        before = vars(owner).get(name)  # None: the class's
        method_of_class = getattr(type(owner), name, None)
        held: Callable[[], Any] = (lambda: owner) if keeps else self._owner
        if not callable(before or method_of_class):
            return False

        @functools.wraps(before or method_of_class)  # type: ignore[arg-type]
        def stand_in(*arguments: Any, **keywords: Any) -> Any:
            def original() -> Any:
                method = before if before is not None else getattr(type(held()), name).__get__(held())
                return method(*arguments, **keywords)

            return what(original)

        self._replaced[name] = before, stand_in
        setattr(owner, name, stand_in)
        return True

    def undo(self) -> None:
        """Puts the originals back; what somebody else has put over ours stays, and passes through. Idempotent."""
        owner = self._owner()
        while self._replaced:
            name, (before, stand_in) = self._replaced.popitem()
            if owner is None or vars(owner).get(name) is not stand_in:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
