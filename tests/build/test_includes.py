"""Which C file may include what: core knows neither Python nor NumPy, kernels know only the core's contracts."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)


def includes() -> list[tuple[str, str]]:
    files = [path for path in ROOT.rglob("*.[ch]") if "fuzz" not in path.parts]
    assert len(files) > 20
    return [(str(path.relative_to(ROOT)), name) for path in files for name in INCLUDE.findall(path.read_text())]


def test_python_headers_stay_in_their_rooms() -> None:
    wrong = [(file, name) for file, name in includes() if name == "Python.h" and file.split("/")[0] not in ("python", "yaml")]
    assert not wrong


def test_numpy_headers_are_in_one_translation_unit() -> None:
    assert {file for file, name in includes() if name.startswith("numpy/")} == {"python/tm_numpy.c"}


def test_core_and_kernels_do_not_look_up() -> None:
    wrong = [(f, n) for f, n in includes() if f.split("/")[0] in ("core", "kernels") and ("python/" in n or "yaml/" in n)]
    assert not wrong


def test_blas_headers_are_in_one_file() -> None:
    named = {file for file, name in includes() if "cblas" in name or "TM_BLAS" in name}
    assert named <= {"core/tm_blas.c", "core/tm_blas.h"}
