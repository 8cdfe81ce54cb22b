#!/usr/bin/env python3
"""Writes docs/support.md from tests/acceptance/matrix.yaml: what is proven on which host, why the rest is not.

``support_page.py`` writes the page; ``support_page.py --check`` only says whether it is up to date (exit status
1 if not). Needs PyYAML.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.acceptance.matrix import Cell, Matrix, Section, load  # noqa: E402  (needs the path above)

PAGE = ROOT / "docs" / "support.md"

_INTRODUCTION = """\
# What is supported, and what proves it

<!-- Written by scripts/support_page.py from tests/acceptance/matrix.yaml: change that, not this page. -->

How to read this page: **proven** means that named tests of the real thing have to pass in each run of the
whole suite (they are listed at the end), **partial** the same, but what the footnote names is still missing,
*missing* that nothing is claimed, for the reason in the footnote. A dash stands where a capability does not
concern a host. What the core can do is not counted for a host until a test has run on that host.
"""


def _text(text: str) -> str:
    """Text that is safe in a table cell: no column ends in it, and no HTML begins outside of code."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _counts(matrix: Matrix) -> list[str]:
    rows = list(matrix.rows())
    lines = []
    for host, name in matrix.hosts.items():
        cells = [row.cells[host] for row in rows if host in row.cells]
        proven = sum(cell.status == "proven" for cell in cells)
        partial = sum(cell.status == "partial" for cell in cells)
        lines.append(f"- {name}: {proven} of {len(cells)} rows proven, {partial} partial.")
    return [f"The source documents have {len(rows)} rows.", "", *lines]


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    mark = {"proven": "**proven**", "partial": "**partial**", "missing": "*missing*"}[cell.status]
    return " ".join([mark, *(f"[^{reason}]" for reason in cell.reasons)])


def _section(matrix: Matrix, section: Section) -> list[str]:
    hosts = [host for host in matrix.hosts if any(host in row.cells for row in section.rows)]
    rows = [
        [
            _text(row.title),
            _text(row.meaning),
            ", ".join(f"`{series}`" for series in row.series) or "–",
            *(_shown(row.cells.get(host)) for host in hosts),
        ]
        for row in section.rows
    ]
    header = ["Capability", "Meaning", "Series", *(matrix.hosts[host] for host in hosts)]
    return [f"### {section.id}: {section.title}", "", *_table(header, rows), ""]


def _proofs(matrix: Matrix) -> list[str]:
    rows = [
        [_text(row.source), matrix.hosts[host], "<br>".join(f"`{_text(test)}`" for test in cell.tests)]
        for row in matrix.rows()
        for host, cell in row.cells.items()
        if cell.tests
    ]
    return _table(["Row", "Host", "Tests"], rows) if rows else ["No row names a test yet."]


def render(matrix: Matrix) -> str:
    """The page as Markdown text (tables and footnotes as GitHub reads them)."""
    lines = [_INTRODUCTION, *_counts(matrix), ""]
    for document, title in matrix.documents.items():
        lines += [f"## Document {document}: {title}", ""]
        for section in matrix.sections:
            if section.id.startswith(document):
                lines += _section(matrix, section)
    lines += ["## Proofs", "", *_proofs(matrix), ""]
    lines += [f"[^{key}]: {_text(reason[0].upper() + reason[1:])}." for key, reason in matrix.reasons.items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/support.md from the acceptance matrix.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = parser.parse_args(arguments)
    page = render(load())
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        print("docs/support.md is out of date: run scripts/support_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
