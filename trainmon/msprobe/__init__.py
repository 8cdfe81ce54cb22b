"""A drop-in for msProbe's Monitor V2: the same class, calls, configuration, files and columns, over trainmon's engine.

``from trainmon.msprobe import TrainerMonitorV2`` in place of msProbe's import is all that changes in a script;
:func:`install` makes the old import line itself work where msProbe is not installed. See docs/from-msprobe.md.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from trainmon.msprobe.anomalies import analyse_anomalies as analyse_anomalies
    from trainmon.msprobe.converting import csv2tensorboard_by_step as csv2tensorboard_by_step
    from trainmon.msprobe.database import data2db as data2db
    from trainmon.msprobe.reading import read as read
    from trainmon.msprobe.trainer import TrainerMonitorV2 as TrainerMonitorV2

__all__ = ["TrainerMonitorV2", "analyse_anomalies", "csv2tensorboard_by_step", "data2db", "install", "read"]

#: What is imported once it is used, from where.
_LAZY = {
    "TrainerMonitorV2": "trainer",
    "analyse_anomalies": "anomalies",
    "csv2tensorboard_by_step": "converting",
    "data2db": "database",
    "read": "reading",
}

_PATHS = ("msprobe", "msprobe.core", "msprobe.core.monitor_v2", "msprobe.core.monitor_v2.trainer")


def install(*, force: bool = False) -> bool:
    """Makes ``from msprobe.core.monitor_v2.trainer import TrainerMonitorV2`` give trainmon's.

    Args:
        force: also where msProbe is installed; without it nothing is done then.

    Returns:
        Whether the import now gives trainmon's.
    """
    import importlib.util
    import sys
    import types

    from trainmon.msprobe.trainer import TrainerMonitorV2

    there = sys.modules.get(_PATHS[-1])
    if there is not None and getattr(there, "TrainerMonitorV2", None) is TrainerMonitorV2:
        return True
    if not force and ("msprobe" in sys.modules or importlib.util.find_spec("msprobe") is not None):
        return False
    parent = None
    for path in _PATHS:
        module = sys.modules.get(path)
        if module is None:
            module = types.ModuleType(
                path, "Stands for msProbe's module of this name; made by trainmon.msprobe."
            )
            module.__path__ = []  # packages, as the real ones
            sys.modules[path] = module
            if parent is not None:
                setattr(parent, path.rpartition(".")[2], module)
        parent = module
    for path in _PATHS[2:]:
        sys.modules[path].TrainerMonitorV2 = TrainerMonitorV2  # type: ignore[attr-defined]
    return True


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trainmon.msprobe' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(f"trainmon.msprobe.{_LAZY[name]}"), name)
    globals()[name] = found
    return found
