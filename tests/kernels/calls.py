"""One small valid call of every public function and class of trainmon.ops: what the tests of all families run.

A new function adds one line to CALLS; test_calls.py fails until it does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trainmon import ops
from trainmon.ops._extension import _core


@dataclasses.dataclass(frozen=True)
class Call:
    """How to call one function.

    Attributes:
        arguments: makes fresh positional arguments from a list of tensors, which a function that takes none
            leaves alone.
        any_tensors: `arguments` passes the list on, and the function takes tensors of any dtype and shape.
        use: what is called with the arguments; None: the function of that name. For a class: makes an object,
            uses it, and returns numbers.
        writes: positions of the arguments that the call is there to change.
    """

    arguments: Callable[[list[Any]], tuple[Any, ...]]
    any_tensors: bool = True
    use: Callable[..., object] | None = None
    writes: tuple[int, ...] = ()


def _sum_losses(losses: list[Any]) -> object:
    accumulator = ops.LossAccumulator(buckets=2)
    for loss in losses:
        accumulator.add(loss, np.ones(loss.shape, np.int64), np.arange(loss.shape[1]) % 3)
    return [accumulator.mean, accumulator.gap, accumulator.bucket_means, accumulator.state]


def _detect(values: Any) -> object:
    bank = ops.DetectorBank(["skip_step_sigma", "mad", "turbulence"], values.shape[1])
    return [bank.update(values), bank.state, ops.DetectorBank.from_state(bank.state).state]


def _table(tensors: list[Any]) -> tuple[Any, ...]:
    return {"x": tensors[1][0], "name": ["a,b", None, "c", "d", "e", "f"]}, {"x": tensors[1][1] > 0}


def _heads(tensors: list[Any]) -> tuple[Any, ...]:
    q = np.linspace(-1, 1, 480, dtype=np.float32).reshape(2, 4, 20, 3)
    return q, np.cos(9 * q[:, :2]).astype(np.float16)


def _attention(q: Any, k: Any) -> object:
    """All options of a mask, and each row."""
    masks = {"window": 7, "k_mask": np.arange(40).reshape(2, 20) % 3 > 0, "sample_rows": 15}
    return [
        ops.attention_logits(q, k, per_row=True, threads=2, **masks),
        ops.attention_logits(q, k, point="masked", softcap=2.0, sinks=[0.5, 1.0, 1.5, 2.0]),
    ]


_ROWS = ops.AttentionRows(np.ones((2, 3)), np.full((2, 3), 2.0))
_IDS = np.array([[[0, 3], [1, 7]], [[3, 9], [-1, 1]]], np.int16)


def _stable_ranks(matrices: list[Any]) -> object:
    """By the Gram matrix and by iteration, which these sizes would not take."""
    iterated = _core.stable_rank(matrices, None, 0.01, 1e-6, 0, 0, 0, 2)
    return [ops.stable_rank(matrices), iterated]


CALLS: dict[str, Call] = {
    "DetectorBank": Call(
        lambda tensors: (np.random.default_rng(0).exponential(size=(90, 3)),), any_tensors=False, use=_detect
    ),
    "LossAccumulator": Call(lambda tensors: (tensors,), any_tensors=False, use=_sum_losses),
    "assign_churn": Call(lambda tensors: (_IDS[0], _IDS[1], 8), any_tensors=False),
    "attention_logit_mean": Call(_heads, any_tensors=False),
    "attention_logits": Call(_heads, any_tensors=False, use=_attention),
    "bias_saturated": Call(lambda tensors: (np.arange(8.0).reshape(2, 4), 3.0), any_tensors=False),
    "bias_span": Call(lambda tensors: (np.arange(8.0).reshape(2, 4),), any_tensors=False),
    "build_info": Call(lambda tensors: (), any_tensors=False),
    "compare": Call(lambda tensors: (tensors, [copy(tensor) for tensor in tensors])),
    "classify_spike": Call(lambda tensors: ([1.0, 2.0], [9.0, 1.0]), any_tensors=False),
    "cpu_info": Call(lambda tensors: (), any_tensors=False),
    "csv_rows": Call(_table, any_tensors=False),
    "diff_norm": Call(
        lambda tensors: (tensors, [copy(tensor) for tensor in tensors], True, True), writes=(1,)
    ),
    "expert_load": Call(lambda tensors: (list(_IDS), 8, True), any_tensors=False),
    "expert_metrics": Call(lambda tensors: (np.arange(16).reshape(2, 2, 4), 1.25, 2), any_tensors=False),
    "expert_migration": Call(lambda tensors: (_IDS[0], _IDS[1]), any_tensors=False),
    "exponent_histogram": Call(lambda tensors: (tensors, True)),
    "file_digest": Call(lambda tensors: (__file__,), any_tensors=False),
    "fingerprint": Call(lambda tensors: (tensors,)),
    "finish_stats": Call(lambda tensors: (ops.tensor_stats(tensors),), any_tensors=False),
    "json_rows": Call(_table, any_tensors=False),
    "loss_gap": Call(lambda tensors: ([6.0, 4.0], [3, 1]), any_tensors=False),
    "merge_key_splits": Call(lambda tensors: ([_ROWS, _ROWS],), any_tensors=False),
    "merge_spectral": Call(lambda tensors: (ops.stable_rank(tensors)[0],), any_tensors=False),
    "merge_stats": Call(lambda tensors: (ops.tensor_stats(tensors),), any_tensors=False),
    "multi_norm": Call(lambda tensors: (tensors, 2, True)),
    "plain_read": Call(lambda tensors: (tensors,)),
    "position_buckets": Call(lambda tensors: (6, 3), any_tensors=False),
    "qk_clip": Call(lambda tensors: (np.array([50.0, 200.0, np.nan]),), any_tensors=False),
    "scan_nonfinite": Call(lambda tensors: (tensors,)),
    "sign_agreement": Call(lambda tensors: (tensors, [copy(tensor) for tensor in tensors])),
    "stable_rank": Call(lambda tensors: (tensors,), use=_stable_ranks),
    "stage": Call(lambda tensors: (tensors,)),
    "stage_size": Call(lambda tensors: (tensors,)),
    "tensor_stats": Call(lambda tensors: (tensors,)),
    "underflow_shares": Call(lambda tensors: (tensors, ("bf16", "e4m3fn"), 3.0, True)),
}


def copy(tensor: Any) -> Any:
    """A writable copy with the same layout; what is no array comes back as it is."""
    return tensor.copy(order="K") if isinstance(tensor, np.ndarray) else tensor


def call(name: str, *arguments: Any) -> object:
    """Runs the call of this name."""
    return (CALLS[name].use or getattr(ops, name))(*arguments)


def tensors(count: int = 6) -> list[Any]:
    """Small float32 arrays, two of them strided; the same values each time."""
    rng = np.random.default_rng(0)
    made: list[Any] = [rng.standard_normal((3, 5 + i), dtype=np.float32) for i in range(count)]
    made[1] = made[1][:, ::-1]
    made[-1] = made[-1].T
    return made


def arrays_in(value: object) -> Iterator[np.ndarray[Any, Any]]:
    """Every array in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from arrays_in(item)
    elif isinstance(value, dict):
        yield from arrays_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from arrays_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def canonical(value: object) -> object:
    """A result as something that compares by bits, NaN included."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return [canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return [canonical(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return repr(value)
    raise TypeError(f"a result of type {type(value).__name__}: give the Call a `use` that returns numbers")
