"""Rules as the judge takes them, and those that hold without any configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainmon.config import ConfigError, HealthConfig, Place, Problem, RuleConfig, glob_pattern
from trainmon.events import Action

__all__ = ["DEFAULT_RULES", "Rule", "check_actions", "rules_of"]

#: Detectors that count by themselves how often a value broke the rule: their alarm is the verdict after that.
PATIENT = frozenset({"global_norm_spike", "kill_loss_spike"})
#: Detectors of upward jumps of a value: what follows one is classed.
SPIKES = frozenset(
    {
        *("global_norm_spike", "kill_loss_spike", "skip_step_sigma", "stability_score", "spike_rtol"),
        *("megatron_max", "zclip", "adagc", "turbulence", "mad", "cusum", "ewma"),
    }
)


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: what messages call it.
        globs: the series that it watches.
        detector, parameters: of :data:`trainmon.ops.RULES`.
        actions: what an alarm asks for.
        consecutive: flags in a row on a series that make an alarm.
        warmup: steps of the training without alarm.
        cooldown: steps after the end of an alarm without a new one.
        place: key path in the configuration.
        only, without: of the series that match, these alone, or all but these.
    """

    name: str
    globs: tuple[str, ...]
    detector: str
    parameters: Mapping[str, float | None] = field(default_factory=dict)
    actions: frozenset[Action] = frozenset({Action.LOG})
    consecutive: int = 1
    warmup: int = 0
    cooldown: int = 0
    place: str = ""
    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    _patterns: tuple[re.Pattern[str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_patterns", tuple(glob_pattern(glob) for glob in self.globs))

    def __contains__(self, series: str) -> bool:
        """Whether the rule watches a series."""
        if series in self.without or (self.only is not None and series not in self.only):
            return False
        return any(pattern.fullmatch(series) for pattern in self._patterns)

    @property
    def decides(self) -> bool:
        """Whether it may keep weights from being updated."""
        return bool(self.actions & {Action.SKIP_STEP, Action.STOP, Action.RAISE})

    @property
    def key(self) -> str:
        """What a saved state of its detectors belongs to."""
        parameters = ",".join(f"{name}={value}" for name, value in sorted(self.parameters.items()))
        return f"{self.name}|{' '.join(self.globs)}|{self.detector}|{parameters}"


DEFAULT_RULES = (
    Rule(
        "nonfinite",
        (
            *("loss/global", "loss/device", "loss/part/*", "grad/norm", "grad/norm_*", "grad/nonfinite"),
            *("weight/norm", "weight/nonfinite", "moment/norm/*", "update/norm"),
            *("activation/nonfinite/*", "attention/max_logit", "attention/nonfinite_rows"),
        ),
        "nonfinite",
        actions=frozenset({Action.LOG, Action.MARK_UNHEALTHY}),
    ),
    Rule("loss spike", ("loss/global",), "mad"),
    Rule("gradient spike", ("grad/norm",), "mad", {"log": 1.0}),
    Rule("negative second moments", ("moment/v_negative",), "threshold", {"above": 1.0}),
    Rule("dead experts", ("moe/dead",), "threshold", {"above": 1.0}),
)


def _rule(config: RuleConfig, index: int) -> Rule:
    detector = config.detector or ""
    return Rule(
        name=config.name or f"{detector} of {', '.join(config.series)}",
        globs=config.series,
        detector=detector,
        parameters=dict(config.parameters or {}),
        actions=frozenset(Action(action) for action in config.action),
        consecutive=config.consecutive,
        warmup=config.warmup,
        cooldown=config.cooldown,
        place=f"health.rules[{index}]",
    )


def rules_of(config: HealthConfig) -> tuple[Rule, ...]:
    """The default rules, if they hold, then those of the configuration."""
    own = tuple(_rule(rule, index) for index, rule in enumerate(config.rules))
    return (*DEFAULT_RULES, *own) if config.defaults else own


def check_actions(rules: Iterable[Rule], possible: Iterable[Action], host: str) -> None:
    """That the host can do what rules ask for.

    Raises:
        ConfigError: names every rule that asks for more.
    """
    able = frozenset(possible)
    problems = [
        Problem(
            Place(),
            f"{rule.place}.action",
            f"the {host} loop can't do {', '.join(sorted(rule.actions - able))}; it can do {', '.join(sorted(able))}",
        )
        for rule in rules
        if not rule.actions <= able
    ]
    if problems:
        raise ConfigError(problems)
