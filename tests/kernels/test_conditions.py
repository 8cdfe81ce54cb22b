"""What every call of calls.py must stand beyond its own tests: memory that ends inside the core, a wrong argument at any
place, doors that fail, arrays beyond 2^31 elements; the processor's floating-point state stays as it was."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import campaign
from tests.awkward import DTYPES, FLOATS, VALUES
from tests.kernels.calls import CALLS, arrays_in, call, canonical, tensors
from tests.kernels.child import SANITIZED, output
from trainmon import ops


@pytest.fixture(scope="module")
def failing_malloc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of failing_malloc.c."""
    compiler = os.environ.get("CC", "cc").split()
    if SANITIZED or sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("needs glibc, without a sanitizer's own malloc")
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("malloc") / "failing_malloc.so"
    source = Path(__file__).with_name("failing_malloc.c")
    subprocess.run([*compiler, "-O2", "-fPIC", "-shared", "-o", str(built), str(source)], check=True)
    return built


def test_each_allocation_of_the_core_fails_once(failing_malloc: Path) -> None:
    """MemoryError or the right result, and no input is held on to."""
    code = """
import ctypes, gc, sys
from tests.kernels.calls import CALLS, arrays_in, call, canonical, tensors
from trainmon import _core

fail = ctypes.CDLL(None).fail_allocation
fail.argtypes, fail.restype = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_long], ctypes.c_long
with open("/proc/self/maps") as maps:
    spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(_core.__file__)]
first, last = int(spans[0][0], 16), int(spans[-1][1], 16)
failures = {}
for name in CALLS:
    expected = canonical(call(name, *CALLS[name].arguments(tensors())))
    fail(first, last, -1)
    call(name, *CALLS[name].arguments(tensors()))
    made = fail(0, 0, -1)
    failures[name] = 0
    for number in range(made + 1):
        arguments = CALLS[name].arguments(tensors())
        held = [*arrays_in(arguments)]
        gc.collect()
        before = [sys.getrefcount(item) for item in held]
        fail(first, last, number)
        try:
            result = call(name, *arguments)
        except MemoryError:
            result = None
        finally:
            fail(0, 0, -1)
        failures[name] += result is None
        assert result is None or canonical(result) == expected, (name, number)
        del result
        gc.collect()
        assert [sys.getrefcount(item) for item in held] == before, (name, number)
print(sum(count > 0 for count in failures.values()) >= 4, failures)
"""
    assert output(code, timeout=300, LD_PRELOAD=str(failing_malloc)).startswith("True"), (
        "too few allocations seen"
    )


# ---- a wrong argument at any place ----


class Planned(Exception):
    """What the doors below raise."""


class FailingDlpack:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        raise Planned


class FailingDevice:
    def __dlpack_device__(self) -> tuple[int, int]:
        raise Planned

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("asked for memory on an unknown device")


class NoCapsule(FailingDlpack):
    def __dlpack__(self, **_: object) -> object:
        return "no capsule"


class FailingIterator:
    def __iter__(self) -> Iterator[object]:
        yield np.ones(3, np.float32)
        raise Planned


class FailingNumber:
    def _fail(self) -> Any:
        raise Planned

    __index__ = __float__ = __bool__ = __len__ = _fail


WRONG: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "object": object,
    "text": lambda: "text",
    "bytes": lambda: b"123",
    "true": lambda: True,
    "negative": lambda: -1,
    "large": lambda: 2**70,
    "nan": lambda: float("nan"),
    "byte-swapped": lambda: np.ones((3, 5), ">f4"),
    "complex": lambda: np.ones((3, 5), np.complex64),
    "objects": lambda: np.array([[None, 1]]),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [0, 1]),
    "empty": lambda: np.ones((0, 3), np.float32),
    "many axes": lambda: np.ones((1,) * 12, np.float32),
    "tag without memory": lambda: (None, "bf16"),
    "unknown tag": lambda: (b"1234", "no_such_dtype"),
    "odd bytes": lambda: (b"123", "bf16"),
    "failing __dlpack__": FailingDlpack,
    "failing device": FailingDevice,
    "no capsule": NoCapsule,
    "failing iterator": FailingIterator,
    "failing number": FailingNumber,
}

# No array at all, wherever it stands.
REFUSED = (
    "None",
    "object",
    "byte-swapped",
    "complex",
    "objects",
    "masked",
    "unknown tag",
    "odd bytes",
    "no capsule",
    "failing __dlpack__",
    "failing device",
)


