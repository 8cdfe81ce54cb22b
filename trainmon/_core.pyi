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
def plain_read(tensors: Any | Iterable[Any], /) -> int: ...
def cpu_info() -> dict[str, Any]: ...
def build_info() -> dict[str, Any]: ...
