"""Which names a monitor's ``targets`` select."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

__all__ = ["selection"]

Rule = Callable[[str], bool]


def selection(targets: Sequence[str], *, extended: bool) -> Rule:
    """Tells of a name whether it is selected; every name is if there are no targets.

    Args:
        targets: parts of names. ``extended`` ones may be ``=name`` (the whole name), ``glob:pattern``, ``re:pattern``
            (searched for), and with ``!`` before any of them what is left out whatever else says.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    if not extended:
        parts = tuple(targets)
        return lambda name: not parts or any(part in name for part in parts)
    wanted = [_rule(one) for one in targets if not one.startswith("!")]
    unwanted = [_rule(one[1:]) for one in targets if one.startswith("!")]
    return lambda name: (
        (not wanted or any(rule(name) for rule in wanted)) and not any(rule(name) for rule in unwanted)
    )


def _rule(target: str) -> Rule:
    if target.startswith("="):
        return lambda name: name == target[1:]
    if target.startswith("glob:"):
        return lambda name: fnmatchcase(name, target[5:])
    if target.startswith("re:"):
        try:
            pattern = re.compile(target[3:])
        except re.error as error:
            raise ValueError(
                f"[monitor_v2] the target {target!r} is no regular expression: {error}"
            ) from error
        return lambda name: pattern.search(name) is not None
    return lambda name: target in name