def _places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be put into nested tuples, lists and dictionaries."""
    if path:
        yield path
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _places(item, (*path, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {
            key: _replaced(item, path[1:], new) if key == path[0] else item for key, item in value.items()
        }
    return type(value)(
        _replaced(item, path[1:], new) if i == path[0] else item for i, item in enumerate(value)
    )


def _references(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(item) for item in objects]


def _are_references(objects: list[Any], expected: list[int]) -> bool:
    if _references(objects) != expected:
        gc.collect()
    return _references(objects) == expected


def _chain(error: BaseException | None) -> list[BaseException]:
    return [] if error is None else [error, *_chain(error.__cause__ or error.__context__)]


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_at_any_place(name: str) -> None:
    """A TypeError, a ValueError or an OverflowError, or what the object itself raised; and nothing else has changed."""
    expected = canonical(call(name, *CALLS[name].arguments(tensors())))
    planned = 0
    for path in list(_places(CALLS[name].arguments(tensors()))):
        for what, make_wrong in WRONG.items():
            arguments, wrong = CALLS[name].arguments(tensors()), make_wrong()
            changed = _replaced(arguments, path, wrong)
            held = [*arrays_in(changed), *([] if isinstance(wrong, (int, type(None))) else [wrong])]
            contents = [array.tobytes() for array in arrays_in(changed)]
            references = _references(held)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "error", np.exceptions.ComplexWarning
                    )  # no part of a number is dropped
                    call(name, *changed)
            except (TypeError, ValueError, OverflowError, Planned) as error:
                planned += any(isinstance(each, Planned) for each in _chain(error))
                assert str(error) or isinstance(error, Planned), (path, what)
                error.__traceback__ = None
                assert [array.tobytes() for array in arrays_in(changed)] == contents, (path, what)
            except FileNotFoundError:  # a text is a path
                assert name == "file_digest", (path, what)
            except (AttributeError, IndexError):  # of the Call's own code
                assert CALLS[name].use is not None, (path, what)
            assert _are_references(held, references), (path, what)
    if CALLS[name].any_tensors:
        assert planned, "no door failed"
    assert canonical(call(name, *CALLS[name].arguments(tensors()))) == expected


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_keyword(name: str) -> None:
    arguments = CALLS[name].arguments(tensors())
    held = list(arrays_in(arguments))
    references = _references(held)
    with pytest.raises(TypeError, match="no_such_keyword"):
        getattr(ops, name)(*arguments, no_such_keyword=1)
    assert _are_references(held, references)


# ---- the processor's floating-point state ----


def test_the_floating_point_state_stays() -> None:
    """Rounding, flush-to-zero, denormals-are-zero and the masks of exceptions: the control registers themselves."""
    code = """
import ctypes, ctypes.util, platform
import numpy
libm = ctypes.CDLL(ctypes.util.find_library("m"))

def state():
    words = (ctypes.c_uint32 * 16)()  # glibc: x87 environment, then MXCSR; on aarch64 FPCR, FPSR
    assert libm.fegetenv(words) == 0
    return (words[0] & 0xFFFF, words[7] & 0xFFC0) if platform.machine() == "x86_64" else words[0]

first = state()
import trainmon.ops
assert state() == first, "import"
from tests.kernels.calls import CALLS, call, tensors
for name in CALLS:
    call(name, *CALLS[name].arguments(tensors()))
    assert state() == first, name
