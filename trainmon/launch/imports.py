"""Something is done to each module of a package right after it was imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

__all__ = ["AfterImport"]


class AfterImport:
    """Calls `then(module)` for every module that `wanted(name)` says yes to: those here already, and those to come.

    Modules are found and loaded as ever; only the loader is stood in for while a module runs.
    """

    def __init__(self, wanted: Callable[[str], bool], then: Callable[[ModuleType], None]) -> None:
        self._wanted, self._then = wanted, then

    def install(self) -> None:
        sys.meta_path.insert(0, self)
        for name, module in list(sys.modules.items()):
            if self._wanted(name) and hasattr(module, "__dict__"):
                self._then(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._wanted(name):
            return None
        for finder in tuple(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = cast(Any, _Loader(spec.loader, self._then))
                return spec
        return None


class _Loader:
    """A loader that does something more at the end; all else it leaves to the one it stands in for."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
