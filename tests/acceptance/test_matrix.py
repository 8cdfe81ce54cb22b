"""The matrix has every row of the source documents and names real series only; its page is current."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.acceptance.matrix import MATRIX, Matrix, MatrixError, load

_ROOT = Path(__file__).parents[2]
_SOURCE_ROWS = Path(__file__).with_name("source_rows.tsv")


def _source_rows() -> dict[str, list[str]]:
    """Titles of the source documents by section, in their order."""
    expected: dict[str, list[str]] = {}
    with _SOURCE_ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            expected.setdefault(row["section"], []).append(row["title"])
    return expected


def _support_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support_page", _ROOT / "scripts" / "support_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_of_the_source_documents_is_there(matrix: Matrix) -> None:
    found = {section.id: [row.source_title for row in section.rows] for section in matrix.sections}
    assert found == _source_rows()
    assert {id_: len(titles) for id_, titles in found.items() if id_.startswith("000")} == {
        "000/2": 22,
        "000/3": 19,
        "000/4": 9,
        "000/5": 28,
        "000/6 P0": 6,
        "000/6 P1": 5,
        "000/6 P2": 5,
        "000/7": 5,
    }


def test_capabilities_of_trainers_have_a_cell_for_every_host(matrix: Matrix) -> None:
    hosts = set(matrix.hosts) - {"any"}
    for section in matrix.sections:
        for row in section.rows:
            if re.match(r"000/[2-57]", section.id):
                assert set(row.cells) == hosts, row.id
            elif section.id.startswith("001"):
                assert "mindspore_pynative" in row.cells, row.id
            elif section.id.startswith("002"):
                assert set(row.cells) <= {"pytorch", "mindspore_pynative", "any"}, row.id


def test_series_are_those_of_the_catalogue(matrix: Matrix) -> None:
    from trainmon.series import catalogue

    shown = {series for row in matrix.rows() for series in row.series}
    assert shown <= set(catalogue())
    serving = {name for name, spec in catalogue().items() if re.match(r"00[012]\b", spec.section)}
    assert serving <= shown, "series that serve a source document, but are shown by no row"


def test_a_missing_adapter_is_said_of_its_hosts_only(matrix: Matrix) -> None:
    for row in matrix.rows():
        for host, cell in row.cells.items():
            assert "hyperparallel" not in cell.reasons or host.startswith("hyperparallel"), row.id
            assert "mindspore" not in cell.reasons or host.startswith("mindspore"), row.id


def test_the_support_page_is_current() -> None:
    page = _support_page()
    assert page.PAGE.read_text(encoding="utf-8") == page.render(load()), "run scripts/support_page.py"


def test_check_mode_tells_an_outdated_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = _support_page()
    monkeypatch.setattr(page, "PAGE", tmp_path / "support.md")
    assert page.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0


def test_the_page_counts_and_shows_each_status(tmp_path: Path) -> None:
    page = _support_page()
    text = page.render(load(_small(tmp_path, "pytorch: {tests: ['tests/a.py::test_a'], lacks: [later]}")))
    assert "PyTorch: 1 of 3 rows proven, 1 partial." in text
    assert (
        "| **proven** |" in text and "| **partial** [^later] |" in text and "| *missing* [^later] |" in text
    )
    assert "[^later]: Not built yet." in text
    assert text.count("`tests/a.py::test_a`") == 1


_SMALL = """
documents: {'000': A document}
hosts: {pytorch: PyTorch}
reasons: {later: not built yet}
sections:
  - id: 000/1
    title: Section
    source_title: Section
    rows:
      - {id: one, source: 000/1 One, source_title: x, title: x, meaning: x, hosts: {HOSTS}}
      - {id: two, source: 000/1 Two, source_title: x, title: x, meaning: x, hosts: {pytorch: later}}
      - {id: six, source: 000/1 Six, source_title: x, title: x, meaning: x,
         hosts: {pytorch: {tests: [tests/b.py::test_b]}}}
"""


def _small(directory: Path, hosts: str) -> Path:
    path = directory / "matrix.yaml"
    path.write_text(_SMALL.replace("HOSTS", hosts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("pytorch: sooner", "row one on pytorch: 'sooner' is no key of reasons"),
        ("tensorflow: later", "row one: hosts: unknown key 'tensorflow'"),
        ("pytorch: []", "row one on pytorch: neither a test nor a reason"),
        ("pytorch: {lacks: [later]}", "row one on pytorch: names no test"),
        ("pytorch: {tests: [tests/a.py], lacks: [later]}", "'tests/a.py' is no test id"),
        ("pytorch: {tests: ['tests/a.py::test_a'], lack: [later]}", "unknown key 'lack'"),
        ("pytorch: [later, later]", "something is named twice"),
        ("pytorch: later, pytorch: later", "key 'pytorch' is given twice"),
        ("pytorch: later}, colour: {blue: 1", "row one: unknown key 'colour'"),
        ("pytorch: later}, series: {loss: 1", "row one: series: expected a list of texts"),
    ],
)
def test_a_wrong_cell_is_an_error_that_names_it(tmp_path: Path, wrong: str, message: str) -> None:
    with pytest.raises(MatrixError, match=re.escape(message)):
        load(_small(tmp_path, wrong))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("id: two", "id: one", "row one: the id is taken"),
        ("id: two", "id: Two", "row Two: an id is made of lower-case words"),
        ("source: 000/1 Two", "source: 000/2 Two", "source must begin with the id of its section"),
        (
            "title: x, meaning: x, hosts: {pytorch: later}",
            "title: x, hosts: {pytorch: later}",
            "meaning: expected a text",
        ),
        ("id: 000/1", "id: 003/1", "section 003/1: the id must begin with one of 000"),
        (
            "later: not built yet",
            "later: not built yet, unused: not used",
            "reasons: 'unused' is used by no cell",
        ),
        ("hosts: {pytorch: PyTorch}", "hosts: [pytorch]", "hosts: expected a mapping of texts"),
    ],
)
def test_a_wrong_row_is_an_error_that_names_it(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = _small(tmp_path, "pytorch: later")
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(MatrixError, match=re.escape(message)):
        load(path)


def test_own_cells_override_merged_ones() -> None:
    cells = {row.id: row.cells for row in load(MATRIX).rows()}["last-words"]
    assert cells["hyperparallel_g1"].tests and "hyperparallel" not in cells["hyperparallel_g1"].reasons
    assert not cells["mindspore_graph"].tests and cells["mindspore_graph"].reasons
