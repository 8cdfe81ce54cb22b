"""What counts as one array, what as a list of them, and what as neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trainmon.ops import multi_norm, tensor_stats

A, B = np.array([[3.0, 0.0]]), np.array([4.0])


@pytest.mark.parametrize(
    "tensors",
    [
        [A, B],
        (A, B),
        {"a": A, "b": B}.values(),
        iter([A, B]),
        (x for x in (A, B)),
        np.array([A[0], [0.0, 4.0]]),
    ],
    ids=["list", "tuple", "values", "iterator", "generator", "array"],
)
def test_iterables(tensors: Any) -> None:
    assert multi_norm(tensors) == 5


def test_an_array_is_one_tensor_not_its_rows() -> None:
    assert tensor_stats(np.ones((3, 4))).shape == (1,)
    assert tensor_stats([np.ones((3, 4))]).shape == (1,)


@pytest.mark.parametrize("bad", [None, 3, 2.5, "text", object(), {"a": A}])
def test_neither(bad: Any) -> None:
    with pytest.raises(TypeError, match="tensors"):
        multi_norm(bad)


def test_the_mapping_error_tells_the_way() -> None:
    with pytest.raises(TypeError, match=r"tensors\.values\(\), and names=tensors\.keys\(\)"):
        tensor_stats({"a": A})


def test_missing_gradient_is_named() -> None:
    with pytest.raises(TypeError, match=r"tensors\[1\] \('b'\): None .* without a gradient"):
        tensor_stats([A, None], names=["a", "b"])


def test_an_error_of_the_iterator_passes_through() -> None:
    def broken() -> Iterator[Any]:
        yield A
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        multi_norm(broken())


def test_a_list_that_changes_while_it_is_opened() -> None:
    class Emptying:
        """Its door empties the list it stands in."""

        def __init__(self, home: list[Any]) -> None:
            self.home = home

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **options: Any) -> Any:
            self.home.clear()
            return np.array([4.0]).__dlpack__(**options)

    tensors: list[Any] = []
    tensors += [Emptying(tensors), np.array([3.0])]
    assert multi_norm(tensors) == 5
    assert tensors == []


def test_many_tensors() -> None:
    tensors = [np.full(i % 7, 1.0) for i in range(5000)]
    strided = [tensor[::-1] for tensor in tensors]
    assert multi_norm(tensors, 1) == multi_norm(strided, 1) == sum(i % 7 for i in range(5000))
