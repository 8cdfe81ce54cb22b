"""What every adapter shares: wrapper prefixes of names, its own place among the ranks, what a user may ask of a run."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from trainmon.events import Layout
from trainmon.monitor import TrainMonitor
from trainmon.summary import Summary

__all__ = [
    "Watched",
    "current_rank",
    "layout_from_environment",
    "plain_name",
    "replace_step",
]

_WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_ckpt_wrapped_module.",  # HyperParallel: recomputation
    "_swap_wrapped_module.",  # HyperParallel: activations swapped to the host
)


def plain_name(name: str) -> str:
    """A parameter's name without what DDP, torch.compile, FSDP and checkpoint wrappers put into it.

    ``module.`` is a wrapper's only at the front; a model may have a child of that name.
    """
    for wrapper in _WRAPPERS[1:]:
        name = name.replace(wrapper, "")
    return name.removeprefix(_WRAPPERS[0])


def layout_from_environment() -> Layout:
    """Rank and world size as launchers set them (``RANK``, ``WORLD_SIZE``); a single rank otherwise."""
    try:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return Layout()
    return Layout(rank, world) if 0 <= rank < world else Layout()


def current_rank() -> int:
    """This process's rank as far as it is known by now: of torch.distributed or mindspore.communication once that is
    initialised, else of the launcher; imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    communication = sys.modules.get("mindspore.communication")
    if communication is not None and communication.GlobalComm.INITED:
        return int(communication.get_rank())
    try:
        return max(0, int(os.environ.get("RANK") or os.environ.get("RANK_ID") or "0"))
    except ValueError:
        return 0


def replace_step(optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Puts a bound method in place of an optimizer's ``step``, for those that have no hooks.

    Args:
        before, after: called around a step; ``after`` only if it did not raise.

    Returns:
        Undoes it, unless ``step`` has been replaced once more meanwhile: that one goes on through ours, whose ``before``
        and ``after`` have to do nothing by then.
    """
    original, own = optimizer.step, "step" in vars(optimizer)

    @functools.wraps(getattr(original, "__func__", original))
    def step(_self: Any, *arguments: Any, **keywords: Any) -> Any:
        before()
        result = original(*arguments, **keywords)
        after()
        return result

    method = types.MethodType(step, optimizer)
    optimizer.step = method

    def undo() -> None:
        if vars(optimizer).get("step") is not method:
            return
        if own:
            optimizer.step = original
        else:
            del optimizer.step

    return undo


class Watched:
    """A run that is watched: what every host's user may ask of it."""

    monitor: TrainMonitor

    def summary(self) -> Summary:
        """What was seen so far."""
        return self.monitor.summary()

    def print_summary(self) -> None:
        """Prints the summary table."""
        self.monitor.print_summary()

    def state_dict(self) -> dict[str, Any]:
        """What rules have learnt and probes remember, as plain data: for the checkpoint; the same on every rank."""
        return self.monitor.state_dict()

    def save_state(self, path: str | os.PathLike[str]) -> bool:
        """Writes :meth:`state_dict` to a file of its own, beside the checkpoint; its directory is made.

        A reader sees the old file or the new one, whenever the process is killed. Rank 0 writes; the others may call it
        and do nothing.

        Returns:
            Whether it is written. If not, why is said, and training goes on.
        """
        return self.monitor.save_state(path)
