"""With what a training step is watched while its cost is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import trainmon
from benchmarks._loads import Load, NoMonitor
from trainmon.config.schema import TrainMonitorConfig

__all__ = ["ARMS", "Inside", "everything", "have_msprobe"]

PEERS = Path(__file__).resolve().parent.parent / "build" / "peers"


def everything() -> dict[str, Any]:
    """Every section that watches, at its own cadence, with a value for each parameter where there is one."""
    hints = get_type_hints(TrainMonitorConfig)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(TrainMonitorConfig):
        section = next((arm for arm in get_args(hints[field.name]) if dataclasses.is_dataclass(arm)), None)
        if section is None or field.name in ("overhead", "sinks", "window"):
            continue
        names = {each.name for each in dataclasses.fields(section)}  # type: ignore[arg-type]
        chosen[field.name] = {name: True for name in ("per_parameter", "micro", "clipped") if name in names}
    sinks = {"log": {"progress": False}, "jsonl": True, "csv": True, "tensorboard": True, "blackbox": True}
    return {**chosen, "overhead": False, "sinks": sinks}


class Inside:
    """A monitor, and the nanoseconds that the training thread has spent inside it so far."""

    def __init__(self, calls: Any, owner: Any = None) -> None:
        self.calls, self._owner = calls, owner

    @property
    def nanoseconds(self) -> int:
        return 0 if self._owner is None else int(self._owner.overhead_ns)


@contextlib.contextmanager
def _plain(load: Load, directory: str) -> Iterator[Inside]:
    yield Inside(NoMonitor())


def _trainmon(keys: dict[str, Any]) -> Any:
    @contextlib.contextmanager
    def watched(load: Load, directory: str) -> Iterator[Inside]:
        entry = {"output_dir": directory, "run_name": "run", **keys}
        with _quiet(), trainmon.attach(load.model, load.optimizer, config=entry) as mon:
            yield Inside(mon, mon)

    return watched


@contextlib.contextmanager
def _msprobe(load: Load, directory: str) -> Iterator[Inside]:
    """The real one, its four monitors as its documentation switches them on: every step, all parameters and modules."""
    from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

    monitors = {name: {"enabled": True} for name in ("module", "weight_grad", "optimizer", "param")}
    path = Path(directory) / "msprobe.json"
    path.write_text(json.dumps({"framework": "pytorch", "output_dir": directory, "monitors": monitors}))
    with _quiet():
        monitor = TrainerMonitorV2(str(path))
        monitor.start(model=load.model, optimizer=load.optimizer)
        try:
            yield Inside(NoMonitor())
        finally:
            monitor.stop()
            vars(load.optimizer).pop("step", None)  # what its stop leaves there calls nothing any more


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def have_msprobe() -> bool:
    """Whether msProbe can be used; `make bench` fetches it into build/peers."""
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    try:
        import msprobe.core.monitor_v2.trainer  # noqa: F401
    except ImportError:
        return False
    return True


ARMS = {
    "plain": _plain,
    "trainmon, defaults": _trainmon({"overhead": False, "sinks": {"log": {"progress": False}}}),
    "trainmon, everything": _trainmon(everything()),
    "msProbe V2, four monitors": _msprobe,
}
