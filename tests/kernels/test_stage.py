"""stage against its twin: the arena byte for byte, records and fingerprints as the single functions give them."""

from __future__ import annotations

import mmap
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.awkward import DTYPES, LAYOUTS, arrays, make
from tests.kernels.child import digests, output
from tests.twins.fingerprints import stage_twin
from trainmon.ops import Staged, fingerprint, stage, stage_size, tensor_stats


def assert_staged(staged: Staged, tensors: list[Any], bits: Any = 128) -> None:
    twin, offsets = stage_twin(tensors)
    assert staged.arena[: len(twin)].tobytes() == twin
    assert staged.offsets.tolist() == offsets
    assert staged.stats.tobytes() == tensor_stats(tensors).tobytes()
    assert staged.fingerprints == fingerprint(tensors, bits=bits)
    for view, tensor, dtype in zip(staged.views, tensors, staged.dtypes, strict=True):
        assert (view.dtype, view.shape, dtype) == (tensor.dtype, tensor.shape, tensor.dtype.name)
        assert view.tobytes() == tensor.tobytes()
        assert view.size == 0 or np.shares_memory(view, staged.arena)
        assert view.flags.writeable


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout))
    assert_staged(stage(tensors), tensors)


def test_everything_at_once() -> None:
    tensors = [make(dtype, layout, "seeded", n=150) for dtype in DTYPES for layout in LAYOUTS]
    assert_staged(stage(tensors), tensors)
    assert_staged(stage(tensors, bits=64), tensors, 64)


@pytest.mark.parametrize("skip", [0, 64, 16, 1])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e4m3fn"])
def test_large_arenas_of_any_alignment(dtype: str, skip: int) -> None:
    """Past the caches (at a multiple of 64) and through them."""
    n = 2 * 2**20 // DTYPES[dtype].itemsize
    tensors = [
        np.resize(make(dtype, "contiguous", "seeded", n=65536 + 7), n + 5),
        make(dtype, "every third", "seeded", n=3 * 70000),
        np.resize(make(dtype, "misaligned", "bits", n=9999), 2 * n),
        make(dtype, "0-d", "bits"),
    ]
    memory = np.full(stage_size(tensors) + 200, 0xEE, np.uint8)
    first = -memory.ctypes.data % 64 + skip
    staged = stage(tensors, memory[first : first + stage_size(tensors)])
    assert_staged(staged, tensors)
    assert (memory[:first] == 0xEE).all()
    assert (memory[first + stage_size(tensors) :] == 0xEE).all()


def test_sums_that_cancel_and_squares_beyond_float64() -> None:
    """What the statistics read twice."""
    tensors = [
        np.full(70000, 1e200),
        np.full(70000, 5e-324),
        1e8 + make("float64", "contiguous", "ordinary", n=70000),
    ]
    assert_staged(stage(tensors), tensors)


def test_arenas_as_they_come() -> None:
    tensors = [make("float32", "cube", "bits"), make("bfloat16", "reversed", "bits")]
    size = stage_size(tensors)
    twin, _ = stage_twin(tensors)
    assert size == len(twin)
    for arena in (
        bytearray(size),
        memoryview(bytearray(size)),
        mmap.mmap(-1, 4096),
        np.zeros((2, size), np.int16),
    ):
        staged = stage(tensors, arena)
        assert memoryview(arena).cast("B")[:size] == twin
        assert_staged(staged, tensors)
    own = stage(tensors)
    assert own.arena.nbytes == size
    assert own.arena.ctypes.data % 64 == 0


def test_what_lies_behind_stays() -> None:
    arena = np.full(200, 7, np.uint8)
    staged = stage([np.ones(3, np.uint8), np.ones(2, np.uint8)], arena)
    assert arena[3:64].tolist() == [0] * 61
    assert arena[66:].tolist() == [7] * 134
    assert staged.arena.nbytes == 200


def test_names_and_nothing() -> None:
    assert stage([np.ones(2)], names=["w"]).names == ("w",)
    nothing = stage([])
    assert (nothing.views, nothing.fingerprints, nothing.stats.size, nothing.arena.size) == ([], [], 0, 0)
    with pytest.raises(TypeError, match=r"tensors\[1\] \('b'\)"):
        stage([np.ones(2), None], names=["a", "b"])
    with pytest.raises(ValueError, match="names has 1 entries for 2"):
        stage([np.ones(2), np.ones(2)], names=["a"])


