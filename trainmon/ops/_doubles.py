"""Small arrays of numbers that are computed on in NumPy: what the doors of the core refuse is refused here too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def doubles(values: npt.ArrayLike, name: str) -> npt.NDArray[np.float64]:
    """`values` as float64.

    Raises:
        TypeError: complex numbers, whose imaginary part NumPy would drop, or a masked array, whose mask it would.
    """
    array = np.asarray(values)
    if array.dtype.kind == "c" or isinstance(values, np.ma.MaskedArray):
        masked = "a masked array" if isinstance(values, np.ma.MaskedArray) else f"of dtype {array.dtype}"
        raise TypeError(f"{name} must be plain real numbers, not {masked}")
    return np.asarray(array, np.float64)
