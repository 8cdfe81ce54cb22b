"""The torch backend: fused foreach operations on the tensors' own device, one packed read a step.

Sums of squares are accumulated in float64 where the device has it; elsewhere in float32 over at most 65,536 elements
each and finished in float64 on the host. The position of a non-finite element stays unknown (``first_bad`` is NaN):
finding it would need a second read while the gradient is alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trainmon.backend.base import ATTENTION_COLUMNS, Floats, Lazy
from trainmon.backend.host import prints
from trainmon.backend.ritz import largest_ritz_value
from trainmon.backend.torch_attention import product_sums, rows_given, score_sums
from trainmon.backend.torch_spectral import block_power
from trainmon.events import AdamStep
from trainmon.ops.attention import sampled_places

__all__ = ["TorchBackend"]

_CHUNK = 65_536
#: Magnitudes up to which a format's cast gives zero: half of its least subnormal number.
_FLUSH = {"fp16": 2.0**-25, "bf16": 2.0**-134, "e4m3fn": 2.0**-10, "e5m2": 2.0**-17}
#: What torch reduces itself; narrower formats are widened first.
_REDUCIBLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16}
    | {torch.int8, torch.uint8, torch.bool}
)
_FLOAT64_DEVICES = frozenset({"cpu", "cuda", "xpu"})


class TorchBackend:
    """Arithmetic on ``device``.

    Args:
        device: where the packed read is gathered; tensors of other devices are moved there number by number.
        float64: whether that device computes in float64; None: decided by its type.
    """

    name = "torch"
    deferred = True

    def __init__(self, device: torch.device | str, float64: bool | None = None) -> None:
        self.device = torch.device(device)
        self.float64 = self.device.type in _FLOAT64_DEVICES if float64 is None else float64
        self.reads = 0

    def summaries(self, tensors: Sequence[torch.Tensor]) -> Lazy:
        if not tensors:
            return Lazy((), lambda: np.zeros((0, 6)))
        with torch.no_grad():
            squares, finish_squares = self._square_sums(tensors)
            filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
            peaks = torch.stack([self._number(x) for x in torch._foreach_norm(filled, float("inf"))])
            kinds = [self._counts(tensor) for tensor in tensors]
        empty = np.array([tensor.numel() == 0 for tensor in tensors])

        def finish(squares_read: Floats, peaks_read: Floats, *counts: Floats) -> Floats:
            table = np.empty((len(counts), 6))
            table[:, 0] = finish_squares(squares_read)
            table[:, 1] = np.where(empty, np.nan, peaks_read)
            table[:, 2:5] = counts
            table[:, 5] = np.nan
            return table

        return Lazy((squares, peaks, *kinds), finish)

    def statistics(self, tensors: Sequence[torch.Tensor]) -> Lazy:
        if not tensors:
            return Lazy((), lambda: np.zeros((0, 6)))
        sizes = np.array([tensor.numel() for tensor in tensors], np.float64)
        wide = self._wide
        with torch.no_grad():
            filled = [one if one.numel() else one.new_zeros(1) for one in tensors]
            filled = [one if one.dtype in _REDUCIBLE else one.to(torch.float32) for one in filled]
            squares, finish = self._square_sums(
                [one if one.is_floating_point() else one.to(wide) for one in filled]
            )
            extremes = torch.stack([self._number(end) for one in filled for end in torch.aminmax(one)])
            sums = torch.stack([self._number(one.sum(dtype=wide)) for one in filled])
            nans = torch.stack([self._number(one.isnan().sum()) for one in filled])

        def table(
            squares_read: Floats, extremes_read: Floats, sums_read: Floats, nans_read: Floats
        ) -> Floats:
            ends = np.where(sizes[:, None] > 0, extremes_read.reshape(-1, 2), np.nan)
            with np.errstate(all="ignore"):
                mean = np.where(sizes > 0, sums_read / sizes, np.nan)
            return np.column_stack([sizes, ends, mean, np.sqrt(finish(squares_read)), nans_read])

        return Lazy((squares, extremes, sums, nans), table)

    def squares(self, tensors: Sequence[torch.Tensor], negatives: bool = False) -> Lazy:
        if not tensors:
            return Lazy((), lambda: np.zeros((0, 2)))
        with torch.no_grad():
            squares, finish = self._square_sums(tensors)
            below = torch.stack([self._number(_negative(t)) for t in tensors]) if negatives else None

        def table(squares_read: Floats, below_read: Floats | None = None) -> Floats:
            none = np.full(len(tensors), np.nan)
            return np.stack([finish(squares_read), none if below_read is None else below_read], axis=1)

        return Lazy((squares,) if below is None else (squares, below), table)

    def square_sum(self, tensors: Sequence[torch.Tensor]) -> Lazy:
        if not tensors:
            return Lazy((), lambda: np.zeros(1))
        with torch.no_grad():
            squares, finish_squares = self._square_sums(tensors)
        return Lazy((squares,), lambda values: np.array([np.sum(finish_squares(values))]))

    def bucket_sums(self, losses: torch.Tensor, weights: Any, buckets: Any, count: int) -> Lazy:
        wide = torch.float64 if self.float64 else torch.float32
        with torch.no_grad():
            each = losses.detach().to(self.device, wide).reshape(-1)
            ids = torch.as_tensor(buckets, device=self.device).broadcast_to(losses.shape).reshape(-1).long()
            inside = (ids >= 0) & (ids < count)
            if weights is None:
                weight = inside.to(wide)
            else:
                weight = torch.as_tensor(weights, device=self.device).reshape(-1).to(wide) * inside
            each = torch.where(weight > 0, each * weight, 0.0)
            ids = torch.where(inside, ids, 0)
            sums = torch.zeros((2, count), dtype=wide, device=self.device)
            sums[0].index_add_(0, ids, each)
            sums[1].index_add_(0, ids, weight)
        return Lazy((sums.reshape(-1),), lambda values: values.reshape(2, count).T)

    def flushed(self, tensors: Sequence[torch.Tensor], formats: Sequence[str]) -> Lazy:
        wide = torch.float64 if self.float64 else torch.float32
        table = torch.zeros((len(formats), 2), dtype=wide, device=self.device)
        with torch.no_grad():
            for piece in (piece for tensor in tensors for piece in _pieces(tensor.detach())):
                size = piece.abs()
                nonzero = ((size > 0) & size.isfinite()).sum()
                for row, name in enumerate(formats):
                    table[row, 0] += ((size > 0) & (size <= _FLUSH[name])).sum()
                    table[row, 1] += nonzero
        return Lazy((table.reshape(-1),), lambda values: values.reshape(len(formats), 2))

    def signs(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Lazy:
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            pairs = (zip(_pieces(a), _pieces(b), strict=True) for a, b in zip(tensors, others, strict=True))
            for one, other in (pair for some in pairs for pair in some):
                above, below = one > 0, one < 0
                others_above, others_below = other > 0, other < 0
                counts[0] += ((above & others_above) | (below & others_below)).sum().to(self.device)
                counts[1] += ((above & others_below) | (below & others_above)).sum().to(self.device)
        total = float(sum(tensor.numel() for tensor in tensors))
        return Lazy((counts,), lambda values: np.append(values, total))

    def fingerprints(self, tensors: Sequence[torch.Tensor]) -> Lazy:
        with torch.no_grad():
            copies = [tensor.detach().to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        event = None
        if self.device.type != "cpu":
            event = torch.Event(self.device)
            event.record()

        def finish() -> Floats:
            if event is not None:
                event.synchronize()
            return prints(copies)

        return Lazy((), finish)

    def keep(
        self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None] = ()
    ) -> list[torch.Tensor]:
        copies = list(into) if into else [None] * len(tensors)
        with torch.no_grad():
            kept = [
                copy
                if copy is not None and copy.shape == tensor.shape and copy.dtype == tensor.dtype
                else torch.empty_like(tensor)
                for tensor, copy in zip(tensors, copies, strict=True)
            ]
            if kept:
                torch._foreach_copy_(kept, list(tensors))
        return kept

    def differences(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], update: bool = False
    ) -> Lazy:
        counts = np.array([tensor.numel() for tensor in tensors], np.float64)
        pieces = [_pieces(tensor) for tensor in tensors]
        starts = _starts(pieces)
        halves = [piece for some in pieces for piece in some], [p for copy in copies for p in _pieces(copy)]
        handles: list[torch.Tensor] = []
        finishes: list[Any] = []
        with torch.no_grad():
            for now, before in _batches(*halves):
                wide = [_widened(tensor) for tensor in before]
                moved = torch._foreach_sub([_widened(tensor) for tensor in now], wide)
                for squares, finish in (self._square_sums(moved), self._square_sums(wide)):
                    handles.append(squares)
                    finishes.append(finish)
                same = [(_bits(a) == _bits(b)).sum() for a, b in zip(now, before, strict=True)]
                handles.append(torch.stack([self._number(count) for count in same]))
            if update and tensors:
                torch._foreach_copy_(list(copies), list(tensors))

        def table(*read: Floats) -> Floats:
            columns = [[np.zeros(0)], [np.zeros(0)], [np.zeros(0)]]
            for batch in range(len(read) // 3):
                for column in (0, 1):
                    columns[column].append(finishes[2 * batch + column](read[3 * batch + column]))
                columns[2].append(read[3 * batch + 2])
            sums = [np.concatenate(column) for column in columns]
            return np.stack(
                [*(np.add.reduceat(one, starts) if len(one) else one for one in sums), counts], axis=1
            )

        return Lazy(tuple(handles), table)

    def adam_squares(self, steps: Sequence[AdamStep], weights: Sequence[torch.Tensor]) -> Lazy:
        moves: list[torch.Tensor] = []
        owners: list[int] = []
        handles: list[torch.Tensor] = []
        finishes: list[Any] = []

        def flush() -> None:
            squares, finish = self._square_sums(moves)
            handles.append(squares)
            finishes.append(finish)
            moves.clear()

        with torch.no_grad():
            for row, (step, weight) in enumerate(zip(steps, weights, strict=True)):
                updates = step.step
                if not isinstance(updates, torch.Tensor) or updates.device.type == "cpu":
                    updates = float(updates)  # 1 - 0.999 in float32 has lost three digits
                elif self.float64:
                    updates = updates.double()
                one, two = (1 - beta**updates for beta in step.betas)
                for mean, square, before in zip(*map(_pieces, (step.mean, step.square, weight)), strict=True):
                    if moves and sum(move.numel() for move in moves) + mean.numel() > _BATCH:
                        flush()
                    move = (mean / one).div_((square / two).sqrt_().add_(step.eps))
                    moves.append(_widened(move.add_(before, alpha=step.decay).mul_(step.lr)))
                    owners.append(row)
            if moves:
                flush()

        def table(*read: Floats) -> Floats:
            values = [finish(one) for finish, one in zip(finishes, read, strict=True)]
            sums = np.zeros(len(steps))
            np.add.at(sums, np.array(owners, np.int64), np.concatenate([np.zeros(0), *values]))
            return sums

        return Lazy(tuple(handles), table)

    def spectra(
        self,
        matrices: Sequence[torch.Tensor],
        states: Sequence[Any | None],
        seeds: Sequence[int],
        tolerance: float,
        epsilon: float,
    ) -> tuple[Lazy, list[Any]]:
        with torch.no_grad():
            found = [block_power(*one) for one in zip(matrices, states, seeds, strict=True)]
        squares = self.squares(matrices)
        handles = [self._number(gram).reshape(-1) for grams, _ in found for gram in grams]

        def table(*read: Floats) -> Floats:
            f = squares.finish(*read[: len(squares.handles)])[:, 0]
            grams = read[len(squares.handles) :]
            lows = [largest_ritz_value(*grams[2 * row : 2 * row + 2]) for row in range(len(found))]
            result = np.stack([f, np.array(lows, np.float64), np.full(len(f), np.nan)], axis=1)
            result[f == 0] = 0.0
            return result

        return Lazy((*squares.handles, *handles), table), [state for _, state in found]

    def scalar(self, value: Any) -> Lazy:
        if isinstance(value, torch.Tensor) and value.device.type == self.device.type:
            # A copy: a captured graph writes the next loss to the same place.
            return Lazy((value.detach().reshape(1).clone(),), lambda values: values)
        number = np.array([float(value)])
        return Lazy((), lambda: number)

    def bincount(self, indices: torch.Tensor, count: int) -> Lazy:
        with torch.no_grad():
            ids = indices.detach().reshape(-1).long()  # int64: a sign is kept, what was beyond it becomes one
            ids = torch.where((ids >= 0) & (ids < count), ids, count)
            counts = torch.zeros(count + 1, dtype=torch.int64, device=ids.device)
            counts.scatter_add_(0, ids, torch.ones_like(ids))  # bincount would wait for the device
        return Lazy((counts,), lambda values: values)

    def common(self, before: torch.Tensor, after: torch.Tensor, count: int) -> Lazy:
        with torch.no_grad():
            ids, others = after.detach().long(), before.detach().to(after.device).long()
            inside = (ids >= 0) & (ids < count)
            kept = ((ids[..., None] == others[..., None, :]).any(-1) & inside).sum()
        total = float(ids.numel())
        return Lazy((kept.reshape(1),), lambda values: np.array([values[0], total]))

    def vector(self, value: Any) -> Lazy:
        if isinstance(value, torch.Tensor):
            return Lazy((value.detach().reshape(-1),), lambda values: values)
        numbers = np.asarray(value, np.float64).reshape(-1)
        return Lazy((), lambda: numbers)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        scale: float,
        causal: bool,
        q_start: int,
        mask: Any,
        sample_rows: int | None,
        seed: int,
    ) -> Lazy:
        with torch.no_grad():
            rows = self._places(q.shape[-2], sample_rows, seed, q.device)
            return _columns(product_sums(q, k, scale, rows, causal, q_start, mask, self._wide))

    def attention_scores(self, scores: torch.Tensor, *, sample_rows: int | None, seed: int) -> Lazy:
        with torch.no_grad():
            rows = self._places(scores.shape[-2], sample_rows, seed, scores.device)
            return _columns(score_sums(scores, rows, self._wide))

    def attention_rows(self, row_max: torch.Tensor, row_sum: torch.Tensor) -> Lazy:
        with torch.no_grad():
            return _columns(rows_given(row_max, row_sum, self._wide))

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.float64 else torch.float32

    @staticmethod
    def _places(count: int, wanted: int | None, seed: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(sampled_places(count, wanted or count, seed)).to(device)

    def read(self, lazies: Sequence[Lazy]) -> TorchRead:
        handles = [handle for lazy in lazies for handle in lazy.handles]
        if not handles:
            return TorchRead(lazies, None, None, [])
        self.reads += 1
        # Integers up to 2^24 and float32 pass through float32 unchanged; counts beyond that are rounded there.
        dtype = torch.float64 if self.float64 else torch.float32
        with torch.no_grad():
            packed = torch.cat([handle.reshape(-1).to(self.device, dtype) for handle in handles])
            event = None
            if self.device.type == "cpu":
                landed = packed
            else:
                landed = torch.empty_like(packed, device="cpu", pin_memory=self.device.type == "cuda")
                landed.copy_(packed, non_blocking=True)
                event = torch.Event(self.device)
                event.record()
        return TorchRead(lazies, landed, event, [handle.numel() for handle in handles])

    def _square_sums(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """One device vector, and how its values become a float64 sum of squares per tensor."""
        if self.float64:
            chunks, wide = [_pieces(tensor) for tensor in tensors], torch.float64
        else:
            chunks, wide = [_short_pieces(tensor) for tensor in tensors], torch.float32
        norms = torch._foreach_norm([chunk for pieces in chunks for chunk in pieces], 2, dtype=wide)
        starts = _starts(chunks)
        return torch.stack([self._number(x) for x in norms]), lambda v: np.add.reduceat(np.square(v), starts)

    def _number(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.device, torch.float64 if self.float64 else torch.float32)

    @staticmethod
    def _counts(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(3, device=tensor.device)
        counts = [
            torch.stack([piece.isnan().sum(), piece.isposinf().sum(), piece.isneginf().sum()])
            for piece in _pieces(tensor)
        ]
        return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)


#: Elements that temporaries have at a time: 16 MiB in float32, and never more than three such at once.
_BATCH = 1 << 22

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = Sequence[torch.Tensor]


def _pieces(tensor: torch.Tensor, most: int | None = None) -> list[torch.Tensor]:
    """The tensor in views of so many elements, itself where it has no more; tensors of one shape are cut alike."""
    count, most = tensor.numel(), _BATCH if most is None else most
    if count <= most:
        return [tensor]
    longest = max(range(tensor.ndim), key=lambda axis: tensor.shape[axis])
    return [piece for part in tensor.chunk(-(-count // most), longest) for piece in _pieces(part, most)]


def _short_pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views that are summed in float32."""
    if tensor.is_contiguous():
        return list(torch.split(tensor.reshape(-1), _CHUNK))
    return _pieces(tensor, _CHUNK)