def test_refusals_come_before_any_write() -> None:
    array = np.ones(100, np.float32)
    arena = np.full(1000, 7, np.uint8)
    read_only = arena.copy()
    read_only.flags.writeable = False
    before = sys.getrefcount(array), sys.getrefcount(arena)
    for bad, message in (
        (arena[:399], "the arena has 399 bytes, the tensors need 400"),
        (arena[::2], "in C order"),
        ([arena, arena], "in C order"),
        (read_only, "read-only"),
        (b"0" * 400, "read-only"),
    ):
        with pytest.raises(ValueError, match=message):
            stage(array, bad)
    for bad in (3, None.__class__, "text"):
        with pytest.raises(TypeError, match="arena"):
            stage(array, bad)
    with pytest.raises(ValueError, match="bits must be 64 or 128"):
        stage(array, arena, bits=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads must be"):
        stage(array, arena, threads=0)
    assert (arena == 7).all()
    stage(array, arena)
    assert (sys.getrefcount(array), sys.getrefcount(arena)) == before


def test_a_tensor_in_the_arena_is_refused() -> None:
    arena = np.arange(1024, dtype=np.uint8)
    before = arena.copy()
    inside = arena[100:104].view(np.float32)
    for tensors, position in (
        ([arena[:1]], 0),
        ([np.ones(20), inside], 1),
        ([arena[700::-7]], 0),
        ([arena[512:], np.ones(1)], 0),
    ):
        with pytest.raises(ValueError, match=f"tensor {position} lies in the arena"):
            stage(tensors, arena)
    assert (arena == before).all()
    stage(arena[512:], arena[:512])  # beside each other is all right
    assert (arena[:512] == before[512:]).all()


def test_inputs_stay_unchanged() -> None:
    for layout in LAYOUTS:
        array = make("float32", layout, "bits")
        before = array.tobytes()
        stage(array)
        assert array.tobytes() == before


DIGEST = """
import hashlib, numpy as np
from tests.awkward import DTYPES, LAYOUTS, make
from trainmon.ops import cpu_info, stage
digest = hashlib.sha256()
for n in (120, 66000):
    staged = stage([make(dtype, layout, "bits", n=n) for dtype in DTYPES for layout in LAYOUTS])
    digest.update(staged.arena.tobytes() + staged.stats.tobytes() + repr(staged.fingerprints).encode())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_bytes() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_same_bytes(threads: int) -> None:
    base = np.resize(make("bfloat16", "contiguous", "seeded", n=65536 + 7), 26 * 2**20 + 5)
    tensors = [base, base[:0], base[::-1][:70000], base[:1]]
    one, many = stage(tensors), stage(tensors, threads=threads)
    assert one.arena.tobytes() == many.arena.tobytes()
    assert one.stats.tobytes() == many.stats.tobytes()
    assert one.fingerprints == many.fingerprints


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(3, 5, dtype=torch.bfloat16)[:, 1:], torch.nn.Parameter(torch.arange(4.0))]
    staged = stage(tensors)
    assert staged.dtypes == ("bfloat16", "float32")
    assert [view.shape for view in staged.views] == [(3, 4), (4,)]
    assert staged.views[0].astype(np.float32).tolist() == [[1.0] * 4] * 3


def test_without_ml_dtypes_codes_are_shown() -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from trainmon.ops import stage
staged = stage([(np.array([0x3f80], np.uint16), "bf16"), (b"a", "e4m3fn")])
print(staged.dtypes, [str(view.dtype) for view in staged.views], staged.views[0])
"""
    assert output(code).strip() == "('bfloat16', 'float8_e4m3fn') ['uint16', 'uint8'] [16256]"


def test_eight_threads_at_once_and_fork() -> None:
    tensors = [make("float32", layout, "seeded", n=70000) for layout in ("contiguous", "reversed")]
    expected = stage(tensors).arena.tobytes()
    problems: list[object] = []

    def work() -> None:
        arena = bytearray(stage_size(tensors))
        for _ in range(20):
            stage(tensors, arena, threads=2)
            if arena != expected:
                problems.append(arena)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert problems == []
    code = """
import os, mmap, numpy as np
from trainmon.ops import stage, stage_size
array = np.arange(10_000_000, dtype=np.float32)
arena = mmap.mmap(-1, stage_size(array))  # shared with the child
first = stage(array, threads=2)
child = os.fork()
if child == 0:
    os._exit(0 if stage(array, arena, threads=2).fingerprints == first.fingerprints else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), memoryview(arena) == memoryview(first.arena))
"""
    assert output(code, timeout=60).split() == ["0", "True"]
