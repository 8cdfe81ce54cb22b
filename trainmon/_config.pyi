"""YAML with positions, over libyaml. The contract stands in the C docstrings; `trainmon.config` is the front."""

from typing import NamedTuple, TypeAlias

MAX_BYTES: int
MAX_DEPTH: int
MAX_NODES: int

_Value: TypeAlias = None | bool | int | float | str | tuple[Node, ...] | dict[str, Node]

class Node(NamedTuple):
    value: _Value
    text: str | None
    plain: bool
    line: int
    column: int
    keys: dict[str, tuple[int, int]] | None

class ParseError(ValueError):
    problems: tuple[tuple[int, int, str], ...]
    filename: str

def load(
    text: bytes | bytearray | memoryview,
    filename: str,
    *,
    max_bytes: int = ...,
    max_depth: int = ...,
    max_nodes: int = ...,
) -> Node: ...
