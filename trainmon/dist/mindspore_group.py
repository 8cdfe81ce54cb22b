"""A group over ``mindspore.communication``: every merge is one gathering of bits, added up on the host in rank order.

What a CPU offers decides its form. AllReduce knows sums only, and no float64; AllGather turns float64 and int64 into
something else, and works in the group of all ranks alone, which trains too. int32 it leaves as it is: so float64 travel
as pairs of these, and all ranks come to the same bits. Calls wait: in PyNative and between two compiled steps every rank
makes them at the same point of its program, behind the same collectives of the model. How long one waits for a rank that is
gone is up to MindSpore (msrun ends the others).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from trainmon.dist.base import Floats, Gathering, Lost, Merging

__all__ = ["MindSporeGroup", "is_initialized"]


def is_initialized() -> bool:
    """Whether ``mindspore.communication.init`` was called."""
    return bool(GlobalComm.INITED)


class MindSporeGroup:
    """All ranks. To be made on all of them, at the same point of the program.

    Raises:
        RuntimeError: ``mindspore.communication.init`` has not been called.
    """

    def __init__(self) -> None:
        if not is_initialized():
            raise RuntimeError("there is no communication yet: call mindspore.communication.init() first")
        self.rank, self.size = int(get_rank()), int(get_group_size())
        self.lost: str | None = None
        self._collect: Any = ops.AllGather()

    def merge(self, sums: Floats, maxima: Floats) -> Merging:
        rows = self._gathered(np.concatenate([sums, maxima]))
        added = np.zeros(len(sums))
        for row in rows:
            added += row[: len(sums)]
        return _Known((added, rows[:, len(sums) :].max(axis=0, initial=-np.inf)))  # a maximum keeps NaN

    def gather(self, values: Floats) -> Gathering:
        return _Known(self._gathered(values))

    def exchange(self, message: bytes) -> list[bytes]:
        lengths = self._gathered(np.array([float(len(message))]))[:, 0].astype(np.int64)
        padded = np.zeros(-(-max(int(lengths.max()), 1) // 4) * 4, np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = self._words(padded.view(np.int32))
        return [row.tobytes()[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]

    def close(self) -> None:
        if self.lost is None:
            self.lost = "the group was closed"

    def _gathered(self, values: Floats) -> Floats:
        """Shape ``[size, len(values)]``."""
        if len(values) == 0:
            return np.zeros((self.size, 0))
        rows: Floats = self._words(np.ascontiguousarray(values, np.float64).view(np.int32)).view(np.float64)
        return rows

    def _words(self, words: Any) -> Any:
        if self.lost is not None:
            raise Lost(self.lost)
        try:
            gathered = self._collect(Tensor(words)).asnumpy()
        except RuntimeError as error:
            text = str(error).strip().splitlines()
            self.lost = f"rank {self.rank} can't reach the others: {text[0] if text else type(error).__name__}"
            raise Lost(self.lost) from error
        return np.array(gathered, np.int32).reshape(self.size, len(words))


class _Known:
    """What is there already."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result
