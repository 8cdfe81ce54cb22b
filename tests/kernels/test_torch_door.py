"""torch tensors through the C exchange table of their type."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

from tests.awkward import DTYPES, make
from tests.kernels.compare import assert_record
from trainmon.ops import multi_norm, plain_read, scan_nonfinite, tensor_stats

torch = pytest.importorskip("torch", reason="torch is not installed")
exchange = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no C exchange table"
)

TYPES = sorted(name for name in DTYPES if hasattr(torch, name))


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    """The same bits, contiguous."""
    codes = (
        torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        if array.size
        else torch.empty(0, dtype=torch.uint8)
    )
    return codes.view(getattr(torch, array.dtype.name)).reshape(array.shape)


@pytest.mark.parametrize("values", ["bits", "ordinary", "tiny", "zeros"])
@pytest.mark.parametrize("dtype", TYPES)
def test_dtypes(dtype: str, values: str) -> None:
    array = make(dtype, "cube", values)
    assert_record(tensor_stats(to_torch(array))[0], array)
    assert_record(tensor_stats([to_torch(array)])[0], array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64"])
def test_layouts(dtype: str) -> None:
    if dtype not in TYPES:
        pytest.skip(f"this torch has no {dtype}")
    array = make(dtype, "cube", "bits")
    tensor = to_torch(array)
    pairs = [
        (tensor.permute(2, 0, 1), array.transpose(2, 0, 1)),
        (tensor[:, 1::2], array[:, 1::2]),
        (tensor[:, :, 1:], array[:, :, 1:]),
        (tensor[1, 2, 0], array[1, 2, 0:1]),
        (tensor[:0], array[:0]),
        (tensor[:, :, :1].expand(-1, -1, 5), np.broadcast_to(array[:, :, :1], (2, 20, 5))),
        (tensor.reshape(-1)[3:], array.reshape(-1)[3:]),
    ]
    for view, expected in pairs:
        assert_record(tensor_stats(view)[0], expected)
        with_gradient = tensor_stats([view.detach().requires_grad_() if view.is_floating_point() else view])
        assert_record(with_gradient[0], expected)


def test_parameters_and_gradients() -> None:
    weight = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    assert multi_norm(weight) == 5
    assert multi_norm([weight, weight.detach(), torch.ones(0)]) == pytest.approx(50**0.5, rel=1e-15)
    (weight * 2).sum().backward()
    assert multi_norm(weight.grad) == 4
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    expected = torch.nn.utils.get_total_norm([p.detach().double() for p in model.parameters()])
    assert multi_norm(model.parameters()) == pytest.approx(float(expected), rel=1e-13)
    assert multi_norm(torch.nn.ParameterList(model.parameters())) == multi_norm(model.parameters())


def test_zero_dimensions_and_scans() -> None:
    assert multi_norm(torch.tensor(-2.5)) == 2.5
    assert multi_norm(torch.tensor(-2.5, requires_grad=True)) == 2.5
    found = scan_nonfinite(
        {"a": torch.ones(2), "b": torch.tensor([1, float("-inf")])}.values(), names=["a", "b"]
    )
    assert found is not None
    assert (found.name, found.index, found.kind) == ("b", 1, "-inf")


def test_subclasses() -> None:
    class Mine(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    assert multi_norm(torch.tensor([3.0, 4.0]).as_subclass(Mine)) == 5


def test_a_subclass_can_die() -> None:
    """The module remembers tensor types without keeping them."""

    def use() -> weakref.ref[Any]:
        class Gone(torch.Tensor):  # type: ignore[misc, name-defined]
            pass

        assert multi_norm(torch.tensor([3.0, 4.0]).as_subclass(Gone)) == 5
        return weakref.ref(Gone)

    dead = [use() for _ in range(20)]
    gc.collect()
    assert not any(ref() for ref in dead)
    assert multi_norm(torch.tensor([3.0, 4.0])) == 5


def cases_refused() -> dict[str, tuple[Any, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "meta": (torch.ones(2, device="meta"), "on device 'meta'"),
            "sparse": (torch.ones(2).to_sparse(), "gives no view of its memory"),
            "complex": (torch.ones(2, dtype=torch.complex64), "complex64 can't be read"),
            "conjugate": (torch.ones(2, dtype=torch.complex64).conj(), "complex64 can't be read"),
            "quantized": (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "gives no view"),
        }


@exchange
@pytest.mark.parametrize("name", ["meta", "sparse", "complex", "conjugate", "quantized"])
def test_refusals(name: str) -> None:
    tensor, words = cases_refused()[name]
    with pytest.raises(TypeError, match=rf"tensors\[1\] \('w'\): .*{words}") as caught:
        tensor_stats([torch.ones(1), tensor], names=["v", "w"])
    assert "\n" not in str(caught.value)


@exchange
@pytest.mark.parametrize("shape", [(4,), (2, 3), (1,), (), (1, 1)])
def test_a_negative_bit_is_refused(shape: tuple[int, ...]) -> None:
    """The imaginary part of a conjugate: memory holds the opposite sign."""
    view = torch.complex(torch.ones(shape), torch.full(shape, 2.0)).conj().imag
    assert view.is_neg()
    for tensor in (view, view.unsqueeze(0)):
        with pytest.raises(TypeError, match=r"negative bit set.*resolve_neg"):
            multi_norm(tensor)
    assert tensor_stats(view.resolve_neg())[0]["max"] == -2


@exchange
def test_a_wrapper_without_memory_is_refused() -> None:
    class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32, device="cpu")

        __torch_dispatch__ = classmethod(lambda cls, *rest, **options: NotImplemented)  # demanded by torch

    with pytest.raises(TypeError, match=r"tensors\[0\]: .*(no host memory|gives no view of its memory)"):
        multi_norm(Wrapper())


def test_references_and_inputs() -> None:
    tensors = [torch.randn(7), torch.nn.Parameter(torch.randn(3, 4)), torch.randn(4, 6).t()]
    bits = [tensor.detach().numpy().tobytes() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(10):
        tensor_stats(tensors)
        multi_norm(tensors, per_tensor=True)
        scan_nonfinite(tensors)
        plain_read(tensors)
        with pytest.raises(TypeError):
            multi_norm([*tensors, torch.ones(1, dtype=torch.complex64)])
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
    assert [tensor.detach().numpy().tobytes() for tensor in tensors] == bits
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("major", [1, 2])
def test_a_foreign_table_is_used_by_its_version(major: int) -> None:
    """A type with a table of its own, as another framework would bring; version 2 must be left alone."""
    import ctypes

    from tests.kernels.test_dlpack_door import Producer, Tensor, api, int64s

    shape, called = int64s([2]), []

    def export(address: int, out: Any) -> int:
        called.append(address)
        tensor = values.array
        out[0] = Tensor(tensor.ctypes.data, 1, 0, 1, 2, 64, 1, shape, None, 0)
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Tensor))(export)

    class Table(ctypes.Structure):
        _fields_ = [
            ("version", ctypes.c_uint32 * 2),
            ("previous", ctypes.c_void_p),
            ("functions", ctypes.c_void_p * 5),
        ]

    address = ctypes.cast(function, ctypes.c_void_p).value
    table = Table(
        (ctypes.c_uint32 * 2)(major, 0), None, (ctypes.c_void_p * 5)(None, None, None, address, None)
    )
    name = b"dlpack_exchange_api"

    class Foreign(Producer):
        __dlpack_c_exchange_api__ = api.PyCapsule_New(ctypes.addressof(table), name, None)

    values = Foreign([3.0, 4.0])
    assert multi_norm(values) == 5
    assert multi_norm([values]) == 5
    assert (len(called), len(values.options)) == ((2, 0) if major == 1 else (0, 2))
