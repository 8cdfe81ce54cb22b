"""What the pages name exists: every test that one of them mentions as proof."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for file, name in _TEST.findall(page.read_text(encoding="utf-8")):
        path = ROOT / file
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            missing.append(f"{file}::{name}" if name else file)
    assert not missing
