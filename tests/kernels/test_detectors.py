"""Detectors: each rule against its twin and by hand, events, state, errors, false alarms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign import size
from tests.twins.detectors import TWINS, Twin
from trainmon import Detector, DetectorBank
from trainmon.ops import EVENT_DTYPE, RULES, VERDICTS
from trainmon.ops._extension import _core

# Small windows, so that a short history goes through every state of a rule.
SMALL: dict[str, dict[str, float | None]] = {
    "threshold": {"above": 6.0, "below": -3.0, "patience": 2},
    "global_norm_spike": {"threshold": 4.0, "count": 3},
    "kill_loss_spike": {"factor": 1.5, "patience": 1, "window": 5, "cap": 4.0},
    "skip_step_sigma": {"k": 1.5, "window": 7, "warmup": 3},
    "stability_score": {"k": 1.5, "window": 6, "span": 70},
    "spike_rtol": {"rtol": 0.5, "atol": 3.0, "window": 4},
    "megatron_max": {"factor": 1.2, "samples": 6},
    "zclip": {"z": 1.5, "warmup": 5, "alpha": 0.9},
    "adagc": {"factor": 1.05, "warmup": 4, "beta": 0.9},
    "turbulence": {"theta": 0.5, "beta": 0.9},
    "mad": {"k": 2.0, "window": 7, "warmup": 4, "shift": 3, "log": False},
    "cusum": {"k": 0.5, "h": 3.0, "window": 6, "warmup": 3, "shift": 4, "outlier": 3.0},
    "ewma": {"k": 1.5, "alpha": 0.1, "warmup": 4, "shift": 3},
    "dead_expert": {"age": 4, "share": 0.5},
    "straggler": {"below": 2.0, "hits": 2, "reports": 4},
    "linearity": {"below": 2.5, "window": 5},
}
RULES_WITH_TWIN = sorted(TWINS)
only: Any = Detector("nonfinite", series=())  # a bank without the rule that every bank has


def bank_of(rule: str, series: int = 1, **parameters: float | None) -> DetectorBank:
    return DetectorBank([only, Detector(rule, parameters)], series)


def twin_of(rule: str, **parameters: float | None) -> Twin:
    return TWINS[rule](**{**RULES[rule], **parameters})


def found_by(twin: Twin, values: Any) -> list[tuple[int, str, float, float]]:
    found = []
    for step, x in enumerate(values):
        finding = twin.see(float(x)) if math.isfinite(x) else None
        if finding is not None:
            found.append((step, *finding))
    return found


def found_in(bank: DetectorBank, values: Any) -> list[tuple[int, str, float, float]]:
    events = bank.update(np.asarray(values, np.float64).reshape(-1, 1))
    return [
        (int(e["step"]), VERDICTS[e["verdict"]], float(e["score"]), float(e["limit"]))
        for e in events
        if e["detector"] == 1
    ]


def assert_same(found: list[tuple[int, str, float, float]], expected: list[Any]) -> None:
    assert [event[:2] for event in found] == [event[:2] for event in expected]
    for event, twin in zip(found, expected, strict=True):
        np.testing.assert_allclose(event[2:], twin[2:], rtol=1e-9, atol=1e-12)


def history(seed: int, steps: int) -> Any:
    """Noise with spikes, a new level, values that aren't finite, one that is absurd, a quiet and a negative part."""
    rng = np.random.default_rng(seed)
    values = rng.normal(3.0, 0.7, steps)
    values[rng.random(steps) < 0.05] *= 4
    values[steps // 3 : steps // 2] += 6
    values[rng.random(steps) < 0.03] = rng.choice([np.nan, np.inf, -np.inf])
    values[steps // 2 : steps // 2 + 12] = rng.normal(-2, 1, 12)
    values[steps // 4] = 1e30
    values[-30:-15] = 2.5
    return values


@pytest.mark.soak
@pytest.mark.parametrize(
    ("rule", "log"),
    [
        (rule, log)
        for rule in RULES_WITH_TWIN
        for log in ((False, True) if "log" in RULES[rule] else (False,))
    ],
)
def test_twin(rule: str, log: bool) -> None:
    parameters = {**SMALL[rule], "log": True} if log else SMALL[rule]
    verdicts = set()
    for seed in range(size(12, 200)):
        values = history(seed, 240)
        found = found_in(bank_of(rule, **parameters), values)
        assert_same(found, found_by(twin_of(rule, **parameters), values))
        verdicts |= {event[1] for event in found}
    possible = {"global_norm_spike": {"flag", "stop"}, "kill_loss_spike": {"flag", "stop", "high"}}
    shifting = {"flag", "shift"} if "shift" in RULES[rule] else {"flag"}
    assert verdicts == possible.get(rule, shifting), "the histories must lead to every verdict"


@pytest.mark.parametrize("rule", [rule for rule in RULES_WITH_TWIN if rule != "threshold"])
def test_twin_with_the_defaults(rule: str) -> None:
    values = history(1, 700)
    assert_same(found_in(bank_of(rule), values), found_by(twin_of(rule), values))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(RULES_WITH_TWIN),
    st.lists(st.integers(-3, 12).map(lambda i: i / 4) | st.sampled_from([50.0, math.nan]), max_size=60),
    st.booleans(),
)
def test_property_twin_with_ties(rule: str, values: list[float], down: bool) -> None:
    parameters = dict(SMALL[rule])
    if rule == "cusum":
        parameters["down"] = down
    # Quarters: means and deviations of few of them are exact or far from a tie, but for sigmas and weights.
    if rule in ("skip_step_sigma", "stability_score", "zclip", "ewma", "cusum", "adagc", "kill_loss_spike"):
        values = [x + 1e-3 * math.sin(i) for i, x in enumerate(values)]
    found = found_in(bank_of(rule, **parameters), values)
    assert_same(found, found_by(twin_of(rule, **parameters), values))


def test_stability_score_counts_the_last_span() -> None:
    values = history(3, 400)
    twin: Any = twin_of("stability_score", **SMALL["stability_score"])
    bank = bank_of("stability_score", **SMALL["stability_score"])
    shares = []
    for x in values:
        bank.update([x])
        if math.isfinite(x):
            twin.see(float(x))
        assert bank.stability_score() == {"0": twin.share()} if hasattr(twin, "flags") else True
        shares.append(bank.stability_score()["0"])
    assert max(shares) > shares[-1] > 0
    with pytest.raises(ValueError, match="no detector stability_score"):
        bank_of("mad").stability_score()


# Examples worked out by hand: (rule, parameters, history, step of the first event and its verdict, or None).
BY_HAND = [
    ("threshold", {"above": 3.0}, [1, 3], (1, "flag")),
    ("threshold", {"below": 0.0, "patience": 2}, [-1, 1, -1, 0], (3, "flag")),
    ("global_norm_spike", {}, [2.9, 3.0], (1, "flag")),
    ("global_norm_spike", {"count": 2}, [3, 2, 3, 3], (0, "flag")),
    ("kill_loss_spike", {}, [3.0] * 100 + [6.0], (100, "flag")),
    ("kill_loss_spike", {}, [3.0] * 100 + [5.99], None),
    ("kill_loss_spike", {}, [3.0] * 99 + [60.0], None),
    ("skip_step_sigma", {}, [1.0, 2.0] * 32 + [4.4], None),  # 1.5 + 6 * 0.504 = 4.52
    ("skip_step_sigma", {}, [1.0, 2.0] * 32 + [4.6], (64, "flag")),
    ("skip_step_sigma", {}, [1.0, 2.0] * 31 + [1.0, 40.0], None),
    ("stability_score", {}, [1.0, 2.0] * 64 + [4.51], (128, "flag")),  # 1.5 + 6 * 0.5
    ("stability_score", {}, [1.0, 2.0] * 63 + [9.0], None),
    ("spike_rtol", {}, [2.0] * 10 + [6.0], (10, "flag")),
    ("spike_rtol", {}, [2.0] * 10 + [5.9], None),
    ("spike_rtol", {"atol": 3.0}, [2.0] * 10 + [5.0], (10, "flag")),
    ("spike_rtol", {}, [-2.0] * 10 + [50.0], None),
    ("megatron_max", {}, [0.5] * 99 + [-1.0] + [10.0], (100, "flag")),
    ("megatron_max", {}, [0.5] * 99 + [-1.0] + [9.9], None),
    ("megatron_max", {}, [0.0] * 100 + [1.0], None),
    ("zclip", {}, [1.0, 2.0] * 12 + [1.5] + [3.0], (25, "flag")),
    ("adagc", {}, [4.0] * 100 + [1.06], (100, "flag")),  # gamma 1
    ("adagc", {}, [4.0] * 100 + [1.04], None),
    ("adagc", {}, [0.0] * 100 + [1.0], None),
    ("turbulence", {}, [1.0, -1.6], (1, "flag")),
    ("turbulence", {}, [1.0, 1.5], None),
    ("mad", {}, [1.0, 2.0] * 16 + [5.95], (32, "flag")),  # 1.5 + 6 * 0.5 / 0.6745 = 5.948
    ("mad", {}, [1.0, 2.0] * 16 + [5.94], None),
    ("mad", {}, [5.0] * 32 + [5.0001], (32, "flag")),
    ("mad", {}, [5.0] * 32 + [5.00001], None),  # the floor: 6 * 5e-6 / 0.6745
    ("mad", {"log": True}, [0.0] * 40 + [9.0], None),
    # The first 3.0 adds 1.5 / (1.4826 * 0.5) - 0.5 = 1.5235; then median 2 and MAD 1: 1 / 1.4826 - 0.5 = 0.1745.
    ("cusum", {"h": 1.8}, [1.0, 2.0] * 16 + [3.0, 3.0], None),
    ("cusum", {"h": 1.8}, [1.0, 2.0] * 16 + [3.0, 3.0, 3.0], (34, "flag")),
    ("cusum", {"h": 1.8, "down": True}, [1.0, 2.0] * 16 + [0.0, 0.0, 0.0], (34, "flag")),
    ("cusum", {}, [1.0, 2.0] * 16 + [0.5] * 12, None),
    ("ewma", {}, [1.0, 2.0] * 16 + [4.6], (32, "flag")),
    ("dead_expert", {}, [0.0] * 99, None),
    ("dead_expert", {}, [0.001] * 100, (99, "flag")),
    ("straggler", {}, [0.7, 1.0, 0.7, 1.0, 0.7], (4, "flag")),
    ("straggler", {}, [0.7, 0.7, 1.0, 1.0, 1.0, 0.7], None),
    ("linearity", {}, [0.94] * 20, (19, "flag")),
    ("linearity", {}, [0.94] * 19, None),
    ("nonfinite", {}, [1.0, -np.inf], (1, "flag")),
]


@pytest.mark.parametrize(("rule", "parameters", "values", "expected"), BY_HAND)
def test_by_hand(rule: str, parameters: Any, values: list[float], expected: Any) -> None:
    bank = DetectorBank({rule: parameters}, 1)
    events = bank.describe(bank.update(np.array(values)[:, None]))
    assert {event.rule for event in events} <= {rule}
    assert (None if not events else (events[0].step, events[0].verdict)) == expected


def test_the_rules_are_those_of_the_extension_in_its_order() -> None:
    assert tuple((rule, " ".join(RULES[rule])) for rule in RULES) == _core.detector_rules()
    assert set(RULES) == set(TWINS) | {"nonfinite"}


def test_words_of_state() -> None:
    words = {
        "nonfinite": 1,
        "global_norm_spike": 1,
        "kill_loss_spike": 106,
        "skip_step_sigma": 131,
        "stability_score": 289,
        "spike_rtol": 13,
        "megatron_max": 2,
        "zclip": 3,
        "adagc": 2,
        "turbulence": 1,
        "mad": 290,
        "cusum": 291,
        "ewma": 4,
        "dead_expert": 1,
        "straggler": 1,
        "linearity": 41,
    }
    for rule, count in words.items():
        sizes = [bank_of(rule, series)._words.size for series in (0, 1, 7)]
        assert sizes == [0, count, 7 * count], rule


def test_many_series_are_as_many_banks() -> None:
    values = np.stack([history(seed, 200) for seed in range(9)], axis=1)
    names = [f"layer {i}" for i in range(9)]
    spec = [
        Detector(rule, SMALL.get(rule, {}), None if i % 2 else names[::-2]) for i, rule in enumerate(RULES)
    ]
    bank = DetectorBank(spec, names)
    events = bank.update(values)
    assert bank.steps == 200
    order = [tuple(int(e[field]) for field in ("step", "detector")) for e in events]
    assert order == sorted(order)
    for i, detector in enumerate(bank.detectors):
        assert len(detector.series or ()) == (9 if i % 2 else 5)
        for series in detector.series or ():
            alone = DetectorBank([Detector(detector.rule, detector.parameters, [0]), only], 1)
            expected = alone.update(values[:, [int(series)]])
            mine = events[(events["detector"] == i) & (events["series"] == int(series))]
            for field in ("step", "verdict", "value", "score", "limit"):
                np.testing.assert_array_equal(mine[field], expected[field])


def test_steps_one_by_one_or_all_at_once() -> None:
    values = np.stack([history(seed, 150) for seed in range(5)], axis=1)
    spec = {rule: SMALL.get(rule) for rule in RULES}
    whole, stepwise = DetectorBank(spec, 5), DetectorBank(spec, 5)
    together = whole.update(values)
    pieces = []
    for step, row in enumerate(values):
        pieces.append(stepwise.update(row))
        assert (pieces[-1]["step"] == 0).all()
        pieces[-1]["step"] = step
    assert np.concatenate(pieces).tobytes() == together.tobytes()
    np.testing.assert_array_equal(whole.state, stepwise.state)


def test_a_long_history_with_many_events_is_taken_in_parts() -> None:
    steps = 5000
    bank = DetectorBank({"threshold": {"above": 0.0}, "global_norm_spike": {"threshold": 1.0}}, 40)
    events = bank.update(np.ones((steps, 40)))
    assert len(events) == steps * 80
    assert events["step"].tolist() == np.repeat(np.arange(steps), 80).tolist()


@pytest.mark.parametrize("rule", list(RULES))
def test_state_restored_anywhere_goes_on_with_the_same_bits(rule: str) -> None:
    values = np.stack([history(seed, 120) for seed in range(3)], axis=1)
    names = ["a", "b", "c"]
    first = DetectorBank([Detector(rule, SMALL.get(rule, {}), ["c", "a"])], names)
    for step in range(120):
        if step % 7 == 0:
            saved = first.state
            second = DetectorBank.from_state(saved, names)
            assert second.series == first.series
            assert repr(second.detectors) == repr(first.detectors)
            assert second.steps == step
        assert first.update(values[step]).tobytes() == second.update(values[step]).tobytes()
        np.testing.assert_array_equal(first.state, second.state)
    first.reset()
    fresh = DetectorBank([Detector(rule, SMALL.get(rule, {}), ["c", "a"])], names)
    np.testing.assert_array_equal(first.state, fresh.state)


@pytest.mark.parametrize("rule", RULES_WITH_TWIN)
def test_a_bank_goes_on_from_the_states_that_another_has_in_common(rule: str) -> None:
    rng = np.random.default_rng(17)
    values = np.exp(rng.normal(size=(90, 3)))
    parameters = SMALL.get(rule, {})
    other = {"skip_step_sigma": {"k": 3.0}} if rule != "skip_step_sigma" else {"zclip": {"z": 2.0}}
    (added, its), *_ = other.items()
    old = DetectorBank([Detector(rule, parameters, ("a", "b")), only], ("a", "b", "c"))
    old.update(values[:40])
    # Other order, other series beside, another rule; and the same rule with other parameters.
    changed = DetectorBank([Detector(added, its), only, Detector(rule, parameters, ("b", "d"))], ("d", "b"))
    assert changed.take_over(old) == 1
    alone = DetectorBank([only, Detector(rule, parameters)], ("b",))
    alone.update(values[:40, 1:2])
    fresh = DetectorBank([Detector(added, its), only, Detector(rule, parameters, ("d",))], ("d", "b"))
    column = np.exp(rng.normal(size=50))
    found = changed.describe(changed.update(np.column_stack([column, values[40:, 1]])))
    expected = fresh.describe(fresh.update(np.column_stack([column, values[40:, 1]])))
    expected += alone.describe(alone.update(values[40:, 1:2]))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert DetectorBank([Detector(added, its)], ("x", "y")).take_over(old) == 0


def test_the_state_is_a_copy_and_survives_a_file(tmp_path: Any) -> None:
    bank = DetectorBank(["mad", "stability_score"], 2)
    bank.update(np.random.default_rng(0).normal(size=(200, 2)))
    kept = bank.state
    np.save(tmp_path / "state.npy", kept)
    bank.update([1e9, 1e9])
    again = DetectorBank.from_state(np.load(tmp_path / "state.npy"))
    np.testing.assert_array_equal(again.state, kept)
    assert kept.dtype == np.int64
    assert kept.ndim == 1


@pytest.mark.soak
def test_damaged_states_are_refused() -> None:
    bank = DetectorBank(["mad", "cusum", "linearity", "kill_loss_spike"], 3)
    bank.update(np.random.default_rng(0).normal(5, 1, (150, 3)))
    good = bank.state
    for words in (good[:-1], good[:3], good[:20], np.append(good, 0), good[::-1], np.zeros(0, np.int64)):
        with pytest.raises(ValueError, match="state"):
            DetectorBank.from_state(words)
    with pytest.raises(TypeError, match="int64"):
        DetectorBank.from_state(good.astype(np.float64))
    with pytest.raises(ValueError, match="2 names for a state of 3 series"):
        DetectorBank.from_state(good, ["a", "b"])
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(size(400, 100_000)):
        bad = good.copy()
        bad[rng.integers(bad.size)] = rng.choice([-1, 2**62, -(2**62), 7, rng.integers(2**63)])
        try:
            restored = DetectorBank.from_state(bad)
        except ValueError:
            refused += 1
            continue
        except MemoryError:  # an honest header of an absurd size
            continue
        restored.update(rng.normal(5, 1, (40, len(restored.series))))
    assert refused > 40


def test_null_values_are_not_shown() -> None:
    values = history(0, 200)
    shown = np.random.default_rng(1).random(200) < 0.7
    for rule in RULES_WITH_TWIN:
        bank, other = bank_of(rule, **SMALL[rule]), bank_of(rule, **SMALL[rule])
        events = bank.update(values[:, None], shown[:, None])
        steps = np.flatnonzero(shown)
        expected = other.update(values[shown][:, None])
        assert events["step"].tolist() == steps[expected["step"]].tolist()
        np.testing.assert_array_equal(bank._words, other._words)


def test_values_that_are_not_finite_are_one_event_each_and_touch_nothing_else() -> None:
    spec = {rule: SMALL[rule] for rule in RULES_WITH_TWIN}
    bank = DetectorBank(spec, ["loss", "norm"])
    bank.update(np.stack([history(0, 100), history(1, 100)], axis=1)[:80])
    bank.update([1.0, 1.0])
    before = bank._words.copy()
    events = bank.describe(bank.update([np.nan, -np.inf]))
    assert [(e.series, e.rule, e.verdict) for e in events] == [
        ("loss", "nonfinite", "flag"),
        ("norm", "nonfinite", "flag"),
    ]
    assert math.isnan(events[0].value)
    assert events[1].value == -math.inf
    np.testing.assert_array_equal(before[2:], bank._words[2:])
    assert [e.score for e in bank.describe(bank.update([np.nan, 1.0])) if e.rule == "nonfinite"] == [2.0]


def test_one_absurd_value_is_forgotten_when_it_leaves() -> None:
    rng = np.random.default_rng(0)
    clean = rng.normal(3, 0.1, 400)
    dirty = clean.copy()
    dirty[150] = 1e300
    for rule in ("skip_step_sigma", "stability_score", "spike_rtol", "kill_loss_spike"):
        window = int(RULES[rule]["window"] or 0)
        banks = bank_of(rule), bank_of(rule)
        banks[0].update(clean[: 151 + window, None])
        banks[1].update(dirty[: 151 + window, None])
        ours, expected = banks[1]._words[1:3].view(np.float64), banks[0]._words[1:3].view(np.float64)
        np.testing.assert_allclose(ours, expected, rtol=1e-9)


def test_extremes_of_the_range_crash_nothing() -> None:
    rng = np.random.default_rng(0)
    values = rng.choice([1e308, -1e308, 5e-324, -5e-324, 0.0, -0.0, 1.0, 1e-300, 1e200], (600, 3))
    bank = DetectorBank({rule: SMALL.get(rule) for rule in RULES}, 3)
    with np.errstate(all="raise"):
        bank.update(values)
    DetectorBank.from_state(bank.state)


def test_words_of_events() -> None:
    bank = DetectorBank({"mad": {"shift": 3}}, ["loss"])
    rng = np.random.default_rng(0)
    bank.update(rng.normal(3, 0.1, (50, 1)))
    texts = [str(event) for event in bank.describe(bank.update(np.full((3, 1), 9.0)))]
    assert texts[0].startswith("loss = 9: mad flag (")
    assert texts[0].endswith(" against 6)")
    assert texts[2] == "loss = 9: mad takes this for the new level"
    events = bank.update(np.array([[9.0]]))
    assert events.dtype == EVENT_DTYPE


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", "?", ">f8"])
def test_values_of_any_real_dtype_and_layout(dtype: str) -> None:
    values = np.arange(12).reshape(6, 2).astype(dtype)[::-1]
    plain = DetectorBank(["turbulence"], 2).update(values.astype(np.float64))
    np.testing.assert_array_equal(DetectorBank(["turbulence"], 2).update(values), plain)
    frozen = np.asfortranarray(values)
    frozen.flags.writeable = False
    np.testing.assert_array_equal(DetectorBank(["turbulence"], 2).update(frozen), plain)


def test_no_series_no_detector_no_step() -> None:
    assert DetectorBank({}, 0).update(np.empty((3, 0))).size == 0
    assert DetectorBank({}, []).steps == 0
    bank = DetectorBank({}, 2)
    assert [d.rule for d in bank.detectors] == ["nonfinite"]
    assert bank.update(np.empty((0, 2))).size == 0
    again = DetectorBank.from_state(DetectorBank([only], 2).state)
    assert again.update([np.nan, 1]).size == 0
    assert DetectorBank("ewma", 1).detectors[1].parameters["k"] == 6


@pytest.mark.parametrize(
    ("spec", "series", "text"),
    [
        (["madd"], 1, "unknown detector 'madd'; did you mean 'mad'"),
        ({"mad": {"windov": 3}}, 1, "mad: unknown parameter 'windov'; did you mean 'window'"),
        ({"mad": {"warmup": 129}}, 1, "mad: warmup must be a whole number from 2 to the window, not 129"),
        ({"mad": {"window": 10.5}}, 1, "mad: window must be a whole number from 2 to 1048576, not 10.5"),
        ({"mad": {"k": math.nan}}, 1, "mad: k must be above 0, not nan"),
        ({"mad": {"k": None}}, 1, "mad: k must have a value; the default is 6.0"),
        ({"threshold": {}}, 1, "threshold: above must be a number, or below must be one"),
        ({"straggler": {"hits": 6}}, 1, "straggler: hits must be a whole number from 1 to reports"),
        ({"ewma": {"alpha": 1.5}}, 1, "ewma: alpha must be from 0 to 1, not 1.5"),
        ([Detector("mad", series=["los"])], ["loss"], "mad: unknown series 'los'; did you mean 'loss'"),
        ([Detector("mad", series=[3])], 2, "mad: there is no series 3: there are 2"),
        (["mad"], ["a", "b", "a"], "two series are called 'a'"),
    ],
)
def test_errors_of_the_spec(spec: Any, series: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DetectorBank(spec, series)


def test_every_parameter_is_checked() -> None:
    for rule, defaults in RULES.items():
        for name in defaults:
            base = {"above": 1.0} if rule == "threshold" else {}
            for bad in (-1e400, math.nan):
                if name in ("above", "below") or (name == "atol" and math.isnan(bad)):
                    continue  # any number, or none
                if rule in ("straggler", "linearity") and name == "below" and not math.isnan(bad):
                    continue
                if name == "cap" and not math.isnan(bad):
                    continue
                with pytest.raises(ValueError, match=f"{rule}: {name} must be"):
                    DetectorBank({rule: {**base, name: bad}}, 1)
    with pytest.raises(TypeError, match="mad: k must be a number, not 'six'"):
        DetectorBank({"mad": {"k": "six"}}, 1)  # type: ignore[dict-item]


def test_errors_of_values() -> None:
    bank = DetectorBank(["mad"], 3)
    before = bank.state
    for bad in (np.ones(2), np.ones((2, 2)), np.ones((1, 1, 3)), 1.0):
        with pytest.raises(ValueError, match=r"values must have shape \[3\] or \[steps, 3\]"):
            bank.update(bad)
    for bad in (np.ones(3, complex), ["a", "b", "c"], [None, 1, 2]):
        with pytest.raises(TypeError, match="values must be real numbers"):
            bank.update(bad)
    with pytest.raises(ValueError, match="valid must have the shape of values"):
        bank.update(np.ones(3), np.ones(2, bool))
    np.testing.assert_array_equal(bank.state, before)


def test_errors_of_the_extension_leave_the_state_alone() -> None:
    bank = DetectorBank(["mad"], 2)
    kinds, parameters, starts, members = bank._plan
    values, room = np.ones((1, 2)), np.empty((64, 7), np.int64)
    words = bank._words
    broken: list[tuple[Any, ...]] = [
        ((kinds, parameters, starts, members), words[:-1], values, None, room),
        ((kinds, parameters, starts[:-1], members), words, values, None, room),
        ((kinds, parameters, starts, members + 1), words, values, None, room),
        ((kinds + 40, parameters, starts, members), words, values, None, room),
        ((kinds, parameters[:, :3].copy(), starts, members), words, values, None, room),
        ((kinds, parameters, -starts, members), words, values, None, room),
        ((kinds, parameters, starts, members), words, values, np.ones((2, 2), bool), room),
        ((kinds, parameters, starts, members), words, values, None, room[:2]),
        ((kinds, parameters, starts, members), words, values, None, room[:, :5].copy()),
    ]
    for arguments in broken:
        with pytest.raises(ValueError):
            _core.detect(*arguments)
    with pytest.raises(TypeError):
        _core.detect([], words, values, None, room)  # type: ignore[arg-type]
    np.testing.assert_array_equal(words, DetectorBank(["mad"], 2)._words)


@pytest.mark.soak
def test_false_alarms_on_gaussian_noise() -> None:
    """No false alarm of mad and ewma; cusum about one in 600, 8,000 and 30,000 steps at h 5, 8 and 10."""
    steps = size(20_000, 200_000)
    values = np.random.default_rng(0).normal(3.0, 0.1, (steps, 1))
    spec = ["mad", "ewma", *(Detector("cusum", {"h": h}) for h in (5.0, 8.0, 10.0))]
    bank = DetectorBank(spec, 1)
    counts = np.bincount(bank.update(values)["detector"], minlength=6)
    assert counts[:3].tolist() == [0, 0, 0]
    for count, between in zip(counts[3:], (600, 8_000, 30_000), strict=True):
        assert steps / between / 2.5 - 2 <= count <= 2.5 * steps / between + 4


@pytest.mark.soak
def test_false_alarms_on_log_normal_noise() -> None:
    """Gradient norms: with the logarithm as quiet as on Gaussian noise, without it one in about 2,000 and 3,700."""
    steps = size(20_000, 200_000)
    values = np.exp(np.random.default_rng(0).normal(0.0, 0.3, (steps, 1)))
    spec = [Detector(rule, {"log": log}) for log in (True, False) for rule in ("mad", "ewma")]
    counts = np.bincount(DetectorBank(spec, 1).update(values)["detector"], minlength=5)
    assert counts[1:3].tolist() == [0, 0]
    for count, between in zip(counts[3:], (2_000, 3_700), strict=True):
        assert steps / between / 3 <= count <= 3 * steps / between
