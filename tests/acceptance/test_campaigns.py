"""A test with a long form is found by `make soak`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def _sized(function: ast.FunctionDef) -> bool:
    """Whether it takes a size from tests/campaign.py."""
    names = [getattr(node.func, "id", getattr(node.func, "attr", None)) for node in _calls(function)]
    return "size" in names


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Of the plain ``size(short, long)`` or ``campaign.size(short, long)``."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and (
            isinstance(node.func, ast.Name)
            or getattr(getattr(node.func, "value", None), "id", "") == "campaign"
        )
    ]


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if "tests.campaign" in path.read_text() or "import campaign" in path.read_text()
    ],
    ids=lambda path: str(path.relative_to(TESTS)),
)
def test_long_forms_are_marked(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    unmarked = [
        function.name
        for function in functions
        if function.name.startswith("test_")
        and _sized(function)
        and not any("mark.soak" in ast.unparse(decorator) for decorator in function.decorator_list)
    ]
    assert not unmarked
