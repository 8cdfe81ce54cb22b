"""The backend protocol: arithmetic on lists of tensors where they live, and one packed read a step.

A primitive returns a :class:`Lazy`: numbers that may still be on a device. At the end of a step the engine hands all
of them to :meth:`Backend.read`, which starts at most one transfer; the engine waits for it in the next step, off the
critical path. Probes never branch on where tensors live. Primitives join the protocol with the probe that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmon.events import AdamStep
from trainmon.ops.attention_records import SUMS

__all__ = ["ATTENTION_COLUMNS", "STATISTICS", "SUMMARY_COLUMNS", "Backend", "Lazy", "PackedRead"]

Floats = NDArray[np.float64]

#: Columns of :meth:`Backend.summaries`. ``first_bad`` is NaN where the backend can't say.
SUMMARY_COLUMNS = ("sumsq", "absmax", "n_nan", "n_posinf", "n_neginf", "first_bad")

#: Columns of :meth:`Backend.statistics`: ``n`` counts all elements, ``nans`` those that are NaN.
STATISTICS = ("n", "min", "max", "mean", "norm", "nans")

#: Rows of what the attention primitives return: ``AttentionLogits`` of trainmon.ops, field by field.
ATTENTION_COLUMNS = ("max", *SUMS)


@dataclass(frozen=True, slots=True)
class Lazy:
    """Numbers on their way to the host.

    Attributes:
        handles: what has to be read: one-dimensional tensors of the backend; empty if ``finish`` needs nothing.
        finish: makes the float64 result from the handles' values (one float64 array a handle).
    """

    handles: tuple[Any, ...]
    finish: Callable[..., Floats]


class PackedRead(Protocol):
    """A transfer that was started."""

    def wait(self) -> list[Floats]:
        """The results of the lazies, in the order in which they were given to :meth:`Backend.read`."""
        ...


class Backend(Protocol):
    """Attributes:
    name: for messages and run.json.
    deferred: whether results arrive one step late (device) or at once (host memory).
    reads: device-to-host transfers so far.
    """

    name: str
    deferred: bool
    reads: int

    def summaries(self, tensors: Sequence[Any]) -> Lazy:
        """Per tensor :data:`SUMMARY_COLUMNS`, shape ``[len(tensors), 6]``; ``sumsq`` and ``absmax`` propagate NaN and
        infinities as torch does. float64 accumulation (host), or partial sums that are finished in float64."""
        ...

    def statistics(self, tensors: Sequence[Any]) -> Lazy:
        """Per tensor :data:`STATISTICS`, shape ``[len(tensors), 6]``, as torch would have them: NaN and infinities
        propagate; of no element the norm is 0, and ``min``, ``max`` and ``mean`` are NaN."""
        ...

    def squares(self, tensors: Sequence[Any], negatives: bool = False) -> Lazy:
        """Per tensor the sum of squares, propagating, and with ``negatives`` the number of elements below zero:
        shape ``[len(tensors), 2]``, the second column NaN without."""
        ...

    def square_sum(self, tensors: Sequence[Any]) -> Lazy:
        """Sum of squares over all elements of all tensors, shape ``[1]``, propagating; 0 for no tensors."""
        ...

    def bucket_sums(self, losses: Any, weights: Any, buckets: Any, count: int) -> Lazy:
        """Sum of weight * loss and sum of weights of each bucket, shape ``[count, 2]``.

        Args:
            losses: floats.
            weights: integers or bool of the same shape; a loss of weight 0 is not looked at. None: 1 each.
            buckets: integers that broadcast to that shape; tokens of other ids than 0 .. count - 1 are left out.
        """
        ...

    def flushed(self, tensors: Sequence[Any], formats: Sequence[str]) -> Lazy:
        """Over all tensors together, for each format: elements that a cast would round to zero, and nonzero finite
        elements; shape ``[len(formats), 2]``."""
        ...

    def signs(self, tensors: Sequence[Any], others: Sequence[Any]) -> Lazy:
        """Over all pairs of tensors together: elements of one sign in both, of opposite signs, and all elements, shape
        ``[3]``. Zeros and NaN have no sign.

        Args:
            others: of the tensors' shapes; dtypes may differ.
        """
        ...

    def fingerprints(self, tensors: Sequence[Any]) -> Lazy:
        """64 bits of each tensor's bytes as two numbers below 2^32, shape ``[len(tensors), 2]``; equal for equal bits.
        Tensors of a device are copied to the host beside its work."""
        ...

    def keep(self, tensors: Sequence[Any], into: Sequence[Any | None] = ()) -> list[Any]:
        """Copies of tensors, for :meth:`differences`.

        Args:
            into: as many earlier copies, or None; those of the same shape and dtype are overwritten and returned.
        """
        ...

    def differences(self, tensors: Sequence[Any], copies: Sequence[Any], update: bool = False) -> Lazy:
        """Per tensor, against its copy: sum of squares of the difference, sum of squares of the copy (both propagating),
        number of elements with unchanged bits, number of elements: shape ``[len(tensors), 4]``.

        Args:
            update: bring the copies up to date in the same pass.
        """
        ...

    def adam_squares(self, steps: Sequence[AdamStep], weights: Sequence[Any]) -> Lazy:
        """Per step the sum of squares of ``lr * (mhat / (sqrt(vhat) + eps) + decay * w)``, shape ``[len(steps)]``, NaN
        where it can't be computed.

        Args:
            weights: those that decay, one a step; as they were before it.
        """
        ...

    def spectra(
        self,
        matrices: Sequence[Any],
        states: Sequence[Any | None],
        seeds: Sequence[int],
        tolerance: float,
        epsilon: float,
    ) -> tuple[Lazy, list[Any]]:
        """Per matrix W (two dimensions) the sum of its squares, a lower and an upper bound of the largest eigenvalue of
        W'W, the latter NaN where the backend gives none: shape ``[len(matrices), 3]``; zeros for a zero matrix, NaN for
        one that is not finite. And the states to pass back.

        Args:
            states: of the last call on the same matrix; None: there is none.
            seeds: of the draws, one a matrix.
            tolerance, epsilon: see :func:`trainmon.stable_rank`.
        """
        ...

    def scalar(self, value: Any) -> Lazy:
        """One number from anything with one element (Python, NumPy, a tensor of any dtype), shape ``[1]``."""
        ...

    def bincount(self, indices: Any, count: int) -> Lazy:
        """How often each of 0 .. count - 1 stands in integers of any shape, and last how many others there are, shape
        ``[count + 1]``."""
        ...

    def common(self, before: Any, after: Any, count: int) -> Lazy:
        """How many of the ids 0 .. count - 1 two rows of integers [..., k] have in common, summed over the rows, and how
        many ids ``after`` has in all, shape ``[2]``."""
        ...

    def vector(self, value: Any) -> Lazy:
        """All numbers of a number or small tensor, one axis."""
        ...

    def attention(
        self,
        q: Any,
        k: Any,
        *,
        scale: float,
        causal: bool,
        q_start: int,
        mask: Any,
        sample_rows: int | None,
        seed: int,
    ) -> Lazy:
        """Logits scale * q . k at point ``scaled``, :data:`ATTENTION_COLUMNS` by heads of q, shape ``[13, Hq]``.

        Args:
            q: [..., Hq, Sq, D].
            k: [..., Hk, Sk, D], Hq a multiple of Hk.
            causal: row i sees the keys up to i + ``q_start``.
            mask: what a row may see besides, broadcasting to [..., Hq, Sq, Sk]: bool, or added to the scores, of which
                only what is hopelessly low counts. None: everything.
            sample_rows: of each head and sequence, drawn with ``seed``: ``sampled_places`` of trainmon.ops.attention.
        """
        ...

    def attention_scores(self, scores: Any, *, sample_rows: int | None, seed: int) -> Lazy:
        """As :meth:`attention`, of scores [..., heads, Sq, Sk] as softmax takes them: point ``masked``."""
        ...

    def attention_rows(self, row_max: Any, row_sum: Any) -> Lazy:
        """As :meth:`attention`, of row maxima and sums [..., heads, rows] of a fused kernel; columns that need the number
        of keys are NaN or 0."""
        ...

    def read(self, lazies: Sequence[Lazy]) -> PackedRead:
        """Starts the one transfer for all of them; none at all if nothing has to be read."""
        ...
