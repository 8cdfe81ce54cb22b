"""The attention primitives: host and torch give the same records, whatever masks there are."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="one of the backends is torch's")

from trainmon.backend import scores  # noqa: E402
from trainmon.backend.base import ATTENTION_COLUMNS, Backend, Lazy  # noqa: E402
from trainmon.backend.host import HostBackend  # noqa: E402
from trainmon.backend.torch import TorchBackend  # noqa: E402

BACKENDS: dict[str, tuple[Backend, float]] = {
    "host": (HostBackend(), 2e-6),
    "torch": (TorchBackend("cpu"), 2e-6),
    "float32": (TorchBackend("cpu", float64=False), 2e-5),
}


def read(backend: Backend, lazy: Lazy) -> dict[str, np.ndarray[Any, Any]]:
    (values,) = backend.read([lazy]).wait()
    return dict(zip(ATTENTION_COLUMNS, values, strict=True))


def oracle(logits: torch.Tensor, allowed: torch.Tensor) -> dict[str, Any]:
    """All rows, by the definitions, in float64."""
    z = logits.double()
    rows = [
        [(z[b, h, i][allowed[b, h, i]]) for b in range(z.shape[0]) for i in range(z.shape[2])]
        for h in range(z.shape[1])
    ]
    found: dict[str, list[float]] = {name: [] for name in ATTENTION_COLUMNS}
    for head in rows:
        sums = dict.fromkeys(ATTENTION_COLUMNS, 0.0) | {"max": -math.inf, "all_rows": float(len(head))}
        for row in head:
            if not len(row):
                sums["empty_rows"] += 1
                continue
            m, n = float(row.max()), len(row)
            sums["max"] = float(np.maximum(sums["max"], m))
            if math.isnan(m) or m == math.inf:
                sums["nonfinite_rows"] += 1
                continue
            weights = float(torch.exp(row - m).sum())
            sums["rows"] += 1
            sums["sum_l"] += weights
            sums["sum_l2"] += weights**2
            sums["sum_m"] += m
            sums["sum_inv_l"] += 1 / weights
            sums["sum_z"] += float(row.sum())
            sums["keys"] += n
            if n > 1:
                sums["norm_rows"] += 1
                sums["sum_norm"] += (weights - 1) / (n - 1)
        for name, value in sums.items():
            found[name].append(value)
    return found


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 7, 4, 8, generator=generator).transpose(1, 2) * 3  # sequence before heads in memory
    return q.to(dtype), torch.randn(2, 2, 9, 8, generator=generator).to(dtype)


MASKS: dict[str, Any] = {
    "none": None,
    "bool": lambda: torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(1)) > 0.4,
    "padding": lambda: torch.arange(9).view(1, 1, 1, 9) < torch.tensor([4, 9]).view(2, 1, 1, 1),
    "added": lambda: torch.zeros(7, 9).masked_fill(torch.rand(7, 9) > 0.5, torch.finfo(torch.float32).min),
    "added inf": lambda: torch.full((2, 4, 7, 9), 0.25).masked_fill(torch.rand(2, 4, 7, 9) > 0.5, -math.inf),
    "empty row": lambda: torch.arange(7).view(7, 1).expand(7, 9) != 3,
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_any_mask(name: str, mask: str, causal: bool, dtype: torch.dtype) -> None:
    backend, tolerance = BACKENDS[name]
    (q, k), given = tensors(dtype), MASKS[mask]() if MASKS[mask] else None
    allowed = torch.ones(2, 4, 7, 9, dtype=torch.bool)
    if given is not None:
        allowed &= given if given.dtype == torch.bool else given > -1e30
    if causal:
        allowed &= torch.arange(9) <= torch.arange(7)[:, None] + 1
    lazy = backend.attention(
        q, k, scale=0.5, causal=causal, q_start=1 if causal else 0, mask=given, sample_rows=None, seed=0
    )
    found = read(backend, lazy)
    expected = oracle(q.float() @ k.float().repeat_interleave(2, 1).mT * 0.5, allowed)
    for column, values in expected.items():
        np.testing.assert_allclose(found[column], values, rtol=tolerance, atol=1e-4, err_msg=column)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_sampled_rows_are_the_same_on_every_backend(name: str, mask: str) -> None:
    backend, tolerance = BACKENDS[name]
    (q, k), given = tensors(), MASKS[mask]() if MASKS[mask] else None
    for seed in (0, 1):
        options: dict[str, Any] = {
            "scale": 1.0,
            "causal": True,
            "q_start": 0,
            "mask": given,
            "sample_rows": 3,
        }
        found = read(backend, backend.attention(q, k, seed=seed, **options))
        host = BACKENDS["host"][0]
        expected = read(host, host.attention(q, k, seed=seed, **options))
        assert found["all_rows"].tolist() == [14] * 4
        assert (found["rows"] + found["empty_rows"]).tolist() == [6] * 4
        for column in ATTENTION_COLUMNS:
            np.testing.assert_allclose(
                found[column], expected[column], rtol=tolerance, atol=1e-4, err_msg=column
            )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_as_softmax_takes_them(name: str, dtype: torch.dtype) -> None:
    backend, tolerance = BACKENDS[name]
    scores = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    allowed = torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(3)) > 0.3
    allowed[0, 1, 2] = False
    given = scores + torch.zeros_like(scores).masked_fill(~allowed, torch.finfo(dtype).min)
    given[1, 2, 3, 4], allowed[1, 2, 3, 4] = math.nan, True
    given[1, 0, 3, 4], allowed[1, 0, 3, 4] = math.inf, True
    found = read(backend, backend.attention_scores(given, sample_rows=None, seed=0))
    expected = oracle(given.float(), allowed)
    assert found["nonfinite_rows"].tolist() == [1, 0, 1]
    assert found["max"][0] == math.inf and math.isnan(found["max"][2])
    for column, values in expected.items():
        np.testing.assert_allclose(found[column], values, rtol=tolerance, atol=1e-4, err_msg=column)


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_of_a_kernel(name: str) -> None:
    backend, _ = BACKENDS[name]
    m = torch.tensor([[[0.0, math.log(3.0), -math.inf], [math.nan, 1.0, 2.0]]])
    total = torch.tensor([[[2.0, 4.0 / 3.0, 0.0], [math.nan, 1.0, 1.0]]])
    found = read(backend, backend.attention_rows(m, total))
    np.testing.assert_allclose(found["sum_l"], [10 / 3, 2.0], rtol=1e-6)
    assert found["rows"].tolist() == [2, 2] and found["all_rows"].tolist() == [3, 3]
    assert found["nonfinite_rows"].tolist() == [0, 1] and found["empty_rows"].tolist() == [1, 0]
    assert found["max"][0] == pytest.approx(math.log(3.0)) and math.isnan(found["max"][1])
    assert found["norm_rows"].tolist() == [0, 0] and np.isnan(found["sum_z"]).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_vectors(name: str) -> None:
    backend, _ = BACKENDS[name]
    for value, expected in (
        (torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), [1.5, -2.0]),
        (torch.tensor(3), [3.0]),
        (np.arange(3), [0.0, 1.0, 2.0]),
        (2.5, [2.5]),
        ([0.1, 3], [0.1, 3.0]),
        (np.float64(0.1), [0.1]),
    ):
        (found,) = backend.read([backend.vector(value)]).wait()
        assert found.tolist() == expected


@pytest.mark.parametrize("given", ["products", "scores"])
def test_in_host_memory_only_few_scores_are_there_at_a_time(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    q = generator.standard_normal((6, 4, 200, 8), np.float32)
    k = generator.standard_normal((6, 2, 200, 8), np.float32)
    mask = generator.random((1, 1, 200, 200)) < 0.9
    whole = np.where(mask, q @ np.repeat(k, 2, axis=1).swapaxes(2, 3) * np.float32(0.4), -np.inf)

    def call() -> Any:
        if given == "scores":
            return scores.rows_of_scores(whole, np.arange(200))
        return scores.rows_of_products(q, k, 0.4, np.arange(200), mask)

    expected = call()
    monkeypatch.setattr(scores, "_SCORES", 1 << 12)
    tracemalloc.start()
    found = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    results = 4 * 8 * found.max.size + 8 * found.max.size
    assert peak < results + 40 * (1 << 12) + 4 * k[0].size + 20_000
    for name in ("max", "sum", "keys", "z"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    everything = whole.astype(np.float64)
    np.testing.assert_allclose(found.max, everything.max(-1), rtol=1e-6)
    np.testing.assert_allclose(
        found.sum, np.exp(everything - everything.max(-1, keepdims=True)).sum(-1), rtol=1e-5
    )
