"""``trainmon info``: what the kernels run on."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainmon.ops import build_info, cpu_info

__all__ = ["print_info"]


def print_info() -> int:
    """Prints two tables, instruction set and build."""
    import trainmon

    console = Console()
    console.print(Text(f"trainmon {trainmon.__version__}"))
    for title, facts in (("Instruction set", cpu_info()), ("Build", build_info())):
        table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in facts.items():
            table.add_row(key.replace("_", " "), Text(_text(value)))
        console.print(table)
    return 0


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value)
    return "-" if value is None else str(value)
