"""The section `health:`: rules over the published series, and what they may ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from .fields import key, section
from .words import nearest

__all__ = [
    "HealthConfig",
    "LabelConfig",
    "RuleConfig",
    "RulesFile",
    "WebhookConfig",
    "glob_pattern",
    "may_match",
]

Action = Literal[
    "log",
    "notify",
    "skip_step",
    "skip_data",
    "save",
    "mark_unhealthy",
    "profile",
    "stop",
    "raise",
    "rollback",
]
_LATER: tuple[Action, ...] = ("skip_data", "save", "profile", "rollback")


def glob_pattern(glob: str) -> re.Pattern[str]:
    """The series that a glob means: `*` and `?` stay within one part between slashes, `**` doesn't; the rest is taken
    literally, since names of parameters may hold any character."""
    words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*|\*|\?)", glob)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts), re.DOTALL)


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    """Where the action `notify` posts to: one JSON object a message, from rank 0, in a thread of its own."""

    url: str | None = key(None, "An http or https address.")
    url_env: str | None = key(None, "Or the name of an environment variable that holds it.")
    every: float = key(
        60.0, "At least so many seconds between two posts; what comes sooner is counted.", minimum=0
    )
    timeout: float = key(10.0, "Seconds that a post may take.", minimum=0.1, maximum=600)

    def check(self) -> Iterator[tuple[str, str]]:
        if (self.url is None) == (self.url_env is None):
            yield "url", "expected either url or url_env"
        elif self.url is not None and not re.match(r"https?://[^/\s]", self.url):
            yield "url", "expected an address that begins with http:// or https://"


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """A rule: which series it watches with which detector (docs/kernels/detectors.md), and what follows from an alarm."""

    series: tuple[str, ...] = key(
        (),
        "Series by name; `*` and `?` stand for any characters between slashes, `**` for any at all.",
        single=True,
    )
    detector: str | None = key(None, "Id of the detector.")
    parameters: Mapping[str, float | None] | None = key(
        None, "Its parameters where they aren't the defaults."
    )
    action: tuple[Action, ...] = key(("log",), "What to do.", single=True)
    consecutive: int = key(1, "So many flags in a row on a series are an alarm.", minimum=1)
    warmup: int = key(0, "No alarm in the first so many steps of the training.", minimum=0)
    cooldown: int = key(0, "After the end of an alarm, so many steps without a new one.", minimum=0)
    name: str | None = key(None, "What messages call the rule; null: made from detector and series.")

    def check(self) -> Iterator[tuple[str, str]]:
        if not self.series:
            yield "series", "expected the name of at least one series"
        for glob in self.series:
            problem = _no_series(glob)
            if problem:
                yield "series", problem
        for action in self.action:
            if action in _LATER:
                yield "action", f"{action} is not built yet in this version (known, comes later)"
        if not self.action:
            yield "action", "expected at least one action"
        yield from self._check_detector()

    def _check_detector(self) -> Iterator[tuple[str, str]]:
        # Loads the extension, which only a configuration with rules needs.
        from trainmon.ops.detectors import RULES, Detector, DetectorBank

        if self.detector is None:
            yield "detector", f"expected the id of a detector; known: {', '.join(RULES)}"
            return
        if self.detector not in RULES:
            meant = nearest(self.detector, RULES)
            hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(RULES)}"
            yield "detector", f"expected the id of a detector, found {self.detector!r}; {hint}"
            return
        known = RULES[self.detector]
        for name in self.parameters or ():
            if name not in known:
                meant = nearest(name, known)
                hint = f"known: {', '.join(known) or 'none'}" if meant is None else f"did you mean {meant!r}?"
                yield f"parameters.{name}", f"unknown parameter of {self.detector}; {hint}"
                return
        try:
            DetectorBank([Detector(self.detector, self.parameters or {})], 1)
        except (TypeError, ValueError) as error:
            text = str(error).removeprefix(f"{self.detector}: ")
            at = next((name for name in self.parameters or () if re.search(rf"\b{name}\b", text)), None)
            yield f"parameters.{at}" if at else "parameters", f"{self.detector}: {text}"


def _no_series(glob: str) -> str | None:
    """What is wrong with a glob that no series of the catalogue can match."""
    from trainmon.series import catalogue

    if any(may_match(glob, name) for name in catalogue()):
        return None
    meant = nearest(glob, catalogue())
    return f"no series is called {glob!r}" + (f"; did you mean {meant!r}?" if meant else "")


def may_match(glob: str, name: str) -> bool:
    """Whether a glob can match a series of this name in the catalogue, whatever its subjects are called."""
    return _overlap(_tokens(glob), _tokens(re.sub(r"<[^>]*>", "**", name)))


def _tokens(glob: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\*\*|.", glob, re.DOTALL))


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether some text matches both globs."""
    reached, done = [(0, 0)], set[tuple[int, int]]()
    while reached:
        i, j = here = reached.pop()
        if here in done:
            continue
        done.add(here)
        a, b = one[i : i + 1], other[j : j + 1]
        if not a and not b:
            return True
        for star, char, past, taken in ((a, b, (i + 1, j), (i, j + 1)), (b, a, (i, j + 1), (i + 1, j))):
            if star and star[0] in ("*", "**"):
                reached.append(past)
                if char and (star[0] == "**" or char[0] != "/"):
                    reached.append(taken)
        if a and b and (a == b or ("?" in (a[0], b[0]) and "/" not in (a[0], b[0]))):
            reached.append((i + 1, j + 1))
    return False


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Rules, and the state of the run that follows from them."""

    gate: Literal["late", "before_update"] = key(
        "late", "When rules decide: after the step, off the critical path, or before weights are updated."
    )
    defaults: bool = key(True, "The rules that hold without any configuration: docs/health.md.")
    rules: tuple[RuleConfig, ...] = key((), "Rules beside these.")
    calm: int = key(20, "So many reports without a flag make the run healthy again.", minimum=1)
    timeout: float = key(60.0, "Seconds that a rank waits for the others.", minimum=1, maximum=86400)
    on_lost: Literal["log", "stop", "raise"] = key(
        "log", "What to do when a rank died, or didn't come within `timeout`."
    )
    webhook: WebhookConfig | None = section(None, "Where `notify` posts to.")

    def check(self) -> Iterator[tuple[str, str]]:
        if self.webhook is not None and self.webhook.url is None and self.webhook.url_env is None:
            yield "webhook", "expected a mapping with url or url_env"
        for index, rule in enumerate(self.rules):
            if "skip_step" in rule.action and self.gate == "late":
                yield f"rules.{index}.action", "skip_step needs gate: before_update; late, the step is over"
            if "notify" in rule.action and self.webhook is None:
                yield f"rules.{index}.action", "notify needs a webhook: add health.webhook"


@dataclass(frozen=True, slots=True)
class RulesFile:
    """A file that holds nothing but rules, for ``trainmon replay``."""

    rules: tuple[RuleConfig, ...] = key((), "Rules.")
    defaults: bool = key(False, "The rules that hold without any configuration.")


@dataclass(frozen=True, slots=True)
class LabelConfig:
    """Steps of a run in which something was wrong, for ``trainmon replay``."""

    start: int = key(0, "First step.", minimum=1)
    stop: int | None = key(None, "Last step, itself included; null: the first.", minimum=1)
    name: str | None = key(None, "What it was.")

    def check(self) -> Iterator[tuple[str, str]]:
        if self.start == 0:
            yield "start", "expected the first step"
        if self.stop is not None and self.stop < self.start:
            yield "stop", f"expected a step of at least start ({self.start}), found {self.stop}"
