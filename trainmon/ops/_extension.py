"""The compiled extension, or an ImportError that says what to do; and the type of what it reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

try:
    import trainmon._core as _core
except ModuleNotFoundError as error:
    if error.name != "trainmon._core":
        raise
    raise ImportError(
        "trainmon's compiled extension is missing: build it with `pip install .`"
        " or, in a source tree, `make build`"
    ) from error

# One array: NumPy, DLPack, a buffer, or (buffer, dtype name). No static type says that.
Array: TypeAlias = Any
Tensors: TypeAlias = Array | Iterable[Array]

__all__ = ["Array", "Tensors", "_core", "names_tuple"]


def names_tuple(names: Iterable[str] | str | None) -> tuple[str, ...] | None:
    """Names as the extension takes them; one name may stand for a list of one."""
    if names is None:
        return None
    result = (names,) if isinstance(names, str) else tuple(names)
    for position, name in enumerate(result):
        if not isinstance(name, str):
            raise TypeError(f"names[{position}] must be a str, not {type(name).__name__}")
    return result
