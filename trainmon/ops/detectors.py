"""Spike detectors: the rules that training teams use, over thousands of series, one call a step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import _core

Int64 = npt.NDArray[np.int64]

# Rule -> parameter -> default. None: a parameter without a value. Order and names are the extension's.
RULES: Mapping[str, Mapping[str, float | None]] = MappingProxyType(
    {
        "nonfinite": {},
        "threshold": {"above": None, "below": None, "patience": 1},
        "global_norm_spike": {"threshold": 3.0, "count": 10},
        "kill_loss_spike": {"factor": 2.0, "patience": 4, "window": 100, "cap": 10.0},
        "skip_step_sigma": {"k": 6.0, "window": 128, "warmup": 64},
        "stability_score": {"k": 6.0, "window": 128, "span": 10_000},
        "spike_rtol": {"rtol": 2.0, "atol": None, "window": 10},
        "megatron_max": {"factor": 10.0, "samples": 100},
        "zclip": {"z": 2.5, "warmup": 25, "alpha": 0.97},
        "adagc": {"factor": 1.05, "warmup": 100, "beta": 0.98},
        "turbulence": {"theta": 0.5, "beta": 0.99},
        "mad": {"k": 6.0, "window": 128, "warmup": 32, "shift": 32, "log": False},
        "cusum": {
            "k": 0.5,
            "h": 10.0,
            "window": 128,
            "warmup": 32,
            "shift": 32,
            "outlier": 6.0,
            "down": False,
            "log": False,
        },
        "ewma": {"k": 6.0, "alpha": 0.02, "warmup": 32, "shift": 32, "log": False},
        "dead_expert": {"age": 100, "share": 1e-3},
        "straggler": {"below": 0.75, "hits": 3, "reports": 5},
        "linearity": {"below": 0.95, "window": 20},
    }
)

# What `EVENT_DTYPE`'s verdict says: the value breaks the rule; it has done so as often in a row as the rule
# allows; half of the window lies above the cap; so many flags in a row are the new level.
VERDICTS = ("none", "flag", "stop", "high", "shift")

EVENT_DTYPE = np.dtype(
    [
        ("step", np.int64),
        ("series", np.int64),
        ("detector", np.int64),
        ("verdict", np.int64),
        ("value", np.float64),
        ("score", np.float64),
        ("limit", np.float64),
    ]
)

_EVENT_WORDS = EVENT_DTYPE.itemsize // 8
_KINDS = {rule: number for number, rule in enumerate(RULES)}
_PARAMETERS = 8
_FORMAT = 1  # of the state array
_HEADER = 4  # format, series, detectors, steps
_PER_DETECTOR = 2 + _PARAMETERS  # kind, number of members, parameters
_MOST_SERIES = 1 << 24  # in a state: a damaged one must not fill the memory with names
_VALUES_A_CALL = 1 << 16  # the extension keeps the GIL


@dataclass(frozen=True, slots=True)
class Detector:
    """One rule, its parameters where they aren't the defaults, and the series it watches.

    Attributes:
        rule: a name of `RULES`.
        parameters: by name; the rest are the defaults of `RULES`.
        series: names or positions; None: all.
    """

    rule: str
    parameters: Mapping[str, float | None] = field(default_factory=dict)
    series: Sequence[str | int] | None = None


@dataclass(frozen=True, slots=True)
class Detection:
    """One event in words.

    Attributes:
        step: position of the step in the call, from 0.
        series: the series' name.
        rule: the detector's rule.
        verdict: of `VERDICTS`.
        value: the value that was judged.
        score, limit: what the rule compared: the value itself, a distance in deviations, a share.
    """

    step: int
    series: str
    rule: str
    verdict: str
    value: float
    score: float
    limit: float

    def __str__(self) -> str:
        judged = f"{self.series} = {self.value:g}"
        if self.verdict == "shift":
            return f"{judged}: {self.rule} takes this for the new level"
        return f"{judged}: {self.rule} {self.verdict} ({self.score:g} against {self.limit:g})"


class DetectorBank:
    """Rules over series of scalars, with bounded state that can be saved with a checkpoint.

    All ranks that show a bank the same values get the same events. A null value isn't shown to the rules. A value
    that isn't finite makes an event of rule `nonfinite`, which every bank has for all its series unless the spec
    says otherwise, and leaves the state of all other rules untouched. No rule judges before it has the history it
    needs, and only `mad`, `cusum` and `ewma` with `log` take logarithms: of values above 0, others they don't see.

    Args:
        spec: a mapping of rule to parameters (or None), or an iterable of rules and `Detector`s; the order is that
            of the numbers in the events. Counts are whole numbers.
        series: the names, or how many: then the names are "0", "1", ...

    Raises:
        ValueError: an unknown rule, parameter or series, a parameter out of its range; the nearest is named.
        TypeError: a parameter that is no number.

    Formulas, parameters and sources: docs/kernels/detectors.md.
    """

    def __init__(
        self,
        spec: Mapping[str, Mapping[str, float | None] | None] | Iterable[str | Detector],
        series: int | Iterable[str],
    ) -> None:
        names = [str(i) for i in range(series)] if isinstance(series, int) else [str(name) for name in series]
        self._positions = {name: i for i, name in enumerate(names)}
        if len(self._positions) != len(names):
            twice = next(name for i, name in enumerate(names) if self._positions[name] != i)
            raise ValueError(f"two series are called {twice!r}")
        self._names = tuple(names)
        detectors = _listed(spec)
        if not any(detector.rule == "nonfinite" for detector in detectors):
            detectors.insert(0, Detector("nonfinite"))
        members = [self._members(detector) for detector in detectors]
        kinds = np.array([_kind(detector.rule) for detector in detectors], np.int64)
        parameters = np.array([_parameters(detector) for detector in detectors], np.float64)
        self._build(kinds, parameters, members)

    def _build(self, kinds: Int64, parameters: npt.NDArray[np.float64], members: list[Int64]) -> None:
        words = _core.detector_words(kinds, parameters)
        starts = np.array([0, *accumulate(m.size for m in members)], np.int64)
        self._plan = (kinds, parameters, starts, np.concatenate(members).astype(np.int64))
        self._words = np.zeros(int((words * np.diff(starts)).sum()), np.int64)
        self._events = np.empty((max(int(starts[-1]), 64), _EVENT_WORDS), np.int64)
        self._steps = 0
        _core.detector_reset(self._plan, self._words)

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the series."""
        return self._names

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """The rules in the order of their numbers, with all parameters and the positions of their series."""
        kinds, parameters, starts, members = self._plan
        rules = list(RULES)
        return tuple(
            Detector(
                rules[kind],
                {
                    name: None if np.isnan(value) else float(value)
                    for name, value in zip(RULES[rules[kind]], parameters[i], strict=False)
                },
                tuple(int(member) for member in members[starts[i] : starts[i + 1]]),
            )
            for i, kind in enumerate(kinds)
        )

    @property
    def steps(self) -> int:
        """Steps shown so far."""
        return self._steps

    def update(self, values: npt.ArrayLike, valid: npt.ArrayLike | None = None) -> npt.NDArray[np.void]:
        """Shows the values of one step, or of many, to the rules.

        Args:
            values: shape [series], or [steps, series] to replay a history; any real dtype, taken as float64.
            valid: False where the value is null; the same shape. None: none is.

        Returns:
            The events as an array of `EVENT_DTYPE`, in order of step, detector, series; `step` counts from 0 in
            this call. At most one for each value and detector.

        Raises:
            ValueError: another shape.
            TypeError: values that are no real numbers.
        """
        shown, mask = self._shown(values, valid)
        events: list[Int64] = []
        at_once = max(1, _VALUES_A_CALL // max(1, shown.shape[1]))
        first = 0
        while first < shown.shape[0]:
            some = slice(first, first + at_once)
            done, found = _core.detect(
                self._plan, self._words, shown[some], None if mask is None else mask[some], self._events
            )
            if found:
                events.append(self._events[:found].copy())
                events[-1][:, 0] += first
            first += done
            self._steps += done
        return (np.concatenate(events) if events else np.empty((0, _EVENT_WORDS), np.int64)).view(
            EVENT_DTYPE
        )[:, 0]

    def describe(self, events: npt.NDArray[np.void]) -> list[Detection]:
        """Events of `update` in words."""
        rules = list(RULES)
        kinds = self._plan[0]
        return [
            Detection(
                int(event["step"]),
                self._names[event["series"]],
                rules[kinds[event["detector"]]],
                VERDICTS[event["verdict"]],
                float(event["value"]),
                float(event["score"]),
                float(event["limit"]),
            )
            for event in events
        ]

    def stability_score(self) -> dict[str, float]:
        """By series: flags among the last `span` steps / `span`, of the first `stability_score` in the bank.

        Raises:
            ValueError: the bank has none.
        """
        kinds, parameters, starts, members = self._plan
        found = np.flatnonzero(kinds == _KINDS["stability_score"])
        if found.size == 0:
            raise ValueError("this bank has no detector stability_score")
        words = _core.detector_words(kinds, parameters)
        at = int(found[0])
        first = int((words * np.diff(starts))[:at].sum())
        watched = members[starts[at] : starts[at + 1]]
        flags = self._words[first : first + words[at] * watched.size].reshape(watched.size, -1)[:, 3]
        span = parameters[at, list(RULES["stability_score"]).index("span")]
        return {self._names[i]: float(flags[j] / span) for j, i in enumerate(watched)}

    def reset(self) -> None:
        """Forgets everything, as when training goes back to a step before the state's."""
        _core.detector_reset(self._plan, self._words)
        self._steps = 0

    @property
    def state(self) -> Int64:
        """A copy of everything but the names: an int64 array of one axis, to save with the checkpoint.

        It describes itself: format, number of series, detectors and steps; then for each detector its kind, the
        number of its series and the bits of its parameters; the positions of the series; the words of the rules.
        """
        kinds, parameters, starts, members = self._plan
        header = np.array([_FORMAT, len(self._names), kinds.size, self._steps], np.int64)
        table = np.column_stack([kinds, np.diff(starts), parameters.view(np.int64)])
        return np.concatenate([header, table.ravel(), members, self._words])

    @classmethod
    def from_state(cls, state: npt.ArrayLike, series: Iterable[str] | None = None) -> DetectorBank:
        """The bank whose `state` this is; it goes on with the same bits.

        Args:
            state: what `state` gave; copied.
            series: the names; None: "0", "1", ...

        Raises:
            ValueError: no such array, a damaged one, or another number of names.
            TypeError: another dtype than int64.
        """
        words = np.array(state, order="C")
        if words.dtype != np.int64 or words.ndim != 1:
            raise TypeError(f"a bank's state is one axis of int64, not {words.dtype} of shape {words.shape}")
        if words.size < _HEADER or words[0] != _FORMAT:
            raise ValueError("this is no state of a detector bank, or one of another format")
        count, detectors, steps = (int(word) for word in words[1:_HEADER])
        rest = words[_HEADER:]
        if not (0 <= detectors <= rest.size // _PER_DETECTOR and 0 <= count <= _MOST_SERIES and steps >= 0):
            raise ValueError("the state is cut off or damaged: its header doesn't fit its length")
        table = rest[: detectors * _PER_DETECTOR].reshape(detectors, _PER_DETECTOR)
        rest = rest[table.size :]
        sizes = table[:, 1]
        if (sizes < 0).any() or (sizes > rest.size).any() or sizes.sum() > rest.size:
            raise ValueError("the state is cut off or damaged: it has fewer words than its detectors need")
        names = [str(name) for name in series] if series is not None else [str(i) for i in range(count)]
        if len(names) != count:
            raise ValueError(f"{len(names)} names for a state of {count} series")
        bank = cls({}, names)
        watched = rest[: int(sizes.sum())]
        if ((watched < 0) | (watched >= count)).any():
            raise ValueError("the state is damaged: a detector watches a series that isn't there")
        ends = list(accumulate(sizes.tolist()))
        members = [rest[end - size : end].copy() for end, size in zip(ends, sizes.tolist(), strict=True)]
        bank._build(
            table[:, 0].copy(), np.ascontiguousarray(table[:, 2:]).view(np.float64), members or [rest[:0]]
        )
        kept = rest[watched.size :]
        if kept.size != bank._words.size:
            raise ValueError(f"the state has {kept.size} words, its detectors need {bank._words.size}")
        _core.detector_check(bank._plan, np.ascontiguousarray(kept))
        bank._words[:] = kept
        bank._steps = steps
        return bank

    def take_over(self, other: DetectorBank) -> int:
        """Goes on from another bank's states, where rule, parameters and the series' name are the same.

        Returns:
            How many states were taken: pairs of a detector and a series. The rest stay as they are.
        """
        theirs = other._places()
        taken = 0
        for key, place in self._places().items():
            if key in theirs:
                self._words[place] = other._words[theirs[key]]
                taken += 1
        return taken

    def _places(self) -> dict[tuple[int, bytes, str], slice]:
        """Where the words of a rule with its parameters stand for a series; of equal detectors the first."""
        kinds, parameters, starts, members = self._plan
        words = _core.detector_words(kinds, parameters)
        places: dict[tuple[int, bytes, str], slice] = {}
        at = 0
        for i, kind in enumerate(kinds.tolist()):
            bits, size = parameters[i].tobytes(), int(words[i])
            for member in members[starts[i] : starts[i + 1]].tolist():
                places.setdefault((kind, bits, self._names[member]), slice(at, at + size))
                at += size
        return places

    def _members(self, detector: Detector) -> Int64:
        if detector.series is None:
            return np.arange(len(self._names), dtype=np.int64)
        return np.array([self._position(one, detector.rule) for one in detector.series], np.int64)

    def _position(self, series: str | int, rule: str) -> int:
        if isinstance(series, str):
            if series not in self._positions:
                raise ValueError(f"{rule}: unknown series {series!r}{_nearest(series, self._names)}")
            return self._positions[series]
        if not 0 <= series < len(self._names):
            raise ValueError(f"{rule}: there is no series {series}: there are {len(self._names)}")
        return int(series)

    def _shown(
        self, values: npt.ArrayLike, valid: npt.ArrayLike | None
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_] | None]:
        given = np.asarray(values)
        if given.dtype.kind not in "biuf":
            raise TypeError(f"values must be real numbers, not {given.dtype}")
        count = len(self._names)
        if given.ndim not in (1, 2) or given.shape[-1] != count:
            raise ValueError(f"values must have shape [{count}] or [steps, {count}], not {given.shape}")
        shown = np.require(given if given.ndim == 2 else given[None], np.float64, ["C", "ALIGNED"])
        if valid is None:
            return shown, None
        mask = np.asarray(valid, bool)
        if mask.shape != given.shape:
            raise ValueError(f"valid must have the shape of values, {given.shape}, not {mask.shape}")
        return shown, np.ascontiguousarray(mask.reshape(shown.shape))


def _listed(
    spec: Mapping[str, Mapping[str, float | None] | None] | Iterable[str | Detector],
) -> list[Detector]:
    if isinstance(spec, str):
        return [Detector(spec)]
    if isinstance(spec, Mapping):
        return [Detector(rule, parameters or {}) for rule, parameters in spec.items()]
    return [Detector(one) if isinstance(one, str) else one for one in spec]


def _kind(rule: str) -> int:
    if rule not in _KINDS:
        raise ValueError(f"unknown detector {rule!r}{_nearest(rule, RULES)}")
    return _KINDS[rule]


def _parameters(detector: Detector) -> list[float]:
    """The eight parameters as the extension takes them."""
    defaults = RULES[detector.rule]
    for name in detector.parameters:
        if name not in defaults:
            raise ValueError(f"{detector.rule}: unknown parameter {name!r}{_nearest(name, defaults)}")
    merged = [_number(detector, name, default) for name, default in defaults.items()]
    return merged + [0.0] * (_PARAMETERS - len(merged))


def _number(detector: Detector, name: str, default: float | None) -> float:
    value: Any = detector.parameters.get(name, default)
    if value is None:
        if default is not None:
            raise ValueError(f"{detector.rule}: {name} must have a value; the default is {default}")
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{detector.rule}: {name} must be a number, not {value!r}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
