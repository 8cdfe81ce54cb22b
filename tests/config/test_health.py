"""Rules in a configuration: every mistake at its place, with the word that was meant; globs; the pages' examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainmon.config import ConfigError, glob_pattern, load_config, load_labels
from trainmon.config.health import _no_series
from trainmon.health.rules import DEFAULT_RULES
from trainmon.series import catalogue

DOCS = Path(__file__).parents[2] / "docs"

WRONG = """\
callbacks:
  - type: TrainMonitor
    health:
      gate: before_updat
      rules:
        - series: los/global
          detector: madd
        - series: [grad/norm, "grad/norm/*"]
          detector: mad
          parameters: {kk: 3}
        - series: loss/global
          detector: mad
          parameters: {window: 3.5, log: true}
          action: [rollback]
        - detector: mad
        - series: loss/global
        - series: loss/global
          detector: threshold
          parameters: {above: 1e1}
          action: [log, stopp]
          patience: 3
"""
MESSAGES = [
    "4:13: callbacks[0].health.gate: expected 'late' or 'before_update', found the text 'before_updat'; did you mean",
    "6:19: callbacks[0].health.rules[0].series: no series is called 'los/global'; did you mean 'loss/global'?",
    "7:21: callbacks[0].health.rules[0].detector: expected the id of a detector, found 'madd'; did you mean 'mad'?",
    "10:28: callbacks[0].health.rules[1].parameters.kk: unknown parameter of mad; did you mean 'k'?",
    "13:32: callbacks[0].health.rules[2].parameters.window: mad: window must be a whole number from 2",
    "14:19: callbacks[0].health.rules[2].action: rollback is not built yet in this version (known, comes later)",
    "15:11: callbacks[0].health.rules[3].series: expected the name of at least one series",
    "16:11: callbacks[0].health.rules[4].detector: expected the id of a detector; known: nonfinite, threshold",
    "20:25: callbacks[0].health.rules[5].action[1]: expected 'log', 'notify'",
    "21:11: callbacks[0].health.rules[5].patience: unknown key",
]


def problems(**health: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(health=health)
    return str(caught.value)


def test_every_mistake_is_told_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(WRONG)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]
    assert len(found) == len(MESSAGES)
    for message, start in zip(found, MESSAGES, strict=True):
        assert message.startswith(start)


RULE = {"series": "grad/norm", "detector": "mad"}


@pytest.mark.parametrize(
    ("health", "message"),
    [
        (
            {"rules": [{**RULE, "action": "skip_step"}]},
            "health.rules[0].action: skip_step needs gate: before_update",
        ),
        (
            {"rules": [RULE, {**RULE, "action": ["log", "notify"]}]},
            "health.rules[1].action: notify needs a webhook",
        ),
        ({"rules": [{**RULE, "action": []}]}, "rules[0].action: expected at least one action"),
        (
            {"rules": [{**RULE, "parameters": {"k": "x"}}]},
            "parameters.k: expected a number, found the text 'x'",
        ),
        ({"rules": [{**RULE, "parameters": {"k": None}}]}, "parameters.k: mad: k must have a value"),
        (
            {"rules": [{**RULE, "parameters": [3]}]},
            "parameters: expected a mapping of names to numbers, found a list",
        ),
        ({"rules": [{**RULE, "detector": "threshold"}]}, "parameters: threshold:"),
        ({"webhook": True}, "webhook: expected a mapping with url or url_env"),
        ({"webhook": {}}, "webhook.url: expected either url or url_env"),
        (
            {"webhook": {"url": "ftp://x"}},
            "webhook.url: expected an address that begins with http:// or https://",
        ),
        ({"timeout": 0}, "timeout: expected a number from 1 to 86400, found the integer 0"),
    ],
)
def test_what_belongs_together(health: dict[str, Any], message: str) -> None:
    assert message in problems(**health)


def test_numbers_and_flags_of_parameters() -> None:
    rule = {**RULE, "parameters": {"k": "1e1", "log": True, "window": 64}}
    (bound,) = load_config(health={"rules": [rule]}).health.rules  # type: ignore[union-attr]
    assert bound.parameters == {"k": 10.0, "log": 1.0, "window": 64.0}


@pytest.mark.parametrize(
    ("glob", "good"),
    [
        *[(glob, True) for rule in DEFAULT_RULES for glob in rule.globs],
        *[
            (name.replace("<p>", "a.b[0]/c").replace("<layer>", "3"), True)
            for name in ("grad/norm/<p>", "moe/dead/<layer>")
        ],
        *[
            ("grad/*", True),
            ("**", True),
            ("*/nonfinite", True),
            ("moment/norm/exp_avg/w", True),
            ("gra?/norm", True),
        ],
        *[
            ("grad/nrm", False),
            ("foo/**", False),
            ("loss/global/x", False),
            ("gr*m", False),
            ("grad?norm", False),
        ],
    ],
)
def test_a_glob_that_no_series_can_match_is_an_error(glob: str, good: bool) -> None:
    assert (_no_series(glob) is None) == good


def test_a_glob_of_the_catalogue_matches_what_it_says() -> None:
    names = [re.sub("<[^>]*>", "x", name) for name in catalogue()]
    for name in names:
        assert _no_series(name) is None and glob_pattern(name).fullmatch(name)


@pytest.mark.parametrize("page", ["health.md"])
def test_the_examples_of_the_pages_are_right(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        if block.startswith("-"):
            assert load_labels(path) == [(1042, 1042, ""), (2310, 2330, "bad batch")]
        else:
            config = load_config(path)
            assert config.health is not None and len(config.health.rules) == 4
