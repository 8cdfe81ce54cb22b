"""The bridge: hands each step's numbers to any object with ``log(dict, step)``, trackers of experiments above all.

They are plain Python floats by series name, in the run's tag style; null is left out; a table of per-tensor values is its
quantiles. NaN and infinities are handed over as they are.

The object is driven by a writer thread of its own, so that a tracker that is slow or hangs holds up neither the training
nor the files; what it can't take is dropped and counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainmon.frame import Snapshot
from trainmon.sinks.base import Cadence, Message, RunInfo, ordered, quantiles, table_tag, tag

__all__ = ["TRACKERS", "BridgeSink", "find_target"]


class BridgeSink:
    """Calls ``target.log(values, step=step)``.

    Args:
        target: an object with ``log``, or the name of a tracker (:data:`TRACKERS`): its active run is taken; if there is
            none, one is begun by :meth:`open` and finished by :meth:`close`.
        every: shows the first step and every multiple of this.
        project: of a tracker's run that is begun here.
        online: whether such a run may talk to the tracker's server.

    Raises:
        ImportError: the tracker's package is not installed.
        TypeError: the object has no ``log``.
    """

    name = "bridge"

    def __init__(
        self, target: Any, *, every: int = 1, project: str = "trainmon", online: bool = False
    ) -> None:
        self._cadence = Cadence(every)
        self._project, self._online = project, online
        self._begin: Callable[[RunInfo, str, bool], Any] | None = None
        self._target: Any = target
        self._finish = False
        if isinstance(target, str):
            active, self._begin = TRACKERS[target]
            if importlib.util.find_spec(target) is None:
                raise ImportError(f"the bridge to {target} needs the package: pip install {target}")
            # Looked for here, in the thread that began it: a tracker may keep its run in a context variable.
            self._target = active() if target in sys.modules else None
        elif not callable(getattr(target, "log", None)):
            raise TypeError(
                f"expected an object with a method log(dict, step), found {type(target).__name__}"
            )

    def open(self, run: RunInfo) -> None:
        self._style = run.tag_style
        if self._target is None and self._begin is not None:
            self._target = self._begin(run, self._project, self._online)
            self._finish = True

    def write(self, snapshot: Snapshot) -> None:
        if not self._cadence.due(snapshot.step):
            return
        values = {
            tag(name, self._style): float(value)
            for name, value in snapshot.scalars.items()
            if value is not None
        }
        for table in snapshot.tables:
            base = table_tag(table, self._style)
            for label, index in quantiles(ordered(table)).items():
                values[f"{base}/{label}"] = float(table.values[index])
        if not values:
            return
        try:
            self._target.log(values, step=snapshot.step)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            # Of the object's own making: it must not end the writer thread.
            raise RuntimeError(f"log() raised {type(error).__name__}: {error}") from error

    def message(self, message: Message) -> None:
        """Messages go to the log and to ``events.jsonl``."""

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        if self._finish:
            self._finish = False
            self._target.finish()


def find_target(path: str) -> Any:
    """The object that ``package.module:name`` names; a class, or a function without ``log``, is called to make it.

    Raises:
        ImportError: there is no such module, or no such name in it.
        TypeError: what it names has no ``log``.
    """
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ImportError(str(error)) from error
    if isinstance(found, type) or not callable(getattr(found, "log", None)):
        found = found() if callable(found) else found
    if not callable(getattr(found, "log", None)):
        raise TypeError(f"{path} has no method log(dict, step)")
    return found


def _wandb_active() -> Any:
    return getattr(sys.modules["wandb"], "run", None)


def _wandb_begin(run: RunInfo, project: str, online: bool) -> Any:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    mode = "online" if online else "offline"
    return wandb.init(project=project, name=run.name, dir=_directory(run), mode=mode)


def _swanlab_active() -> Any:
    swanlab = sys.modules["swanlab"]
    try:
        return swanlab.get_run()
    except Exception:  # raised, or None, where there is no run, by version
        return None


def _swanlab_begin(run: RunInfo, project: str, online: bool) -> Any:
    import swanlab  # type: ignore[import-not-found, unused-ignore]

    where = {} if run.directory is None else {"logdir": str(run.directory / "swanlab")}
    mode = "online" if online else "offline"
    return swanlab.init(project=project, experiment_name=run.name, mode=mode, **where)


def _trackio_active() -> Any:
    return importlib.import_module("trackio.context_vars").current_run.get()


def _trackio_begin(run: RunInfo, project: str, online: bool) -> Any:
    import trackio  # type: ignore[import-not-found, unused-ignore]

    return trackio.init(project=project, name=run.name, resume="allow", embed=False)


def _directory(run: RunInfo) -> str | None:
    directory: Path | None = run.directory
    return None if directory is None else str(directory)


#: Trackers by name: how to find their active run, and how to begin one.
TRACKERS: dict[str, tuple[Callable[[], Any], Callable[[RunInfo, str, bool], Any]]] = {
    "swanlab": (_swanlab_active, _swanlab_begin),
    "trackio": (_trackio_active, _trackio_begin),
    "wandb": (_wandb_active, _wandb_begin),
}
