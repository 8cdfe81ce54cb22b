"""What the extension does to its process: import, environment, fork, threads, memory, interpreters."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.awkward import make
from tests.kernels.child import SANITIZED, output, run
from trainmon.ops import cpu_info, multi_norm, scan_nonfinite, tensor_stats

real_memory = pytest.mark.skipif(SANITIZED, reason="the sanitizer keeps freed memory")


def test_an_unknown_tier_warns_and_runs_the_best() -> None:
    best = cpu_info()["available"][-1]
    code = "from trainmon.ops import cpu_info; print(cpu_info()['tier'], cpu_info()['requested'])"
    done = run(code, TRAINMON_CPU="sse9")
    assert done.stdout.split() == [best, "sse9"]
    assert "RuntimeWarning" in done.stderr
    assert "sse9" in done.stderr
    assert "sse9" not in run(code, "-W", "ignore", TRAINMON_CPU="sse9").stderr


def test_the_warning_can_be_an_error() -> None:
    done = run("import trainmon.ops", "-W", "error::RuntimeWarning", TRAINMON_CPU="sse9")
    assert done.returncode == 1
    assert "RuntimeWarning: trainmon" in done.stderr


@pytest.mark.parametrize("tier", ["avx2", "avx512"])
def test_a_tier_beyond_the_machine_warns(tier: str) -> None:
    if tier in cpu_info()["available"]:
        pytest.skip(f"this machine has {tier}")
    done = run("from trainmon.ops import cpu_info; print(cpu_info()['tier'])", TRAINMON_CPU=tier)
    assert done.stdout.split() == [cpu_info()["available"][-1]]
    assert "RuntimeWarning" in done.stderr


def test_an_available_tier_does_not_warn() -> None:
    for tier in [*cpu_info()["available"], ""]:
        done = run("from trainmon.ops import cpu_info; print(cpu_info()['tier'])", TRAINMON_CPU=tier)
        assert done.stderr == ""
        assert done.stdout.strip() == (tier or cpu_info()["available"][-1])


def test_subnormals_survive_the_import() -> None:
    code = """
import numpy as np
tiny = np.float64(5e-324), np.float32(1e-45)
import trainmon.ops
trainmon.ops.build_info()
assert trainmon.ops.multi_norm(np.array([5e-324])) == 5e-324
print(float(tiny[0] * np.float64(1)) > 0, float(tiny[1] * np.float32(1)) > 0, 2.0**-1074 > 0, 1e-310 / 2 > 0)
"""
    assert output(code).split() == ["True"] * 4


def test_import_again() -> None:
    code = """
import sys, numpy as np
import trainmon._core as first
del sys.modules["trainmon._core"]
import trainmon; del trainmon._core
import trainmon._core as second
assert first is not second
a = np.array([3.0, 4.0])
print(first.multi_norm(a, 0, False, 1), second.multi_norm(a, 0, False, 1))
del first, second, sys.modules["trainmon._core"], trainmon._core
import gc; gc.collect()
from trainmon import _core
print(_core.multi_norm(a, 0, False, 1))
"""
    assert output(code).split() == ["5.0", "5.0", "5.0"]


def test_a_subinterpreter_is_refused_cleanly() -> None:
    code = """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
import trainmon._core
made = interpreters.create()
script = '''
try:
    import trainmon._core
    print("loaded")
except ImportError as error:
    print("refused")
'''
try:
    interpreters.run_string(made, script)
except AttributeError:
    interpreters.exec(made, script)
"""
    assert output(code).split() == ["refused"]


def test_no_warning_in_development_mode() -> None:
    code = """
import numpy as np
from tests.awkward import DTYPES, LAYOUTS, make
from trainmon.ops import build_info, cpu_info, merge_stats, multi_norm, scan_nonfinite, tensor_stats
for dtype in ("float64", "bfloat16", "int8"):
    tensors = [make(dtype, layout, "bits") for layout in LAYOUTS]
    tensors.append(make(dtype, "misaligned", "bits", n=200000))
    merge_stats(tensor_stats(tensors, threads=2))
    multi_norm(tensors, per_tensor=True)
    scan_nonfinite(tensors)
    multi_norm((bytearray(8), "bf16"))
    for bad in (None, np.ones(2, ">f4"), (b"1", "bf16")):
        try:
            multi_norm([*tensors, memoryview(b"12"), bad])
        except (TypeError, ValueError):
            pass
build_info(), cpu_info()
print("done")
"""
    done = run(code, "-X", "dev", "-W", "error", PYTHONMALLOC="debug")
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("done\n", "")


@real_memory
def test_memory_does_not_grow() -> None:
    code = """
from tests.memory import peak
import numpy as np
from tests.awkward import LAYOUTS, make
from trainmon.ops import merge_stats, multi_norm, scan_nonfinite, tensor_stats

tensors = [make("float32", layout, "seeded") for layout in LAYOUTS] * 5
names = [str(i) for i in range(len(tensors))]

