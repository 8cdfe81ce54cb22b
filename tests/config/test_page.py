"""docs/config.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from trainmon.config.page import page


def test_the_page_of_all_keys_is_up_to_date() -> None:
    shown = (Path(__file__).parents[2] / "docs/config.md").read_text(encoding="utf-8")
    assert shown == page() + "\n", "run: python -m trainmon.config.page > docs/config.md"


def test_the_page_shows_types_defaults_and_what_comes_later() -> None:
    text = page()
    assert "| `every` | an integer of at least 1 | `1` |" in text
    assert "| `on_full` | 'drop' or 'block' | `drop` |" in text
    assert "## `sinks.tensorboard`" in text and "`checkpoint`, `recovery`." in text
