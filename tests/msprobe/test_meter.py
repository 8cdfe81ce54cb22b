"""Tensors of every kind: the values of the contract's table, in msProbe's mode and by default."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trainmon.adapters.torch_rows.meter import Meter  # noqa: E402
from trainmon.backend.statistics import finished  # noqa: E402
from trainmon.msprobe.tables import rounded  # noqa: E402

NAN, INF = math.nan, math.inf


def read(tensor: Any, **options: bool) -> list[float]:
    table = finished(Meter(**options).read([tensor]), None)
    values: list[float] = (rounded(table) if options.get("as_msprobe") else table)[0, 1:].tolist()
    return values


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.zeros(0), [NAN, NAN, NAN, 0.0, 0.0]),
        (torch.tensor([NAN, 1.0, INF]), [NAN, NAN, NAN, NAN, 1.0]),
        (torch.tensor([INF, -INF]), [-INF, INF, NAN, INF, 0.0]),
        (torch.tensor([True, False]), [0.0, 1.0, 0.5, 1.0, 0.0]),
        (torch.tensor([1.0, -2.0], dtype=torch.bfloat16), [-2.0, 1.0, -0.5, 2.2360680103302, 0.0]),
        (torch.tensor(16777217), [16777216.0] * 4 + [0.0]),
        (torch.tensor([1 + 2j]), [NAN, NAN, 1.0, 1.0, 0.0]),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), [NAN, NAN, 1.5, 2.2360680103302, 0.0]),
        (torch.full((4,), 3e38), [float(torch.tensor(3e38))] * 3 + [INF, 0.0]),
        (torch.tensor([0.1], dtype=torch.float64), [0.10000000149011612] * 4 + [0.0]),
        (torch.tensor([-0.0, -0.0]), [-0.0, -0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_values_of_msprobe(tensor: Any, values: list[float]) -> None:
    """G2."""
    assert repr(read(tensor, as_msprobe=True)) == repr(values)


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.tensor(16777217), [16777217.0] * 4 + [0.0]),
        (torch.tensor([3 + 4j, complex(NAN, NAN)]), [NAN, NAN, NAN, NAN, 1.0]),
        (torch.tensor([3 + 4j, 0j]), [NAN, NAN, 1.5, 5.0, 0.0]),
        (torch.tensor([3 + 4j]).conj(), [NAN, NAN, 3.0, 5.0, 0.0]),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), [1.0, 2.0, 1.5, 5**0.5, 0.0]),
        (torch.sparse_coo_tensor([[0, 0, 3]], [1.0, 1.0, 4.0], (5,)), [0.0, 4.0, 1.2, 20**0.5, 0.0]),
        (torch.eye(3).to_sparse_csr(), [0.0, 1.0, 1 / 3, 3**0.5, 0.0]),
        (torch.full((4,), 3e38, dtype=torch.float64), [3e38, 3e38, 3e38, 6e38, 0.0]),
        (torch.full((2,), 1e300, dtype=torch.float64), [1e300, 1e300, 1e300, 2**0.5 * 1e300, 0.0]),
        (torch.ones(3, 4, requires_grad=True).t()[1:], [1.0, 1.0, 1.0, 3.0, 0.0]),
        (torch.ones(3, device="meta"), [NAN] * 5),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_exact_values(tensor: Any, values: list[float]) -> None:
    """T-50."""
    assert read(tensor) == pytest.approx(values, rel=1e-15, nan_ok=True)


def test_the_modulus_of_complex_numbers() -> None:
    assert read(torch.tensor([3 + 4j, 0j]), modulus=True) == [0.0, 5.0, 2.5, 5.0, 0.0]


def test_many_at_once() -> None:
    meter = Meter()
    tensors = [torch.ones(2), torch.tensor([1 + 1j]), torch.eye(2).to_sparse(), torch.zeros(0)]
    assert [row[1] for row in finished(meter.read(tensors), None)[[0, 2]].tolist()] == [1.0, 0.0]
    assert meter.read([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(11,), (7, 5), (4, 3, 2)])
def test_sparse_entries_at_the_same_place_add_up_as_in_the_dense_form(
    dtype: Any, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    for sparse_dims in range(1, len(shape) + 1):
        places = torch.stack(
            [torch.randint(size, (60,), generator=generator) for size in shape[:sparse_dims]]
        )
        entries = torch.randn(60, *shape[sparse_dims:], generator=generator).to(dtype)
        tensor = torch.sparse_coo_tensor(places, entries, shape)
        want = finished(Meter().read([tensor.to_dense()]), None)[0]
        assert finished(Meter().read([tensor]), None)[0].tolist() == pytest.approx(want.tolist(), rel=1e-14)
        v2 = float(torch.norm(tensor.to(torch.float64)).to(torch.float32))
        assert read(tensor, as_msprobe=True)[3] == v2
