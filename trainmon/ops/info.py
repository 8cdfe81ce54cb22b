"""What runs here and how it was built: the facts behind `trainmon info`."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainmon.ops._extension import _core


def cpu_info() -> dict[str, Any]:
    """The instruction-set tier in use and why.

    Keys: `tier` ("baseline", "avx2" or "avx512"), `reason` (one clause), `requested` (the value of
    TRAINMON_CPU at import, or None), `available` (tiers that this machine and this build can run, slowest
    first), `compiled` (tiers in this build). The tier is chosen once, when the extension is imported; it
    changes the speed of results, never their bits.
    """
    return _core.cpu_info()


def build_info() -> dict[str, Any]:
    """How the extension was built and what it is linked with.

    Keys: `dtypes` (names of the element types that the kernels read), `compiler`,
    `switches` (debug, sanitizers and the like that this build has on), `numpy` (`running`: version in the
    process; `api_built`, `api_target`, `api_running`: numbers of NumPy's C API), `blas` (`config`, `core`,
    `threading`, `threads`, and `works`: whether a small dot product, computed now, came out right).
    """
    info = _core.build_info()
    info["numpy"]["running"] = np.__version__
    return info
