"""What is wrong with a configuration, and where: one exception that carries every problem at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ConfigError", "Place", "Problem"]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file, line and column counted from 1; `file` is None for what came from Python."""

    file: str | None = None
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.file is None:
            return ""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to repair: `message` says what was expected, what was found and what to do."""

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), self.path, self.message) if part)


class ConfigError(ValueError):
    """A configuration can't be used. `problems` lists all that is wrong; the text has one line for each."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        if isinstance(problems, str):  # a host that passes an error on makes it anew of its text
            problems = [Problem(Place(), "", problems)]
        # A stable sort: problems without a line keep the order of the schema.
        self.problems = tuple(sorted(problems, key=_order))
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems]
        if len(lines) == 1:
            return lines[0]
        return "\n  ".join([f"{len(lines)} problems in the configuration:", *lines])


def _order(problem: Problem) -> tuple[str, int, int]:
    return problem.place.file or "", problem.place.line, problem.place.column
