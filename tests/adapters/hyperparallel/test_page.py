"""What docs/hyperparallel.md tells people to write runs as it stands there."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

import torch.distributed as distributed

from tests.adapters.hyperparallel.runs import life_of, said, steps_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/hyperparallel.md").read_text(encoding="utf-8")
HOSTS = ROOT / "tests/hosts/hyperparallel"
HEADINGS = {"g1": "First generation", "g2": "Second generation", "g3": "Third generation"}


def block(language: str, heading: str) -> str:
    """The first one below a heading."""
    section = PAGE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None, heading
    return found[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where the host's file and ours lie; the host can be imported."""
    package = HOSTS / f"package_{request.param}"
    shutil.copy(package / "tiny.yaml", tmp_path / "train.yaml")
    (tmp_path / "trainmon.yaml").write_text(f"output_dir: .\nrun_name: r\n{block('yaml', 'Rules')}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    before = set(sys.modules)
    yield tmp_path
    for name in [
        name for name in sys.modules if name.split(".")[0] == "hyper_parallel" and name not in before
    ]:
        del sys.modules[name]
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize(("folder", "generation"), [(one, one) for one in HEADINGS], indirect=["folder"])
def test_the_set_up_of_each_generation(folder: Path, generation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(block("python", HEADINGS[generation]), "page", "exec"), {"__name__": "__main__"})
    assert [record["step"] for record in steps_of(folder)] == [1, 2, 3]
    assert life_of(folder)["status"] == "completed" and not said(folder, "internal_error")
    assert (folder / "r/rank_0/events.jsonl").exists()
