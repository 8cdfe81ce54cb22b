"""A group over torch.distributed: gloo on the host, apart from the groups that train.

A group of its own, so that its collectives can neither wait for nor be mixed up with those of the model, whatever
backend these use; and float64, which no accelerator's collectives need to know.
"""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from trainmon.dist.base import Floats, Gathering, Lost, Merging

__all__ = ["TorchGroup"]


class TorchGroup:
    """All ranks of torch.distributed's default group. To be made on all of them, at the same point of the program.

    Args:
        timeout: seconds that a collective may take before the group counts as lost.

    Raises:
        RuntimeError: torch.distributed has not been initialised.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        if not distributed.is_initialized():
            raise RuntimeError("torch.distributed has no process group yet: call init_process_group first")
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.lost: str | None = None
        self._timeout = datetime.timedelta(seconds=timeout)
        self._group: Any = distributed.new_group(backend="gloo", timeout=self._timeout)

    def merge(self, sums: Floats, maxima: Floats) -> Merging:
        # gloo's maximum keeps or drops a NaN by the order of the ranks: NaNs travel beside the sums, as counts.
        undefined = np.isnan(maxima)
        added = torch.from_numpy(np.concatenate([sums, undefined]))
        largest = torch.from_numpy(np.where(undefined, -np.inf, maxima))
        work = [
            self._start(distributed.all_reduce, added, op=distributed.ReduceOp.SUM),
            self._start(distributed.all_reduce, largest, op=distributed.ReduceOp.MAX),
        ]
        return _TorchMerging(self, work, added, largest)

    def gather(self, values: Floats) -> Gathering:
        mine = torch.from_numpy(np.array(values, np.float64))
        rows = torch.empty((self.size, len(values)), dtype=torch.float64)
        return _TorchGathering(self, self._start(distributed.all_gather, list(rows.unbind()), mine), rows)

    def exchange(self, message: bytes) -> list[bytes]:
        lengths = self.gather(np.array([float(len(message))])).wait()[:, 0].astype(np.int64)
        padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = torch.empty((self.size, padded.size), dtype=torch.uint8)
        self.finish(self._start(distributed.all_gather, list(rows.unbind()), torch.from_numpy(padded)))
        return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths.tolist(), strict=True)]

    def close(self) -> None:
        group, self._group = self._group, None
        if self.lost is None:
            self.lost = "the group was closed"
            if group is not None and distributed.is_initialized():
                distributed.destroy_process_group(group)

    def finish(self, work: Any) -> None:
        """Waits for a collective; the timeout counts from now."""
        if self.lost is not None:
            raise Lost(self.lost)
        try:
            done = work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lose(error) from error
        if done is False:
            raise self._lose(RuntimeError(f"no answer within {self._timeout.total_seconds():g} s"))

    def _start(self, collective: Any, *tensors: Any, **options: Any) -> Any:
        if self.lost is not None:
            raise Lost(self.lost)
        try:
            return collective(*tensors, group=self._group, async_op=True, **options)
        except RuntimeError as error:
            raise self._lose(error) from error

    def _lose(self, error: RuntimeError) -> Lost:
        text = str(error).strip().splitlines()
        self.lost = f"rank {self.rank} can't reach the others: {text[0] if text else type(error).__name__}"
        return Lost(self.lost)


class _TorchGathering:
    def __init__(self, group: TorchGroup, work: Any, rows: torch.Tensor) -> None:
        self._group, self._work, self._rows = group, work, rows

    def wait(self) -> Floats:
        self._group.finish(self._work)
        rows: Floats = self._rows.numpy()
        return rows


class _TorchMerging:
    def __init__(self, group: TorchGroup, work: list[Any], added: torch.Tensor, largest: torch.Tensor) -> None:
        self._group, self._work, self._added, self._largest = group, work, added, largest

    def wait(self) -> tuple[Floats, Floats]:
        for one in self._work:
            self._group.finish(one)
        added, maxima = self._added.numpy(), self._largest.numpy()
        sums = added[: added.size - maxima.size]
        return sums, np.where(added[sums.size :] > 0, np.nan, maxima)
