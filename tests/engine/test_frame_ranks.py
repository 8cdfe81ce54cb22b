"""Frames of several ranks: layouts united by subject, slices merged, nulls kept, ranks that disagree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trainmon.frame import Frame, Part, Registry, ratio, root
from trainmon.frame import Snapshot as Shown


class Rank:
    """One rank's registry and frame: a global norm, a table of parameters, extremes, a value of its own."""

    def __init__(self, names: list[str]) -> None:
        self.registry = Registry()
        self.parts: dict[str, Part] = {}
        for name, reduce in (
            ("square", "sum"),
            ("s", "sum"),
            ("n", "sum"),
            ("step", "max"),
            ("own", "local"),
        ):
            self.parts[name] = self.registry.part(name, reduce)  # type: ignore[arg-type]
        self.parts["squares"] = self.registry.part("squares", "sum", subjects=names)
        parts = self.parts
        self.registry.add("grad/norm_clipped", (parts["square"],), root, probe="gradients")
        self.registry.add("loss/global", (parts["s"], parts["n"]), ratio, probe="loss")
        self.registry.add("weight/norm/<p>", (parts["squares"],), root, probe="weights", subjects=names)
        self.registry.add("time/step", (parts["step"],), probe="timing")

    def freeze(self, everybody: list[bytes]) -> None:
        self.registry.freeze(everybody)
        self.frame = Frame(self.registry)
        self.frame.clear(3)

    def shown(self) -> Shown:
        return self.frame.snapshot(wall_time=0, elapsed=0, total_steps=None, due=lambda probe: True)


def united(*names: list[str]) -> list[Rank]:
    ranks = [Rank(own) for own in names]
    everybody = [rank.registry.describe() for rank in ranks]
    for rank in ranks:
        rank.freeze(everybody)
    return ranks


def merge(ranks: list[Rank]) -> None:
    packed = [rank.frame.pack() for rank in ranks]
    sums = np.sum([pair[0] for pair in packed], axis=0)
    maxima = np.max([pair[1] for pair in packed], axis=0)
    for rank in ranks:
        rank.frame.unpack(sums, maxima)


def test_stages_with_other_parameters_merge_by_name() -> None:
    first, second, third = united(["embed", "tied"], [], ["head", "tied"])
    first.frame.fill(first.parts["squares"], np.array([4.0, 9.0]))
    third.frame.set(third.parts["squares"], 16.0, 0)
    third.frame.add(third.parts["squares"], 7.0, 1)
    first.frame.set(first.parts["step"], 0.5)
    second.frame.set(second.parts["step"], 0.75)
    second.frame.set(second.parts["own"], 8.0)
    merge([first, second, third])
    for rank in (first, second, third):
        (table,) = rank.shown().tables
        assert table.subjects == ("embed", "tied", "head")
        assert table.values.tolist() == [2.0, 4.0, 4.0]
        assert table.valid.all()
        assert rank.shown().scalars["time/step"] == 0.75
    assert first.frame.get(first.parts["own"])[1].tolist() == [False]
    assert second.frame.get(second.parts["own"])[0].tolist() == [8.0]


def test_what_nobody_knows_is_null_and_what_one_knows_is_known() -> None:
    first, second = united(["a"], ["b"])
    second.frame.set(second.parts["s"], 6.0)
    second.frame.set(second.parts["n"], 3.0)
    merge([first, second])
    for rank in (first, second):
        shown = rank.shown()
        assert shown.scalars["loss/global"] == 2.0
        assert shown.scalars["grad/norm_clipped"] is None
        assert shown.scalars["time/step"] is None
        assert not shown.tables[0].valid.any()


def test_a_nan_of_one_rank_is_everybodys() -> None:
    first, second = united(["a"], ["a"])
    second.frame.set(second.parts["square"], math.nan)
    first.frame.set(first.parts["square"], 1.0)
    merge([first, second])
    assert math.isnan(first.shown().scalars["grad/norm_clipped"] or 0.0)


def test_one_order_for_equal_ranks_needs_no_places() -> None:
    first, second = united(["a", "b"], ["a", "b"])
    assert first.parts["squares"].places is None
    assert first.registry.size == second.registry.size == 7


def _other_series(rank: Rank) -> None:
    rank.registry.add("optim/lr", (rank.registry.part("lr", "max"),), probe="optim")


def _other_part(rank: Rank) -> None:
    rank.registry.part("more", "sum")


@pytest.mark.parametrize(("change", "named"), [(_other_series, "optim/lr"), (_other_part, "more")])
def test_ranks_that_measure_something_else(change: Any, named: str) -> None:
    first, second = Rank(["a"]), Rank(["a"])
    change(second)
    everybody = [first.registry.describe(), second.registry.describe()]
    with pytest.raises(ValueError, match=f"rank 1 measures something else.*{named}"):
        first.freeze(everybody)
    with pytest.raises(ValueError, match=f"rank 0 measures something else.*{named}"):
        second.freeze(everybody)


def test_ranks_at_different_steps() -> None:
    first, second = united(["a"], ["a"])
    second.frame.clear(4)
    with pytest.raises(ValueError, match="different steps: this one 3, another 4"):
        merge([first, second])


def test_a_part_belongs_to_one_list_of_subjects() -> None:
    rank = Rank(["a"])
    assert rank.registry.part("squares", "sum", subjects=["a"]) is rank.parts["squares"]
    with pytest.raises(ValueError, match="already"):
        rank.registry.part("squares", "sum", subjects=["b"])


def test_sizes_without_subjects_must_agree() -> None:
    first, second = Rank(["a"]), Rank(["a"])
    first.registry.part("more", "sum", 2)
    second.registry.part("more", "sum", 3)
    with pytest.raises(ValueError, match="rank 1 has 3 values of part 'more', this one 2"):
        first.freeze([first.registry.describe(), second.registry.describe()])


def test_a_series_that_sees_null_takes_what_is_there() -> None:
    registry = Registry()
    own, other = registry.part("own", "sum"), registry.part("other", "max")

    def either(a: Any, b: Any) -> Any:
        return np.where(a[1], a[0], b[0]), a[1] | b[1]

    registry.add("grad/norm", (own, other), either, probe="gradients", sees_null=True)
    registry.freeze()
    frame = Frame(registry)
    found = []
    for writes in ([], [(other, 2.0)], [(other, 2.0), (own, 1.0)]):
        frame.clear(1)
        for part, value in writes:
            frame.set(part, value)
        shown = frame.snapshot(wall_time=0, elapsed=0, total_steps=None, due=lambda probe: True)
        found.append(shown.scalars["grad/norm"])
    assert found == [None, 2.0, 1.0]
