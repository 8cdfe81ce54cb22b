"""Rules over values: flags, alarms, what a null, a NaN and a step back do to them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from trainmon.config import glob_pattern
from trainmon.events import Action
from trainmon.frame import Table
from trainmon.health.judge import Judge
from trainmon.health.rules import DEFAULT_RULES, Rule

ABOVE = {"above": 5.0}
Row = Mapping[str, float | None]


def changes(judge: Judge, values: Sequence[float | None], first: int = 1) -> list[str]:
    """What became of the only alarm at each step, `-` where nothing was said."""
    said = []
    for step, value in enumerate(values, start=first):
        alarms = judge.look(step, {"loss/global": value}).alarms
        assert len(alarms) <= 1
        said.append(alarms[0].change if alarms else "-")
    return said


def judge_of(**keys: Any) -> Judge:
    return Judge([Rule("r", ("loss/global",), "threshold", ABOVE, **keys)])


def test_consecutive_flags_make_an_alarm_that_stands_until_the_first_without() -> None:
    values = [9.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0]
    assert changes(judge_of(), values) == [
        *("raised", "standing", "ended", "raised", "standing", "standing", "standing", "ended", "-")
    ]
    assert changes(judge_of(consecutive=3), values) == [
        *("-", "-", "-", "-", "-", "raised", "standing", "ended", "-")
    ]


def test_a_null_neither_adds_to_a_row_nor_ends_it() -> None:
    assert changes(judge_of(consecutive=2), [9.0, None, 9.0, None, 9.0, 1.0]) == [
        *("-", "-", "raised", "-", "standing", "ended")
    ]


def test_warmup_is_counted_in_steps_of_the_training() -> None:
    assert changes(judge_of(warmup=3), [9.0] * 5) == ["-", "-", "-", "raised", "standing"]
    assert changes(judge_of(warmup=3), [9.0] * 2, first=100) == ["raised", "standing"]
    assert changes(judge_of(warmup=3, consecutive=2), [9.0] * 5) == ["-", "-", "-", "-", "raised"]


def test_cooldown_counts_from_the_end_of_an_alarm() -> None:
    assert changes(judge_of(cooldown=2), [9.0, 1.0, 9.0, 9.0, 9.0, 1.0]) == [
        *("raised", "ended", "-", "-", "raised", "ended")
    ]


def test_a_value_that_is_not_finite_is_a_flag_of_rules_that_decide_and_leaves_memory_alone() -> None:
    stop = frozenset({Action.STOP})
    rules = [
        Rule("spike", ("loss/global",), "mad", {"warmup": 4.0, "window": 8.0}, stop),
        Rule("told", ("loss/global",), "mad", {"warmup": 4.0, "window": 8.0}),
        Rule("nan", ("loss/*",), "nonfinite"),
        Rule("other", ("grad/norm",), "nonfinite"),
    ]
    judge = Judge(rules)
    rng = np.random.default_rng(0)
    for step in range(1, 21):
        assert not judge.look(step, {"loss/global": float(rng.normal())}).alarms
    bad = judge.look(21, {"loss/global": math.nan})
    assert [(alarm.rule.name, alarm.change) for alarm in bad.alarms] == [
        ("spike", "raised"),
        ("nan", "raised"),
    ]
    assert bad.nonfinite == ["loss/global"]
    assert bad.alarms[0].text == "loss/global is nan"
    good = judge.look(22, {"loss/global": 0.1})
    assert [alarm.change for alarm in good.alarms] == ["ended", "ended"]
    spike = judge.look(23, {"loss/global": 50.0}).alarms
    assert [alarm.rule.name for alarm in spike] == ["spike", "told"], "they still know what is usual"
    assert [alarm.rule.name for alarm in judge.look(24, {"loss/global": math.nan}).alarms] == ["spike", "nan"]
    over = [alarm.change for alarm in judge.look(25, {"loss/global": 0.0}).alarms]
    assert over == ["ended"] * 3, "a NaN does not end the alarm of a rule that only tells"


def test_a_count_of_values_that_are_not_finite_is_one_from_one_on() -> None:
    judge = Judge(DEFAULT_RULES)
    assert not judge.look(1, {"grad/nonfinite": 0.0, "grad/norm": 1.0}).alarms
    found = judge.look(2, {"grad/nonfinite": 2.0, "grad/norm": 1.0})
    assert [(alarm.series, alarm.text) for alarm in found.alarms] == [
        ("grad/nonfinite", "grad/nonfinite = 2")
    ]
    assert found.nonfinite == ["grad/nonfinite"]


def test_what_somebody_found_flags_a_series_whatever_its_own_value_and_even_without_one() -> None:
    judge = Judge(DEFAULT_RULES)
    judge.look(1, {"loss/global": 1.0})
    found = judge.look(2, {"loss/global": 1.0}, found={"loss/global": "x", "weight/nonfinite": "y"})
    assert {alarm.series: alarm.text for alarm in found.alarms} == {
        "loss/global": "x",
        "weight/nonfinite": "y",
    }
    assert [alarm.change for alarm in judge.look(3, {"loss/global": 1.0}).alarms] == ["ended"] * 2


@pytest.mark.parametrize(
    ("detector", "values", "raised"),
    [
        ("global_norm_spike", [4.0] * 12, 10),  # its own count
        ("kill_loss_spike", [1.0] * 30 + [9.0] * 8, 35),  # above patience 4 in a row
    ],
)
def test_detectors_that_count_by_themselves_alarm_after_that(
    detector: str, values: list[float], raised: int
) -> None:
    parameters = {"window": 20.0} if detector == "kill_loss_spike" else {}
    judge = Judge([Rule("r", ("loss/global",), detector, parameters)])
    said, flagged = [], []
    for step, value in enumerate(values, start=1):
        seen = judge.look(step, {"loss/global": value})
        flagged.append(seen.flagged)
        said += [(alarm.change, step) for alarm in seen.alarms]
    assert said[0] == ("raised", raised)
    assert flagged[raised - 2], "but each of their flags makes a run suspect"


def test_the_new_level_is_no_alarm_any_more() -> None:
    judge = Judge([Rule("r", ("loss/global",), "mad", {"warmup": 4.0, "window": 8.0, "shift": 3.0})])
    rng = np.random.default_rng(1)
    values = [float(v) for v in (*rng.normal(0, 1, 20), *rng.normal(100, 1, 6))]
    assert changes(judge, values)[20:] == ["raised", "standing", "ended", "-", "-", "-"]


def test_series_may_come_later_and_need_not_be_due() -> None:
    judge = Judge([Rule("r", ("**",), "threshold", ABOVE)])
    assert judge.look(1, {"a": 9.0}).alarms[0].series == "a"
    assert [(x.series, x.change) for x in judge.look(2, {"b": 9.0}).alarms] == [("b", "raised")]
    both = judge.look(3, {"a": 1.0, "b": None}).alarms
    assert [(x.series, x.change) for x in both] == [("a", "ended")], "b was null: its alarm stands"


def test_tables_are_judged_row_by_row_whichever_rows_they_have() -> None:
    judge = Judge([Rule("r", ("grad/norm/*",), "threshold", ABOVE)])

    def look(step: int, **rows: float) -> list[tuple[str, str]]:
        values = np.array(list(rows.values()))
        table = Table("grad/norm/<p>", "gradients", "1", tuple(rows), values, ~np.isnan(values))
        return [(alarm.series, alarm.change) for alarm in judge.look(step, {}, [table]).alarms]

    assert look(1, a=1.0, b=9.0) == [("grad/norm/b", "raised")]
    assert look(2, a=7.0, b=math.nan) == [("grad/norm/a", "raised")], "NaN stands for null here"
    assert look(3, a=1.0) == [("grad/norm/a", "ended")], "b is not there: its alarm stands"
    assert look(4, c=9.0, b=1.0, a=1.0) == [("grad/norm/b", "ended"), ("grad/norm/c", "raised")]
    assert look(5, b=9.0, c=9.0) == [("grad/norm/b", "raised"), ("grad/norm/c", "standing")]


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("grad/*", ["grad/norm", "grad/nonfinite"], ["grad/norm/w", "loss/global"]),
        ("grad/norm/*", ["grad/norm/a.b", "grad/norm/[0]"], ["grad/norm", "grad/norm/a/b"]),
        ("grad/**", ["grad/norm", "grad/norm/a/b"], ["loss/global"]),
        ("**/nonfinite", ["grad/nonfinite"], ["grad/nonfinite/x"]),
        ("grad/norm/w[0].?", ["grad/norm/w[0].a"], ["grad/norm/w0.a", "grad/norm/w[0]."]),
    ],
)
def test_globs(glob: str, yes: list[str], no: list[str]) -> None:
    pattern = glob_pattern(glob)
    assert all(pattern.fullmatch(name) for name in yes)
    assert not any(pattern.fullmatch(name) for name in no)


def _story(seed: int, steps: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for step in range(steps):
        loss = float(rng.normal(2, 0.1)) + 5 * (rng.random() < 0.05)
        norm = float(np.exp(rng.normal())) if rng.random() < 0.9 else None
        row: dict[str, float | None] = {"loss/global": math.nan if rng.random() < 0.03 else loss}
        if step % 2:
            row["grad/norm"] = norm
        if step > 40:
            row["optim/overflow"] = float(rng.random() < 0.3)
        rows.append(row)
    return rows


RULES = [
    *DEFAULT_RULES,
    Rule("c", ("loss/global",), "cusum", {"warmup": 8.0, "window": 16.0}, consecutive=2, cooldown=5),
    Rule("o", ("optim/overflow",), "threshold", {"above": 1.0}, consecutive=2),
]


@pytest.mark.parametrize("cut", [0, 1, 39, 42, 77])
def test_state_restored_anywhere_goes_on_alike(cut: int) -> None:
    rows = _story(3, 120)
    whole, first, second = Judge(RULES), Judge(RULES), Judge(RULES)
    expected = [repr(whole.look(step, row)) for step, row in enumerate(rows, start=1)]
    for step in range(1, cut + 1):
        first.look(step, rows[step - 1])
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = [repr(second.look(step, rows[step - 1])) for step in range(cut + 1, 121)]
    assert found == expected[cut:]
    assert "raised" in "".join(found), "the story must hold something to say"


def test_state_of_tables_goes_on_alike() -> None:
    rules = [Rule("r", ("grad/norm/*",), "ewma", {"log": 1.0, "warmup": 8.0}, consecutive=2)]
    rng = np.random.default_rng(2)

    def table(step: int) -> Table:
        names = ("a", "b", "c") if step % 3 else ("c", "a")
        values = np.exp(rng.normal(size=len(names)) + (30 if step > 40 else 0))
        return Table("grad/norm/<p>", "gradients", "1", names, values, np.ones(len(names), np.bool_))

    one, other = Judge(rules), Judge(rules)
    tables = [table(step) for step in range(1, 61)]
    for step in range(1, 42):
        one.look(step, {}, [tables[step - 1]])
    assert other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    said = []
    for step in range(42, 61):
        mine, theirs = (judge.look(step, {}, [tables[step - 1]]).alarms for judge in (one, other))
        assert repr(mine) == repr(theirs)
        said += mine
    assert {alarm.series for alarm in said} == {"grad/norm/a", "grad/norm/b", "grad/norm/c"}


def test_of_a_state_of_other_rules_what_both_have_goes_on() -> None:
    rows = _story(3, 120)
    first = Judge(RULES)
    for step, row in enumerate(rows[:60], start=1):
        first.look(step, row)
    kept = RULES[1]  # loss spike
    new = Rule("new", ("loss/global", "grad/norm"), "zclip")
    both, alone = Judge([new, kept]), Judge([new])
    assert not both.load_state_dict(first.state_dict())
    assert both.step == 60
    said = []
    for step, row in enumerate(rows[60:], start=61):
        expected = [alarm for alarm in first.look(step, row).alarms if alarm.rule.name == kept.name]
        fresh = alone.look(step, row).alarms
        found = both.look(step, row).alarms
        assert repr([alarm for alarm in found if alarm.rule.name == kept.name]) == repr(expected)
        assert repr([alarm for alarm in found if alarm.rule.name == "new"]) == repr(fresh)
        said += expected
    assert said, "the story must hold something to say"


def test_a_restarted_judge_has_forgotten() -> None:
    rows = _story(5, 80)
    judge, fresh = Judge(RULES), Judge(RULES)
    for step, row in enumerate(rows, start=1):
        judge.look(step, row)
    judge.restart()
    for step, row in enumerate(rows, start=1):
        assert repr(judge.look(step, row).alarms) == repr(fresh.look(step, row).alarms)
