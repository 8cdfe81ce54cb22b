"""Groups of ranks: what is merged, gathered, exchanged; NaN; ranks that die or don't come."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from tests.ranks.gloo import on_ranks
from trainmon.dist import Lost, Single


def _merge(values: dict[int, tuple[list[float], list[float]]]) -> Any:
    from trainmon.dist.torch_group import TorchGroup

    group = TorchGroup(timeout=30)
    sums, maxima = (np.array(column) for column in values[group.rank])
    kept = sums.copy(), maxima.copy()
    first = group.merge(sums, maxima)
    second = group.merge(2 * sums, 2 * maxima)  # a report may start before the last one was waited for
    merged = first.wait()
    again = second.wait()
    np.testing.assert_array_equal(sums, kept[0])
    np.testing.assert_array_equal(maxima, kept[1])
    np.testing.assert_array_equal(again[0], 2 * merged[0])
    group.close()
    group.close()
    with pytest.raises(Lost, match="closed"):
        group.merge(sums, maxima)
    return [array.tobytes() for array in merged], [array.tolist() for array in merged]


@pytest.mark.parametrize("holder", [0, 1])
def test_a_nan_wins_wherever_it_is(holder: int) -> None:
    clean = [1.0, 2.0, 0.5], [1.0, -math.inf, 7.0]
    dirty = [1.0, math.nan, 0.25], [math.nan, -math.inf, math.inf]
    found = on_ranks(2, _merge, {holder: dirty, 1 - holder: clean})
    assert found[0][0] == found[1][0], "all ranks have the same bits"
    sums, maxima = found[0][1]
    assert [sums[0], sums[2]] == [2.0, 0.75]
    assert math.isnan(sums[1])
    assert math.isnan(maxima[0])
    assert maxima[1:] == [-math.inf, math.inf]


def _gather_and_exchange() -> Any:
    from trainmon.dist.torch_group import TorchGroup

    group = TorchGroup(timeout=30)
    rows = group.gather(np.array([group.rank, math.nan if group.rank else -math.inf])).wait()
    words = group.exchange(("ä" * group.rank).encode())
    nothing = group.exchange(b""), group.gather(np.empty(0)).wait().shape
    empty = [array.size for array in group.merge(np.empty(0), np.empty(0)).wait()]
    return rows.tolist(), [word.decode() for word in words], nothing, empty


def test_gather_and_exchange() -> None:
    found = on_ranks(3, _gather_and_exchange)
    for rows, words, nothing, empty in found.values():
        np.testing.assert_array_equal(rows, [[0, -math.inf], [1, math.nan], [2, math.nan]])
        assert words == ["", "ä", "ää"]
        assert nothing == ([b"", b"", b""], (3, 0))
        assert empty == [0, 0]


def _lose(kind: str) -> Any:
    from trainmon.dist.torch_group import TorchGroup

    group = TorchGroup(timeout=4)
    group.merge(np.ones(1), np.ones(1)).wait()
    if group.rank == 1:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(25)
        return None
    began = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            group.merge(np.ones(1), np.ones(1)).wait()
        except Lost as lost:
            texts.append(str(lost))
    group.close()
    return texts, time.monotonic() - began


@pytest.mark.parametrize("kind", ["killed", "stuck"])
def test_a_rank_that_is_gone_is_noticed_once_and_in_time(kind: str) -> None:
    found = on_ranks(3, _lose, kind, silent=(1,))
    for texts, seconds in (found[0], found[2]):
        assert len(texts) == 2
        assert texts[0] == texts[1]
        assert "can't reach the others" in texts[0]
        assert seconds < 20


def test_the_group_of_one() -> None:
    group = Single()
    sums, maxima = np.array([1.0, math.nan]), np.array([-math.inf])
    merged = group.merge(sums, maxima)
    sums[0] = 5
    assert merged.wait()[0][0] == 1
    assert group.gather(maxima).wait().tolist() == [[-math.inf]]
    assert group.exchange(b"x") == [b"x"]
    assert (group.rank, group.size, group.lost) == (0, 1, None)
    group.close()


def test_without_a_process_group() -> None:
    from trainmon.dist.torch_group import TorchGroup

    with pytest.raises(RuntimeError, match="init_process_group"):
        TorchGroup()
