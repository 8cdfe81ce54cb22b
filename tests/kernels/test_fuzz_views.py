"""Random views of random memory against the twins."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, VALUES, make
from tests.kernels.compare import assert_record, close
from tests.twins.stats import norm_twin, scan_twin
from trainmon.ops import multi_norm, scan_nonfinite, tensor_stats


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any chain of reshaping, slicing, permuting and broadcasting over any memory, at any byte offset."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    size = int(np.prod(shape))
    values = make(
        dtype.name,
        "contiguous",
        draw(st.sampled_from(sorted(VALUES))),
        n=max(size, 1),
        seed=draw(st.integers(0, 9)),
    )
    offset = draw(st.integers(0, dtype.itemsize))
    memory = np.zeros(values.nbytes + offset, np.uint8)
    memory[offset:] = values.view(np.uint8)
    view = np.ndarray(shape, dtype, memory, offset)
    steps = st.sampled_from([-3, -2, -1, 1, 2, 3])
    view = view[(..., *(slice(None, None, draw(steps)) for _ in shape))]  # the dots keep 0-d an array
    view = view.transpose(draw(st.permutations(range(view.ndim))))
    if draw(st.booleans()):
        view = view[..., None]
    if draw(st.booleans()):
        view = np.broadcast_to(view, (draw(st.integers(0, 3)), *view.shape))
    return view


@settings(max_examples=300, deadline=None)
@given(st.lists(views(), max_size=5))
def test_any_list_of_views(tensors: list[np.ndarray[Any, Any]]) -> None:
    for record, tensor in zip(tensor_stats(tensors), tensors, strict=True):
        assert_record(record, tensor)
    for ord in (1, 2, np.inf):
        total, each = multi_norm(tensors, ord, per_tensor=True)
        assert close(float(total), norm_twin(tensors, ord), sum(t.size for t in tensors))
        for value, tensor in zip(each, tensors, strict=True):
            assert close(float(value), norm_twin([tensor], ord), tensor.size)
    found, expected = scan_nonfinite(tensors), scan_twin(tensors)
    assert (found is None) == (expected is None)
    if found is not None:
        assert (int(found.name), found.index, found.kind) == expected