print(first)
"""
    if sys.platform != "linux":
        pytest.skip("reads glibc's environment")
    if os.uname().machine == "x86_64":
        assert (
            output(code).strip() == "(895, 8064)"
        )  # what a process starts with: round to nearest, no FTZ, no DAZ
    else:
        assert output(code).strip() == "0"


# ---- beyond 2^31 elements ----

BEYOND = 2**31 + 5
# What needs working memory in proportion to a row.
MOST = {"stable_rank": 2**16}
# Takes a matrix in Fortran's order by its columns: as right, with other bits.
LAYOUT_DECIDES = {"stable_rank"}
TAKES_TENSORS = [name for name, entry in CALLS.items() if entry.any_tensors]


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [name for name in TAKES_TENSORS if name != "stage_size"]
)  # which reads no element
def test_the_last_of_many_elements_counts(name: str) -> None:
    """Zeros that take no memory, then one NaN: the result must tell. In the long form beyond 2^31 elements."""
    n = campaign.size(2**24 + 5, BEYOND)
    n = min(n, MOST.get(name, n))
    memory = np.zeros(n, np.uint8)
    array = memory.view(ml_dtypes.float8_e5m2)
    zeros = canonical(call(name, *CALLS[name].arguments([array])))
    memory[-1] = 0x7F
    if name == "sign_agreement":
        memory[-1] = 0x3C  # 1: NaN has no sign, as 0 has none
    assert canonical(call(name, *CALLS[name].arguments([array]))) != zeros


def test_beyond_two_to_the_31() -> None:
    """What is fast enough for every run, at exact positions: memory that is not there, and one element broadcast."""
    memory = np.zeros(BEYOND, np.uint8)
    memory[-2:] = 0x7F
    array = memory.view(ml_dtypes.float8_e5m2)
    found = ops.scan_nonfinite(array)
    assert found is not None
    assert (found.index, found.kind) == (BEYOND - 2, "nan")
    record = ops.tensor_stats(array)
    assert (record["n"][0], record["n_nan"][0], record["first_bad"][0]) == (BEYOND, 2, BEYOND - 2)
    assert record["n_zero"][0] == BEYOND - 2
    ones = np.broadcast_to(np.int8(-1), (2**16, 2**15 + 1))
    assert ops.multi_norm(ones, 1) == ones.size > 2**31
    assert ops.multi_norm(ones[::-1, ::-1], np.inf) == 1


# ---- doors, layouts, dtypes at random ----


def _random_view(rng: np.random.Generator, dtypes: Sequence[str]) -> np.ndarray[Any, Any]:
    """A view of random memory: dtype, shape, steps, order, broadcast axes, byte offset."""
    dtype = DTYPES[str(rng.choice(dtypes))]
    shape = tuple(int(length) for length in rng.integers(0, 9, rng.integers(0, 5)))
    values = VALUES[rng.choice(sorted(VALUES))](dtype, max(int(np.prod(shape)), 1), rng)
    offset = int(rng.integers(0, dtype.itemsize + 1))
    memory = np.zeros(values.nbytes + offset, np.uint8)
    memory[offset:] = values.view(np.uint8)
    view = np.ndarray(shape, dtype, memory, offset)
    steps = rng.choice([-3, -2, -1, 1, 2, 3], len(shape))
    view = view[(..., *(slice(None, None, step) for step in steps))].transpose(rng.permutation(len(shape)))
    if rng.integers(4) == 0:
        view = np.broadcast_to(view, (int(rng.integers(0, 4)), *view.shape))
    return view


def _through_a_door(view: np.ndarray[Any, Any], rng: np.random.Generator) -> object:
    """The same elements as an object of another kind, where there is one."""
    kind = rng.integers(5)
    contiguous = view.copy(order="C")
    if kind == 0 and view.dtype.isbuiltin == 1 and view.dtype.kind != "b":
        return memoryview(contiguous)
    if kind == 1 and view.dtype.isbuiltin == 1:
        return _Dlpack(contiguous)
    if kind == 2 and view.ndim == 1 and view.size:
        return contiguous.tobytes(), view.dtype.name
    if kind == 3 and view.size:
        return contiguous.view(f"u{view.dtype.itemsize}"), view.dtype.name
    return view


class _Dlpack:
    """Nothing but a DLPack producer."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> object:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _outcome(name: str, arguments: tuple[Any, ...]) -> object:
    try:
        return canonical(call(name, *arguments))
    except (TypeError, ValueError) as error:
        return type(error)


@pytest.mark.soak
@pytest.mark.parametrize("name", TAKES_TENSORS)
def test_any_list_through_any_door(name: str) -> None:
    """Bits and refusals depend on the elements, not on how they lie and come; a wrong object among them is refused."""
    rng = np.random.default_rng([7, *name.encode()])
    deadline = time.monotonic() + campaign.size(5, 120)
    for _ in range(campaign.size(150, 10**6)):
        if time.monotonic() > deadline:
            break
        dtypes = (FLOATS, tuple(DTYPES), (str(rng.choice(FLOATS)),))[rng.integers(3)]
        views = [_random_view(rng, dtypes) for _ in range(rng.integers(0, 5))]
        plain = [view.copy(order="C") for view in views]
        expected = _outcome(name, CALLS[name].arguments(plain))
        # A call that writes takes its second list from copies, and copies are of arrays only.
        objects = [view if CALLS[name].writes else _through_a_door(view, rng) for view in views]
        contents = [view.tobytes() for view in views]
        got = _outcome(name, CALLS[name].arguments(objects))
        assert type(got) is type(expected) if name in LAYOUT_DECIDES else got == expected
        assert [view.tobytes() for view in views] == contents
        wrong = WRONG[str(rng.choice(sorted(REFUSED)))]()
        objects.insert(int(rng.integers(0, len(objects) + 1)), wrong)
        with pytest.raises((TypeError, ValueError, Planned)):
            call(name, *CALLS[name].arguments(objects))


def _apart(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Every second element along each axis, backwards."""
    room = np.zeros([2 * length for length in array.shape], array.dtype)
    view = room[tuple(slice(None, None, -2) for _ in array.shape)]
    view[...] = array
    return view


def _misaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = np.ndarray(array.shape, array.dtype, memory, 1)
    view[...] = array
    return view


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = array.copy(order="C")
    view.flags.writeable = False
    return view


OTHER_LAYOUTS: tuple[Callable[[np.ndarray[Any, Any]], object], ...] = (
    _apart,
    _misaligned,
    _read_only,
    np.asfortranarray,
)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in LAYOUT_DECIDES])
def test_the_layout_of_any_argument(name: str) -> None:
    """Strided, misaligned, read-only, in Fortran's order: the same result as from the argument as it was."""
    arguments = CALLS[name].arguments(tensors())
    expected = canonical(call(name, *arguments))
    for path in _places(arguments):
        for other in OTHER_LAYOUTS:
            arguments = CALLS[name].arguments(tensors())
            array = arguments
            for step in path:
                array = array[step]
            if isinstance(array, np.ndarray) and array.ndim and path[0] not in CALLS[name].writes:
                result = call(name, *_replaced(arguments, path, other(array)))
                assert canonical(result) == expected, (path, other)
