"""A script or module is run as the main program, the way `python` runs it."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["missing", "run_module", "run_script"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def missing(script: str | None, module: str | None) -> str | None:
    """Why a script or module can't be started; None if it can."""
    if module is not None:
        _put_first(os.getcwd())
        try:
            _module(module)
        except (ImportError, ValueError, AttributeError) as error:
            return f"can't run the module {module}: {error}"
        return None
    assert script is not None
    if os.path.exists(script):
        inside = _importer(os.path.join(os.getcwd(), script))
        if inside is None or inside.find_spec("__main__") is not None:
            return None
        return f"{script} is a directory or archive without __main__.py"
    hint = ""
    if os.sep not in script and shutil.which(script):
        hint = f"; a launcher goes to the front: {script} ... -m trainmon.launch -- train.py ..."
    elif importlib.util.find_spec(script.partition(".")[0]) if script.isidentifier() else False:
        hint = f"; for a module write -m {script}"
    return f"can't find the script {script}{hint}"


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file, or the ``__main__`` of a directory or archive; returns or raises as it does."""
    sys.argv[:] = [script, *arguments]
    file = os.path.join(os.getcwd(), script)
    inside = _importer(file)
    if inside is not None:
        spec = inside.find_spec("__main__")
        assert spec is not None
        _put_first(file)
        _run(_code_of(spec), __spec__=spec, __loader__=spec.loader, __package__="", __file__=spec.origin)
    else:
        _put_first(os.path.dirname(os.path.realpath(script)))
        loader = importlib.machinery.SourceFileLoader("__main__", file)
        _run(lambda: _code(file), __loader__=loader, __file__=file)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Runs a module, or the ``__main__`` of a package; returns or raises as it does."""
    spec = _module(module)
    sys.argv[:] = [spec.origin or module, *arguments]
    parent = spec.parent
    _run(_code_of(spec), __spec__=spec, __loader__=spec.loader, __package__=parent, __file__=spec.origin)


def _importer(path: str) -> Any:
    """What finds modules in a directory or archive; None for a file."""
    importer = pkgutil.get_importer(path)
    return importer if hasattr(importer, "find_spec") else None


def _module(module: str) -> ModuleSpec:
    """The module that `-m` means.

    Raises:
        ImportError: there is none, or it can't be run.
    """
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ImportError(f"no module named {module!r}")
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
        if spec is None:
            raise ImportError(f"{module!r} is a package without __main__")
    if not hasattr(spec.loader, "get_code"):
        raise ImportError(f"{module!r} has no code that could be run")
    return spec


def _code_of(spec: ModuleSpec) -> Callable[[], CodeType]:
    loader: Any = spec.loader
    return lambda: loader.get_code(spec.name)


def _code(file: str) -> CodeType:
    with io.open_code(file) as stream:
        code = pkgutil.read_code(stream)  # what is compiled already
    if isinstance(code, CodeType):
        return code
    with io.open_code(file) as stream:
        return compile(stream.read(), file, "exec", dont_inherit=True)


def _run(code: Callable[[], CodeType], **names: Any) -> None:
    """Runs code as the main module, which stays: threads, exit handlers and worker processes look there later, too."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __cached__=None, __annotations__={})
    vars(main).update(names)
    sys.modules["__main__"] = main
    with _shown():
        exec(code(), vars(main))


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


class _shown:
    """What the script raises is shown without the frames of trainmon that it only passed through."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        before = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            trace = _without_ours(trace)
            before(kind, error.with_traceback(trace), trace)

        sys.excepthook = show


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [one.tb_frame.f_code.co_filename for one in frames]
    first = 1 + max((i for i, file in enumerate(files) if file == __file__), default=-1)
    origin = max((i for i, file in enumerate(files) if not file.startswith(_PACKAGE)), default=-1)
    kept = [
        one
        for i, (one, file) in enumerate(zip(frames, files, strict=True))
        if i >= first and (i > origin or not file.startswith(_PACKAGE))
    ]
    for index, one in enumerate(kept):
        one.tb_next = kept[index + 1] if index + 1 < len(kept) else None
    return kept[0] if kept else None
