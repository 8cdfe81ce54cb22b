"""Reads and checks the acceptance matrix: capabilities of the source documents, and what proves them where.

Knows nothing of pytest and nothing of trainmon, so that the support page can be made in a bare checkout. The
head of ``matrix.yaml`` describes the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

__all__ = ["MATRIX", "Cell", "Matrix", "MatrixError", "Row", "Section", "load"]

MATRIX = Path(__file__).with_name("matrix.yaml")

Status = Literal["proven", "partial", "missing"]

_TEST_ID = re.compile(r"tests/[\w/.-]+\.py(::\w+)+(\[.+\])?")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_ROW_TEXTS = ("id", "source", "source_title", "title", "meaning")


class MatrixError(ValueError):
    """The matrix file is wrong; the message has one line for each fault."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is known of a capability on a host: tests that prove it, keys of the reasons why not, or both."""

    tests: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def status(self) -> Status:
        if not self.tests:
            return "missing"
        return "partial" if self.reasons else "proven"


@dataclass(frozen=True, slots=True)
class Row:
    """One capability. ``cells`` has an entry for each host that the capability concerns."""

    id: str
    source: str
    source_title: str
    title: str
    meaning: str
    series: tuple[str, ...]
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a source document, ``000/2`` for section 2 of document 000."""

    id: str
    title: str
    source_title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The whole file: texts of documents, hosts and reasons by key, and the sections in their order."""

    documents: dict[str, str]
    hosts: dict[str, str]
    reasons: dict[str, str]
    sections: tuple[Section, ...]

    def rows(self) -> Iterator[Row]:
        for section in self.sections:
            yield from section.rows

    def tests(self) -> dict[str, list[str]]:
        """Every named test id, with the places (``row on host``) that name it."""
        named: dict[str, list[str]] = {}
        for row in self.rows():
            for host, cell in row.cells.items():
                for test in cell.tests:
                    named.setdefault(test, []).append(f"{row.id} on {host}")
        return named


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error; SafeLoader lets the later one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own: set[str] = set()
        for key, _ in node.value:
            # Before the merge: a key of the node itself may override a merged one.
            if key.tag != "tag:yaml.org,2002:merge" and key.value in own:
                raise MatrixError(f"line {key.start_mark.line + 1}: key {key.value!r} is given twice")
            own.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Reader:
    """Turns the parsed file into a Matrix and gathers every fault on the way."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.faults: list[str] = []
        self.documents = self.texts(data, "documents")
        self.hosts = self.texts(data, "hosts")
        self.reasons = self.texts(data, "reasons")
        self.used: set[str] = set()
        self.ids: set[str] = set()

    def texts(self, data: dict[str, Any], key: str) -> dict[str, str]:
        value = data.get(key)
        if not isinstance(value, dict) or not all(isinstance(x, str) for pair in value.items() for x in pair):
            self.faults.append(f"{key}: expected a mapping of texts")
            return {}
        return value

    def section(self, data: dict[str, Any]) -> Section:
        name = data.get("id")
        for key in ("id", "title", "source_title"):
            if not isinstance(data.get(key), str):
                self.faults.append(f"section {name}: {key}: expected a text")
        if str(name)[:3] not in self.documents:
            self.faults.append(f"section {name}: the id must begin with one of {', '.join(self.documents)}")
        self.unknown(f"section {name}", data, {"id", "title", "source_title", "rows"})
        rows = data.get("rows")
        if not isinstance(rows, list) or not rows:
            self.faults.append(f"section {name}: rows: expected a list")
            rows = []
        read = tuple(self.row(str(name), row) for row in rows)
        return Section(str(name), str(data.get("title")), str(data.get("source_title")), read)

    def row(self, section: str, data: dict[str, Any]) -> Row:
        where = f"row {data.get('id')}"
        self.unknown(where, data, {*_ROW_TEXTS, "series", "hosts"})
        for key in _ROW_TEXTS:
            if not isinstance(data.get(key), str) or not data[key].strip():
                self.faults.append(f"{where}: {key}: expected a text")
        name = str(data.get("id"))
        if not _SLUG.fullmatch(name):
            self.faults.append(f"{where}: an id is made of lower-case words joined by hyphens")
        if name in self.ids:
            self.faults.append(f"{where}: the id is taken by an earlier row")
        self.ids.add(name)
        if not str(data.get("source")).startswith(section + " "):
            self.faults.append(f"{where}: source must begin with the id of its section, {section!r}")
        hosts = data.get("hosts")
        if not isinstance(hosts, dict) or not hosts:
            self.faults.append(f"{where}: hosts: expected a mapping with a cell for each host concerned")
            hosts = {}
        self.unknown(f"{where}: hosts", hosts, set(self.hosts))
        # Columns follow the order of `hosts`, whatever order the row has.
        cells = {host: self.cell(f"{where} on {host}", hosts[host]) for host in self.hosts if host in hosts}
        series = self.list_of_texts(f"{where}: series", data.get("series", []))
        source, source_title, title, meaning = (str(data.get(key)) for key in _ROW_TEXTS[1:])
        return Row(name, source, source_title, title, meaning, series, cells)

    def cell(self, where: str, data: Any) -> Cell:
        tests: tuple[str, ...] = ()
        if isinstance(data, dict):
            self.unknown(where, data, {"tests", "lacks"})
            tests = self.list_of_texts(f"{where}: tests", data.get("tests"))
            data = data.get("lacks", [])
            if not tests:
                self.faults.append(f"{where}: names no test; write the reason alone")
        reasons = self.list_of_texts(where, [data] if isinstance(data, str) else data)
        if not tests and not reasons:
            self.faults.append(f"{where}: neither a test nor a reason")
        for test in tests:
            if not _TEST_ID.fullmatch(test):
                self.faults.append(f"{where}: {test!r} is no test id (tests/<file>.py::<function>)")
        for reason in reasons:
            if reason not in self.reasons:
                self.faults.append(f"{where}: {reason!r} is no key of reasons")
        self.used.update(reasons)
        return Cell(tests, reasons)

    def list_of_texts(self, where: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.faults.append(f"{where}: expected a list of texts")
            return ()
        if len(set(value)) != len(value):
            self.faults.append(f"{where}: something is named twice")
        return tuple(value)

    def unknown(self, where: str, data: dict[str, Any], known: set[str]) -> None:
        for key in sorted(set(map(str, data)) - known):
            self.faults.append(f"{where}: unknown key {key!r}")


def load(path: Path = MATRIX) -> Matrix:
    """The checked matrix.

    Raises:
        MatrixError: naming all faults: wrong types, unknown or repeated keys, ids, hosts and reasons, cells
            with neither test nor reason, reasons that no cell uses.
    """
    data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    if not isinstance(data, dict) or not isinstance(data.get("sections"), list):
        raise MatrixError(f"{path.name}: expected a mapping with a list of sections")
    reader = _Reader(data)
    sections = tuple(reader.section(section) for section in data["sections"])
    for reason in sorted(set(reader.reasons) - reader.used):
        reader.faults.append(f"reasons: {reason!r} is used by no cell")
    if reader.faults:
        raise MatrixError(f"{path.name}:\n" + "\n".join(reader.faults))
    return Matrix(reader.documents, reader.hosts, reader.reasons, sections)