def _starts(pieces: Sequence[Sequence[torch.Tensor]]) -> Any:
    """Where each tensor's pieces begin among all."""
    return np.cumsum([0, *(len(some) for some in pieces[:-1])])


def _negative(tensor: torch.Tensor) -> torch.Tensor:
    """How many elements are below zero."""
    counts = [(piece < 0).sum() for piece in _pieces(tensor)]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum()


def _batches(tensors: Tensors, copies: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
    start, size = 0, 0
    for index, tensor in enumerate(tensors):
        if size and size + tensor.numel() > _BATCH:
            yield tensors[start:index], copies[start:index]
            start, size = index, 0
        size += tensor.numel()
    if start < len(tensors):
        yield tensors[start:], copies[start:]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


class TorchRead:
    """One device-to-host copy, waited for when its values are asked for."""

    def __init__(
        self, lazies: Sequence[Lazy], landed: torch.Tensor | None, event: Any, sizes: Sequence[int]
    ) -> None:
        self._lazies, self._landed, self._event, self._sizes = lazies, landed, event, sizes

    def wait(self) -> list[Floats]:
        if self._event is not None:
            self._event.synchronize()
        columns: list[Floats] = []
        if self._landed is not None:
            values = self._landed.numpy().astype(np.float64)
            columns = np.split(values, np.cumsum(self._sizes)[:-1])
        results, at = [], 0
        for lazy in self._lazies:
            results.append(lazy.finish(*columns[at : at + len(lazy.handles)]))
            at += len(lazy.handles)
        return results


def _columns(sums: torch.Tensor) -> Lazy:
    return Lazy((sums.reshape(-1),), lambda values: values.reshape(len(ATTENTION_COLUMNS), -1))