def work(rounds):
    for _ in range(rounds):
        merge_stats(tensor_stats(tensors, names))
        multi_norm(tensors, per_tensor=True)
        multi_norm((bytearray(64), "bf16"))
        multi_norm(memoryview(b"1234")[::2])
        scan_nonfinite(tensors, names)
        for bad in (None, (b"1", "bf16"), np.ones(2, ">f4")):
            try:
                tensor_stats([*tensors, bad])
            except (TypeError, ValueError):
                pass

work(200)
before = peak()
work(3000)
print(peak() - before)
"""
    # A leak of one small object a round would be 100 KiB at least; of one view, megabytes.
    assert int(output(code)) < 64


@real_memory
def test_no_temporary_grows_with_the_input() -> None:
    code = """
from tests.memory import peak
import numpy as np
from trainmon.ops import multi_norm, scan_nonfinite, tensor_stats
array = np.ones((4096, 4096), np.float32)
views = [array, array.T, array[::-1, ::2], array.reshape(-1).view(np.uint8)[1:-3].view(np.float32)]
for view in views:
    multi_norm(view[:2])
before = peak()
for view in views:
    tensor_stats(view), multi_norm(view), scan_nonfinite(view)
print(peak() - before)
"""
    grown = int(output(code))
    assert grown < 4096  # KiB, of 65,536 in the array


@pytest.mark.parametrize("threads", [1, 2])
def test_fork_after_use_and_use_after_fork(threads: int) -> None:
    code = f"""
import os, numpy as np
from trainmon.ops import build_info, multi_norm, tensor_stats
array = np.ones(10_000_000, np.float32)
def work():
    assert build_info()["blas"]["works"]
    assert tensor_stats(array, threads={threads})[0]["sum"] == 10_000_000
    return float(multi_norm(array, threads={threads}))
first = work()
child = os.fork()
if child == 0:
    os._exit(0 if work() == first else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), work() == first)
"""
    assert output(code, timeout=60).split() == ["0", "True"]


def test_first_use_in_a_forked_child() -> None:
    code = """
import os, numpy as np
from trainmon.ops import build_info, multi_norm
child = os.fork()
if child == 0:
    ok = build_info()["blas"]["works"] and multi_norm(np.ones(9_000_000), threads=2) == 3000
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), multi_norm(np.ones(4)))
"""
    assert output(code, timeout=60).split() == ["0", "2.0"]


def test_eight_threads_at_once() -> None:
    tensors = [
        make(dtype, layout, "seeded", n=70000)
        for dtype in ("float32", "bfloat16")
        for layout in ("contiguous", "reversed")
    ]
    expected = tensor_stats(tensors).tobytes(), repr(multi_norm(tensors)), repr(scan_nonfinite(tensors))
    problems: list[object] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            got = (
                tensor_stats(tensors, threads=2).tobytes(),
                repr(multi_norm(tensors)),
                repr(scan_nonfinite(tensors)),
            )
            if got != expected:
                problems.append(got)
            try:
                multi_norm([*tensors, None])
                problems.append("no error")
            except TypeError:
                pass

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert problems == []


def test_other_threads_run_during_large_work() -> None:
    """The GIL is dropped: a waiting thread gets to run while one call reads."""
    array = np.broadcast_to(np.float32(1), (400, 1_000_000))
    ran, running = [], threading.Event()

    def watch() -> None:
        running.set()
        while not done.is_set():
            ran.append(None)
            done.wait(0.001)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    running.wait()
    before = len(ran)
    multi_norm(array)
    during = len(ran) - before
    done.set()
    watcher.join()
    assert during >= 2


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # NumPy 2.5; the point here
def test_the_array_may_get_another_shape_meanwhile() -> None:
    """Shapes and strides are copied before the GIL is dropped."""
    array = np.ones((64, 70000), np.float32)[:, ::-1]
    stop = threading.Event()

    def reshape() -> None:
        while not stop.is_set():
            views.append(array[:])
            views[-1].shape = (64, 70000)
            views.clear()

    views: list[object] = []
    worker = threading.Thread(target=reshape)
    worker.start()
    try:
        for _ in range(5):
            assert multi_norm(array, 1) == 64 * 70000
    finally:
        stop.set()
        worker.join()


def test_a_missing_extension_is_told_in_one_sentence() -> None:
    code = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "trainmon._core":
            raise ModuleNotFoundError("No module named 'trainmon._core'", name=name)
sys.meta_path.insert(0, Hide())
try:
    import trainmon.ops
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert "compiled extension is missing: build it with `pip install .`" in output(code)


def test_import_of_the_package_loads_nothing() -> None:
    heavy = ("numpy", "trainmon._core", "torch", "rich")
    code = f"import sys, trainmon; print([m for m in {heavy} if m in sys.modules])"
    assert output(code).strip() == "[]"
