"""The compiled extension. trainmon.ops holds the keywords, the defaults and the documentation."""

from collections.abc import Iterable
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

STATS_DTYPE: np.dtype[np.void]

def tensor_stats(
    tensors: Any | Iterable[Any], names: tuple[str, ...] | None, threads: int, /
) -> npt.NDArray[Any]: ...
def merge_stats(records: npt.NDArray[Any], offsets: npt.NDArray[np.int64] | None, /) -> npt.NDArray[Any]: ...
@overload
def multi_norm(
    tensors: Any | Iterable[Any], order_code: int, per_tensor: Literal[False], threads: int, /
) -> float: ...
@overload
def multi_norm(
    tensors: Any | Iterable[Any], order_code: int, per_tensor: Literal[True], threads: int, /
) -> tuple[float, npt.NDArray[np.float64]]: ...
def scan_nonfinite(
    tensors: Any | Iterable[Any], names: tuple[str, ...] | None, threads: int, /
) -> tuple[int, int, float] | None: ...
def exponent_histogram(
    tensors: Any | Iterable[Any], per_tensor: bool, threads: int, /
) -> npt.NDArray[np.int64]: ...
def cast_losses(
    tensors: Any | Iterable[Any], formats: tuple[str, ...], scale: float, per_tensor: bool, threads: int, /
) -> npt.NDArray[np.int64]: ...
@overload
def expert_load(
    indices: Any | Iterable[Any], num_experts: int, per_tensor: Literal[False], threads: int, /
) -> tuple[npt.NDArray[np.int64], int]: ...
@overload
def expert_load(
    indices: Any | Iterable[Any], num_experts: int, per_tensor: bool, threads: int, /
) -> tuple[npt.NDArray[np.int64], int | npt.NDArray[np.int64]]: ...
def expert_metrics(
    counts: npt.NDArray[np.float64],
    options: tuple[int, int, float | None, int],
    placement: npt.NDArray[np.int64] | None,
    groups: npt.NDArray[np.float64] | None,
    dropped: npt.NDArray[np.float64] | None,
    state: tuple[npt.NDArray[Any], ...],
    /,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]: ...
def common_assignments(before: Any, after: Any, k: int, num_experts: int, /) -> int: ...
def compare(a: Any | Iterable[Any], b: Any | Iterable[Any], threads: int, /) -> npt.NDArray[Any]: ...
def merge_comparisons(records: npt.NDArray[Any], /) -> npt.NDArray[Any]: ...
def sign_agreement(
    a: Any | Iterable[Any], b: Any | Iterable[Any], threads: int, /
) -> tuple[int, int, int]: ...
def diff_norm(
    tensors: Any | Iterable[Any],
    previous: Any | Iterable[Any],
    update: bool,
    per_tensor: bool,
    threads: int,
    /,
) -> tuple[float, float, int, int, int, tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None]: ...
def fingerprint(
    tensors: Any | Iterable[Any],
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...] | None,
    bits: int,
    threads: int,
    /,
) -> tuple[npt.NDArray[np.uint64], list[tuple[str, tuple[int, ...]]]]: ...
def stage(
    tensors: Any | Iterable[Any], names: tuple[str, ...] | None, arena: Any, bits: int, threads: int, /
) -> tuple[
    Any,
    int,
    int,
    npt.NDArray[np.int64],
    npt.NDArray[Any],
    npt.NDArray[np.uint64],
    list[tuple[str, tuple[int, ...]]],
]: ...
def stage_size(tensors: Any | Iterable[Any], /) -> int: ...
def stable_rank(
    matrices: Any | Iterable[Any],
    carried: tuple[tuple[int, npt.NDArray[np.float32]] | None, ...] | None,
    tolerance: float,
    epsilon: float,
    seed: int,
    step: int,
    exact_side: int,
    threads: int,
    /,
) -> tuple[
    list[tuple[float, float, float, float, float, int, int]],
    tuple[tuple[int, npt.NDArray[np.float32]] | None, ...],
]: ...
def attention_logits(
    q: Any,
    k: Any,
    bounds: npt.NDArray[np.int64],
    kept: npt.NDArray[np.int64] | None,
    kept_starts: npt.NDArray[np.int64] | None,
    rows: npt.NDArray[np.int64] | None,
    heads: npt.NDArray[np.bool_] | None,
    scale: float,
    cap: float,
    sinks: npt.NDArray[np.float64] | None,
    scores: bool,
    per_row: bool,
    threads: int,
    /,
) -> tuple[
    npt.NDArray[np.float64],
    tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]
    | None,
]: ...
def plain_read(tensors: Any | Iterable[Any], /) -> int: ...
def loss_add(state: npt.NDArray[np.int64], losses: Any, weights: Any, buckets: Any, /) -> None: ...
def loss_add_value(state: npt.NDArray[np.int64], value: float, is_mean: bool, tokens: int, /) -> None: ...
def loss_add_state(state: npt.NDArray[np.int64], other: npt.NDArray[np.int64], /) -> None: ...
def loss_means(state: npt.NDArray[np.int64], row: int, /) -> tuple[float, float] | None: ...
def loss_layout() -> dict[str, tuple[int, int]]: ...
def detector_rules() -> tuple[tuple[str, str], ...]: ...
def detector_words(
    kinds: npt.NDArray[np.int64], parameters: npt.NDArray[np.float64], /
) -> npt.NDArray[np.int64]: ...
def detector_reset(plan: tuple[npt.NDArray[Any], ...], state: npt.NDArray[np.int64], /) -> None: ...
def detector_check(plan: tuple[npt.NDArray[Any], ...], state: npt.NDArray[np.int64], /) -> None: ...
def detect(
    plan: tuple[npt.NDArray[Any], ...],
    state: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    valid: npt.NDArray[np.bool_] | None,
    events: npt.NDArray[np.int64],
    /,
) -> tuple[int, int]: ...
def write_rows(
    plan: tuple[tuple[str, tuple[str | None, ...] | None, bool], ...],
    numbers: tuple[Any, ...],
    names: tuple[str, ...],
    masks: tuple[Any, ...],
    json: bool,
    header: bool,
    /,
) -> bytes: ...
def cpu_info() -> dict[str, Any]: ...
def build_info() -> dict[str, Any]: ...
