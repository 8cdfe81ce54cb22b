"""Statistics of single tensors: the device's path gives the C kernels' numbers, and readings of both mix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainmon.backend.base import STATISTICS  # noqa: E402
from trainmon.backend.host import HostBackend  # noqa: E402
from trainmon.backend.statistics import Reading, finished, host_readings, of_zeros, with_zeros  # noqa: E402
from trainmon.backend.torch import TorchBackend  # noqa: E402


def tensors() -> list[Any]:
    torch.manual_seed(0)
    wide = torch.randn(3, 70_001)
    odd = [torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([float("inf"), -float("inf")])]
    odd += [torch.zeros(0, 3), torch.tensor(-2.5), torch.tensor([float("-inf"), 1.0])]
    kinds = [
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    ]
    return [wide, wide.t()[::3], *odd, *((wide[0, :999] * 3).to(kind) for kind in kinds)]


@pytest.mark.parametrize("float64", [True, False])
def test_both_backends_agree(float64: bool) -> None:
    host, device = HostBackend(), TorchBackend("cpu", float64=float64)
    given = [one for one in tensors() if float64 or one.dtype != torch.float64]
    (want,) = host.read([host.statistics(given)]).wait()
    (got,) = device.read([device.statistics(given)]).wait()
    assert want.shape == (len(given), len(STATISTICS))
    scale = np.fmax(np.abs(np.where(np.isfinite(want), want, 0)).max(axis=1), 1.0)[:, None]
    np.testing.assert_allclose(
        got / scale, want / scale, rtol=1e-12 if float64 else 2e-6, atol=1e-12 if float64 else 1e-6
    )
    assert device.read([device.statistics([])]).wait()[0].shape == (0, len(STATISTICS))


def test_readings_of_host_and_device_mix_with_one_transfer() -> None:
    """T-11: rows of several devices in one table."""
    device = TorchBackend("cpu")
    first, second = device.statistics(tensors()[:2]), device.statistics(tensors()[2:4])
    readings = [
        Reading(first, 1),
        *host_readings([np.arange(4.0)]),
        Reading(second, 0),
        Reading(first, 0),
        of_zeros(5),
        of_zeros(0),
    ]
    table = finished(readings, device)
    assert device.reads == 1
    want = HostBackend().statistics(tensors()).finish()
    np.testing.assert_allclose(table[[3, 0]], want[:2], rtol=1e-12)
    np.testing.assert_array_equal(table[2], want[2])
    assert table[1].tolist() == [4, 0, 3, 1.5, pytest.approx(14**0.5), 0]
    assert table[4].tolist() == [5, 0, 0, 0, 0, 0]
    assert table[5, [0, 4, 5]].tolist() == [0, 0, 0]
    assert np.isnan(table[5, 1:4]).all()


@pytest.mark.parametrize("stored", [[], [1.0, -2.0], [3.0, 4.0], [-1.0], [float("nan"), 1.0], [float("inf")]])
@pytest.mark.parametrize("zeros", [0, 1, 70_000])
def test_zeros_that_a_sparse_tensor_does_not_store(stored: list[float], zeros: int) -> None:
    (reading,) = host_readings([np.array(stored)])
    (want,) = host_readings([np.array(stored + [0.0] * zeros)])
    np.testing.assert_allclose(
        finished([with_zeros(reading, zeros)], None), finished([want], None), rtol=1e-15, atol=0
    )
