"""What every public function must stand, whatever it computes: the calls of calls.py, one after the other."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.kernels.calls import CALLS, arrays_in, call, canonical, tensors
from tests.kernels.child import output
from trainmon import ops

TAKES_TENSORS = [name for name, entry in CALLS.items() if entry.any_tensors]


def test_every_public_function_and_class_is_called() -> None:
    public = {
        name
        for name in ops.__all__
        if callable(getattr(ops, name)) and not dataclasses.is_dataclass(getattr(ops, name))
    }
    assert public - CALLS.keys() == set(), "add a line for each to tests/kernels/calls.py"
    assert CALLS.keys() <= set(ops.__all__) | set(vars(ops))


def _held(arguments: tuple[Any, ...]) -> list[Any]:
    """The arrays of the arguments, and the lists that they are passed in."""
    return [*arrays_in(arguments), *(item for item in arguments if isinstance(item, list))]


def _references(objects: list[Any]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(item) for item in objects]


@pytest.mark.parametrize("name", CALLS)
def test_inputs_and_their_references_are_as_before(name: str) -> None:
    arguments = CALLS[name].arguments(tensors())
    kept = [item for i, item in enumerate(arguments) if i not in CALLS[name].writes]
    call(name, *CALLS[name].arguments(tensors()))  # whatever is made once is made now
    held, before = _held(arguments), [array.tobytes() for array in arrays_in(kept)]
    references = _references(held)
    first = canonical(call(name, *arguments))
    assert _references(held) == references
    assert [array.tobytes() for array in arrays_in(kept)] == before
    if not CALLS[name].writes:
        assert canonical(call(name, *arguments)) == first


@pytest.mark.parametrize("name", TAKES_TENSORS)
@pytest.mark.parametrize("bad", [None, np.ones(3, ">f4"), np.ones(3, np.complex64), (b"123", "bf16"), "text"])
def test_the_last_tensor_is_bad(name: str, bad: object) -> None:
    good = tensors()
    arguments = CALLS[name].arguments([*good, bad])
    before, held = [array.tobytes() for array in good], [*good, *arrays_in(bad)]
    references = _references(held)
    with pytest.raises((TypeError, ValueError), match=rf"\[{len(good)}\]"):
        call(name, *arguments)
    assert _references(held) == references
    assert [array.tobytes() for array in good] == before


@pytest.mark.parametrize("name", CALLS)
def test_eight_threads_at_once(name: str) -> None:
    expected = canonical(call(name, *CALLS[name].arguments(tensors())))
    problems: list[object] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        try:
            barrier.wait()
            for _ in range(5):
                got = canonical(call(name, *CALLS[name].arguments(tensors())))
                if got != expected:
                    problems.append(got)
        except Exception as error:
            problems.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert problems == []


def test_fork_before_and_after_use() -> None:
    code = """
import os
from tests.kernels.calls import CALLS, call, canonical, tensors

def work():
    return [canonical(call(name, *CALLS[name].arguments(tensors()))) for name in CALLS]

def child(expected):
    process = os.fork()
    if process == 0:
        done = work()
        os._exit(expected is not None and done != expected)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

print(child(None), end=" ")
first = work()
print(child(first), work() == first)
"""
    assert output(code, timeout=60).split() == ["0", "0", "True"]


def test_subnormals_survive_every_call() -> None:
    """No call sets flush-to-zero, in the calling thread or in those that start later."""
    code = """
import threading
import numpy as np
from tests.kernels.calls import CALLS, call, tensors

def alive():
    with np.errstate(under="ignore"):
        return float(np.float64(5e-324) * np.float64(1)) > 0 and float(np.float32(1e-45) * np.float32(1)) > 0

for name in CALLS:
    call(name, *CALLS[name].arguments(tensors()))
    assert alive(), name
seen = []
thread = threading.Thread(target=lambda: seen.append(alive()))
thread.start()
thread.join()
print(alive(), seen, 1e-310 / 2 > 0)
"""
    assert output(code).split() == ["True", "[True]", "True"]


def test_each_python_allocation_fails_once() -> None:
    """MemoryError or success, never another error, a crash, or an input that is held on to. Memory fails within the
    extension only: parts of NumPy (cumsum of 1.26, array() of 2.5 on Python 3.12) crash by themselves.
    """
    if not hasattr(pytest.importorskip("_testcapi"), "set_nomemory"):
        pytest.skip("this Python can't make allocations fail")
    code = """
import gc, sys
from _testcapi import remove_mem_hooks, set_nomemory
from tests.kernels.calls import CALLS, arrays_in, call, tensors
from trainmon import _core

first = None  # of the allocations of each call of the extension: the one that fails
used = False

class Failing:
    def __getattr__(self, name):
        function = getattr(_core, name)
        def run(*arguments):
            global used
            used = True
            if first is None:
                return function(*arguments)
            set_nomemory(first, first + 1)
            try:
                return function(*arguments)
            finally:
                remove_mem_hooks()
        return run

for name, module in list(sys.modules.items()):
    if name.startswith(("trainmon.ops", "tests.")) and hasattr(module, "_core"):
        module._core = Failing()

QUIET = 40  # so many calls in a row without an error: the failing allocation lies behind the call's last
gc.disable()

def attempt(name, arguments, start):
    global first
    first = start
    try:
        call(name, *arguments)
        return False
    except MemoryError:
        return True
    except SystemError as error:  # NumPy's own functions forget to set their error; ours must not
        assert not any(f"function {ours}>" in str(error) for ours in dir(_core)), error
        return True
    finally:
        first = None

for name in CALLS:
    made = tensors()
    arguments = CALLS[name].arguments(made)
    held = [*arrays_in(arguments), *made]
    used = False
    call(name, *arguments)
    gc.collect()
    before = [sys.getrefcount(item) for item in held]
    failed = quiet = start = 0
    while quiet < QUIET and start < 4000:
        hit = attempt(name, arguments, start)
        failed, quiet, start = failed + hit, 0 if hit else quiet + 1, start + 1
    gc.collect()
    assert [sys.getrefcount(item) for item in held] == before, name
    assert failed or not used, name
print("done")
"""
    assert output(code, timeout=300).split() == ["done"]
