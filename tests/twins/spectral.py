"""The oracle of stable_rank: NumPy's singular values in float64, scaled so that no square leaves the range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainmon.ops import Spectral

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SpectralTwin:
    stable_rank: float
    sigma: float


def spectral_twin(matrix: Any) -> SpectralTwin | None:
    """None for zero and non-finite matrices. First axis times the rest; a vector is one row."""
    w = np.asarray(matrix).astype(np.float64)
    largest = float(np.abs(w).max(initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return None
    w = w.reshape(1, -1) if w.ndim < 2 else w.reshape(w.shape[0], -1)
    exponent = math.frexp(largest)[1]
    sigma = np.linalg.svd(np.ldexp(w, -exponent), compute_uv=False)
    return SpectralTwin(
        float(np.sum(np.square(sigma)) / sigma[0] ** 2), math.ldexp(float(sigma[0]), exponent)
    )


def covers(result: Spectral, twin: SpectralTwin, slack: float = 1e-12) -> bool:
    """The interval holds the twin's value; `slack` is the twin's own rounding."""
    return result.low <= twin.stable_rank * (1 + slack) and twin.stable_rank <= result.high * (1 + slack)


def gaussians(seed: int, a: int, b: int, c: int, n: int) -> Array:
    """Philox4x32-10 in uint64 arithmetic, then Box-Muller: the draws of one vector."""
    blocks = np.arange((n + 3) // 4, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    x = [
        blocks & low,
        np.full_like(blocks, a),
        np.full_like(blocks, b),
        np.uint64(c) << np.uint64(8) | blocks >> np.uint64(32),
    ]
    keys = [np.uint64(seed) & low, np.uint64(seed) >> np.uint64(32)]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            (q >> np.uint64(32)) ^ x[1] ^ keys[0],
            q & low,
            (p >> np.uint64(32)) ^ x[3] ^ keys[1],
            p & low,
        ]
        keys = [
            keys[0] + np.uint64(0x9E3779B9) & low,
            keys[1] + np.uint64(0xBB67AE85) & low,
        ]
    u = [(word.astype(np.float64) + 0.5) * 2.0**-32 for word in x]
    out = np.empty((len(blocks), 4))
    for pair in (0, 2):
        radius, angle = np.sqrt(-2 * np.log(u[pair])), 2 * np.pi * u[pair + 1]
        out[:, pair], out[:, pair + 1] = radius * np.cos(angle), radius * np.sin(angle)
    return out.ravel()[:n]


def chi2_quantile(epsilon: float, degrees: int) -> float:
    """By bisection of the lower tail, a series of positive terms."""
    low, high = 0.0, 64.0
    for _ in range(200):
        y, half = (low + high) / 4, degrees // 2
        tail = sum(math.exp(j * math.log(y) - math.lgamma(j + 1) - y) for j in range(half, half + 200))
        low, high = ((low + high) / 2, high) if tail < epsilon else (low, (low + high) / 2)
    return low


def krylov_twin(
    w: Array, passes: int, epsilon: float, seed: int, warm: Array | None = None, trusted: float = 1e-6
) -> tuple[float, float]:
    """Bounds of the largest eigenvalue of W'W after so many passes, by dense matrices in float64.

    The probabilistic bound is the largest real eigenvalue of [[Theta, -FF'], [I - CC'/tau, Theta]], where the
    kernel scans a grid.
    """
    n = w.shape[1]
    gram, draws = w.T @ w, 8 if warm is None else 6
    g = np.stack([gaussians(seed, 0, 0, i, n) for i in range(draws)])
    start = g if warm is None else np.concatenate([warm.astype(np.float64), g])
    basis = np.linalg.qr(start.T)[0].T
    last = basis
    for _ in range(passes):
        z = last @ gram
        for _ in range(2):
            z = z - z @ basis.T @ basis
        fresh, size, _ = np.linalg.svd(z.T, full_matrices=False)
        new = fresh.T[size > 1e-12 * np.linalg.norm(gram, 2)][: n - len(basis)]
        if len(new) == 0:  # an invariant space
            top = float(np.linalg.eigvalsh(basis @ gram @ basis.T)[-1])
            return top, top
        b, previous, last = new @ z.T, basis, new
        basis = np.concatenate([basis, new])
    theta, q = np.linalg.eigh(previous @ gram @ previous.T)
    f = q.T @ np.concatenate([np.zeros((len(previous) - b.shape[1], len(new))), b.T])
    c, sumsq = q.T @ previous @ g.T, float(np.trace(gram))
    keep = theta >= trusted * theta[-1]
    t, r = theta[keep], f[keep]
    nystrom = np.diag(t) + (r / np.sqrt(t)[:, None]) @ (r / np.sqrt(t)[:, None]).T
    low = float(np.linalg.eigvalsh(nystrom)[-1])
    rho = max(0.0, sumsq - float(np.trace(nystrom)))
    corner = (r / t[:, None]).T @ r + rho * np.eye(len(new))
    block = float(np.linalg.eigvalsh(np.block([[np.diag(t), r], [r.T, corner]]))[-1])
    certain = min(low + rho, sumsq, block)
    tau, one = chi2_quantile(epsilon, draws), np.eye(len(theta))
    roots = np.linalg.eigvals(np.block([[np.diag(theta), -f @ f.T], [one - c @ c.T / tau, np.diag(theta)]]))
    real = roots.real[np.abs(roots.imag) <= 1e-9 * theta[-1]]
    return low, min(certain, max(low, float(real.max(initial=low))))
