"""Names as msProbe's older monitor has them: shortened ones, and exact ones that select."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["ShortNames", "Target", "picked", "read_targets", "row_filter"]

#: What of a module has rows: ``{"input": "tuple[2]:0"}``; empty: everything.
Target = Mapping[str, str]

_STARTS = ("layers.", "embedding", "final", "output", "norm")
_CHUNK = re.compile(r"\d+:")
_SUFFIX = re.compile(r"(.*)(\.(?:input|output|grad_input|grad_output)\.\d+)", re.DOTALL)
#: Kinds of rows of modules, as V2 calls them, by the older monitor's word.
_KINDS = {"input": "input", "output": "output", "input_grad": "grad_input", "output_grad": "grad_output"}


class ShortNames:
    """Names from what tells layers apart on: ``model.decoder.layers.0.w`` becomes ``layers.0.w``.

    A name stays whole where another one would become the same.

    Args:
        modules, parameters: all names that there are.
    """

    def __init__(self, modules: Iterable[str], parameters: Iterable[str]) -> None:
        self._modules, self._parameters = _shortened(modules), _shortened(parameters)

    def module(self, name: str) -> str:
        """A module's own name, shortened."""
        return self._modules.get(name, name)

    def of(self, kind: str, name: str, scope: str) -> str:
        """A row's name, shortened."""
        if kind == "cc":
            return name
        if kind == "module":
            match = _SUFFIX.fullmatch(name)
            return name if match is None else self.module(match[1]) + match[2]
        suffix = f".{scope}" if kind == "optimizer" and name.endswith(f".{scope}") else ""
        base = name.removesuffix(suffix) if suffix else name
        return self._parameters.get(base, base) + suffix


def _shortened(names: Iterable[str]) -> dict[str, str]:
    whole = list(dict.fromkeys(names))
    short = [_short(name) for name in whole]
    taken = Counter([*short, *whole])  # a name that is short already stands in both
    return {name: less for name, less in zip(whole, short, strict=True) if less != name and taken[less] == 1}


def _short(name: str) -> str:
    match = _CHUNK.match(name)
    chunk, rest = (match[0], name[match.end() :]) if match else ("", name)
    for start in _STARTS:
        at = rest.find(start)
        if at >= 0:
            return chunk + rest[at:]
    return name


def read_targets(value: Mapping[object, object], place: str, say: Callable[[str], None]) -> dict[str, Target]:
    """``{name: {"input": "tuple[2]:0", "output": "tensor"}}``; what is none of it is left out, and said."""
    found: dict[str, Target] = {}
    for name, kinds in value.items():
        kinds = {} if kinds is None else kinds
        if not isinstance(kinds, Mapping) or not all(isinstance(one, str) for one in kinds.values()):
            say(f"{place}.{name} must be an object of texts, not {kinds!r}; left out")
            continue
        unknown = [kind for kind in kinds if kind not in _KINDS]
        if unknown:
            say(f"{place}.{name}: unknown {unknown}; there are {', '.join(_KINDS)}")
        found[str(name)] = {str(kind): str(text) for kind, text in kinds.items() if kind in _KINDS}
    return found


def picked(targets: Mapping[str, Target], *, exactly: bool) -> Callable[[str], bool]:
    """Tells of a name whether it is a target: with the chunk before it or without.

    Args:
        exactly: the whole name (of modules), or else its beginning (of parameters).
    """

    def chosen(name: str) -> bool:
        plain = _CHUNK.sub("", name, count=1)
        if exactly:
            return name in targets or plain in targets
        return any(name.startswith(one) or plain.startswith(one) for one in targets)

    return chosen


def row_filter(
    targets: Mapping[str, Target] | None, passes: Sequence[str] | frozenset[str]
) -> Callable[[str, str], bool] | None:
    """Tells of a module's row, by name and scope, whether it is wanted; None: every row is."""
    picks = {name: target for name, target in (targets or {}).items() if target}
    if not picks and set(passes) >= {"forward", "backward"}:
        return None

    def wanted(name: str, scope: str) -> bool:
        if scope not in passes:
            return False
        module, kind, index = name.rsplit(".", 2)
        target = picks.get(module) or picks.get(_CHUNK.sub("", module, count=1))
        if target is None:
            return True
        text = next((text for word, text in target.items() if _KINDS[word] == kind), None)
        if text is None:
            return False
        place = text.rpartition(":")[2]
        return not (":" in text and place.isdigit()) or index == place

    return wanted
