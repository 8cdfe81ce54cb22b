"""`__dlpack__` of a producer written in Python: old and versioned capsules, devices, lifetimes, refusals."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from trainmon.ops import multi_norm, scan_nonfinite

api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetName.argtypes = [ctypes.py_object]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


def int64s(values: list[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


class Producer:
    """Exports a float64 array (strides included) and counts what happens to its capsules."""

    def __init__(self, values: Any, versioned: bool = True, **changes: Any) -> None:
        self.array = np.asarray(values, np.float64)
        self.versioned, self.changes = versioned, changes
        self.device = (changes.get("device_type", 1), 0)
        self.deleted = 0
        self.options: list[dict[str, Any]] = []
        self.capsules: list[Any] = []
        self.keep: list[Any] = []

    def _delete(self, address: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.options.append(options)
        shape = int64s(list(self.array.shape))
        strides = int64s([stride // 8 for stride in self.array.strides])
        tensor = Tensor(self.array.ctypes.data, 1, 0, self.array.ndim, 2, 64, 1, shape, strides, 0)
        deleter = DELETER(self._delete)
        for name, value in self.changes.items():
            if name in dict(Tensor._fields_):
                setattr(tensor, name, value)
        if self.versioned:
            managed: Any = Versioned(
                self.changes.get("major", 1), 0, None, deleter, 1, tensor
            )  # 1: read-only
            name = b"dltensor_versioned"
        else:
            managed, name = Managed(tensor, None, deleter), b"dltensor"
        self.keep += [shape, strides, deleter, managed]
        capsule = api.PyCapsule_New(ctypes.addressof(managed), self.changes.get("name", name), None)
        self.capsules.append(capsule)
        return capsule


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    "values", [np.arange(12.0).reshape(3, 4)[:, ::-1], np.float64(-2.5), np.empty((0, 3)), np.ones((2, 3)).T]
)
def test_capsules(values: Any, versioned: bool) -> None:
    producer = Producer(values, versioned)
    assert multi_norm(producer) == multi_norm(np.asarray(values))
    assert multi_norm([producer, producer], 1) == 2 * multi_norm(np.asarray(values), 1)
    assert producer.deleted == 3
    used = b"used_dltensor_versioned" if versioned else b"used_dltensor"
    assert [api.PyCapsule_GetName(capsule) for capsule in producer.capsules] == [used] * 3


def test_version_is_asked_for() -> None:
    producer = Producer([3.0, 4.0])
    multi_norm(producer)
    assert producer.options == [{"max_version": (1, 0)}]


def test_a_producer_from_before_versions() -> None:
    class Old(Producer):
        def __dlpack__(self) -> Any:  # type: ignore[override]
            return super().__dlpack__()

    producer = Old([3.0, 4.0], versioned=False)
    assert multi_norm(producer) == 5
    assert (producer.options, producer.deleted) == ([{}], 1)


def test_byte_offset_and_null_strides() -> None:
    assert multi_norm(Producer([9.0, 3.0, 4.0], byte_offset=8, shape=int64s([2]))) == 5
    assert multi_norm(Producer([[3.0, 4.0]], strides=ctypes.POINTER(ctypes.c_int64)())) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lanes": 2}, "2 lanes"),
        ({"code": 5, "bits": 64}, "complex64"),
        ({"bits": 128}, "float128"),
        ({"code": 17, "bits": 4}, "DLPack code 17, 4 bits"),
        ({"major": 2}, "DLPack version 2.0 is not 1.x"),
        ({"ndim": 65}, "65 axes"),
        ({"ndim": -1}, "-1 axes"),
        ({"data": None}, "no host memory"),
        ({"name": b"dltensor_other"}, "no unused DLPack capsule"),
        ({"name": b"used_dltensor_versioned"}, "no unused DLPack capsule"),
    ],
)
def test_refusals_delete_exactly_once(changes: dict[str, Any], words: str) -> None:
    producer = Producer([3.0, 4.0], **changes)
    with pytest.raises(TypeError, match=rf"tensors\[1\]: .*{words}"):
        multi_norm([np.ones(1), producer])
    assert producer.deleted == (0 if "name" in changes else 1)


@pytest.mark.parametrize(("shape", "words"), [([-1], "negative length"), ([2**62, 2**62], "more elements")])
def test_impossible_shapes(shape: list[int], words: str) -> None:
    producer = Producer(np.ones((1,) * len(shape)), shape=int64s(shape))
    with pytest.raises(ValueError, match=words):
        multi_norm(producer)
    assert producer.deleted == 1


def test_an_impossible_stride() -> None:
    producer = Producer(np.ones(2), strides=int64s([2**62]))
    with pytest.raises(ValueError, match="stride 4611686018427387904 is out of range"):
        multi_norm(producer)
    assert producer.deleted == 1


def test_an_empty_axis_wins_over_an_overflow() -> None:
    assert multi_norm(Producer(np.ones((1, 1, 1)), shape=int64s([2**62, 2**62, 0]))) == 0


@pytest.mark.parametrize(
    ("device", "words"), [(2, "type 2, CUDA"), (12, "Ascend NPU"), (99, "type 99, unknown")]
)
def test_device_memory_is_refused_without_an_export(device: int, words: str) -> None:
    producer = Producer([1.0], device_type=device)
    with pytest.raises(TypeError, match=rf"tensors\[0\] \('w'\): .*{words}"):
        scan_nonfinite([producer], names=["w"])
    assert producer.options == []


def test_the_device_is_named_as_its_tensor_names_it() -> None:
    producer = Producer([1.0], device_type=2)
    producer.device_name = "cuda:3"  # type: ignore[attr-defined]

    class Named(Producer):
        device = property(lambda self: "cuda:3", lambda self, value: None)  # type: ignore[assignment]

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 3

    with pytest.raises(TypeError, match="device 'cuda:3'"):
        multi_norm(Named([1.0]))


@pytest.mark.parametrize("device", [3, 11])
def test_pinned_host_memory_is_host_memory(device: int) -> None:
    assert multi_norm(Producer([3.0, 4.0], device_type=device)) == 5


def test_the_capsule_is_believed_over_the_declared_device() -> None:
    producer = Producer([1.0], device_type=2)
    producer.device = (1, 0)
    with pytest.raises(TypeError, match="CUDA"):
        multi_norm(producer)
    assert producer.deleted == 1


def test_gradients_are_detached() -> None:
    class Attached(Producer):
        requires_grad = True

        def detach(self) -> Producer:
            return Producer(self.array)

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("requires gradients")

    assert multi_norm(Attached([3.0, 4.0])) == 5


@pytest.mark.parametrize("error", [BufferError("busy"), RuntimeError("broken"), ValueError("odd")])
def test_an_error_of_the_producer_is_the_cause(error: Exception) -> None:
    class Failing(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            raise error

    with pytest.raises(TypeError, match=f"gives no view of its memory: {error}") as caught:
        multi_norm(Failing([1.0]))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_interrupts_pass_as_they_are(error: BaseException) -> None:
    class Failing(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            raise error

    with pytest.raises(type(error)) as caught:
        multi_norm(Failing([1.0]))
    assert caught.value is error


def test_earlier_tensors_are_released_when_a_later_one_fails() -> None:
    good = Producer([1.0])
    for _ in range(3):
        with pytest.raises(TypeError):
            multi_norm([good, None])
    assert good.deleted == 3


def test_numpys_own_capsule() -> None:
    class Wrapped:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    array = np.arange(12.0).reshape(3, 4)[:, ::-1]
    assert multi_norm(Wrapped(array)) == 22.494443758403985
    assert multi_norm(Wrapped(np.array(-2.5))) == 2.5
