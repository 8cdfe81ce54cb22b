"""What is not recorded: against exact statistics taken beside, and in msProbe's mode against the same, rounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.msprobe import golden
from tests.msprobe.more import CASES

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("more")
    subprocess.run(
        [sys.executable, "-m", "tests.msprobe.golden", str(root), str(root / "answer.json"), *CASES],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    return root, json.loads((root / "answer.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_default_is_exact_and_complete(name: str, runs: tuple[Path, dict[str, Any]]) -> None:
    root, results = runs
    got, want = golden.tree(root / name / "default"), golden.tree(root / name / "reference")
    assert results[f"{name}/default"]["events"] == results[f"{name}/reference"]["events"]
    assert repr(results[f"{name}/default"]["losses"]) == repr(results[f"{name}/reference"]["losses"])
    assert set(got) == set(want)
    for path, data in want.items():
        ours, theirs = golden.cells(got[path]), golden.cells(data)
        assert set(ours) == set(theirs)
        for key, row in theirs.items():
            for op, text in row.items():
                assert golden.same_number(ours[key][op], text, op, row), (path, key, op)


@pytest.mark.parametrize("name", CASES)
def test_v2_has_no_other_rows(name: str, runs: tuple[Path, dict[str, Any]]) -> None:
    root, results = runs
    got, want = golden.tree(root / name / "v2"), golden.tree(root / name / "reference")
    assert results[f"{name}/v2"]["events"] == results[f"{name}/reference"]["events"]
    assert repr(results[f"{name}/v2"]["losses"]) == repr(results[f"{name}/reference"]["losses"])
    assert set(got) <= set(want)
    for path, data in got.items():
        ours, theirs = golden.cells(data), golden.cells(want[path])
        assert set(ours) <= set(theirs)
        for key, row in ours.items():
            if name not in ("types", "sparse_all"):  # what msProbe can't compute
                assert row == {op: golden.float32_text(text) for op, text in theirs[key].items()}, (path, key)
