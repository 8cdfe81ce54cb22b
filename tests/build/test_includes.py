"""Which C file may include what: python -> core -> kernels, and each foreign header behind one door."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+([<"]?)([^>"\s]+)', re.M)

# Folder -> what it may reach. What kernels see of the core are the dtypes: the list that their templates run over.
MAY_INCLUDE = {
    "python": ("python/", "core/"),
    "core": ("core/", "kernels/tm_kernels.h", "kernels/tm_families.h"),
    "kernels": ("kernels/", "core/tm_dtype.h"),
    "yaml": ("yaml/",),
}
# Foreign header -> the files that may include it.
DOORS = {
    r"Python\.h": r"(python|yaml)/[^/]+",
    r"numpy/.*": r"python/tm_numpy\.c",
    r"(cblas|lapack|lapacke|f77blas|openblas_config)\.h|TM_BLAS_HEADER": r"core/tm_blas\.c",
    r"yaml\.h": r"yaml/[^/]+",
    r"cpuid\.h": r"core/tm_cpu\.c",
    r"(\w+mmintrin|immintrin|x86intrin|arm_neon)\.h": r"kernels/tm_\w+\.h|core/tm_cpu\.c",
}


def includes() -> list[tuple[str, bool, str]]:
    """(file below csrc, whether a foreign header, the header's name) of each include of the product's code."""
    files = [path for folder in MAY_INCLUDE for path in sorted(CSRC.joinpath(folder).glob("*.[ch]"))]
    return [
        (path.relative_to(CSRC).as_posix(), quote != '"', name)
        for path in files
        for quote, name in INCLUDE.findall(path.read_text(encoding="utf-8"))
    ]


def reached(file: str, name: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(file).parent / name).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_own_headers_follow_the_one_direction(folder: str) -> None:
    own = [(file, reached(file, name)) for file, foreign, name in includes() if not foreign]
    mine = [(file, target) for file, target in own if file.startswith(folder + "/")]
    assert mine, f"no includes found in csrc/{folder}"
    wrong = [(file, target) for file, target in mine if not target.startswith(MAY_INCLUDE[folder])]
    assert not wrong, f"csrc/{folder} may include only {MAY_INCLUDE[folder]}"


@pytest.mark.parametrize("header", DOORS)
def test_foreign_headers_stay_behind_their_door(header: str) -> None:
    users = {file for file, foreign, name in includes() if foreign and re.fullmatch(header, name)}
    assert users or "intrin" in header, f"nothing includes {header} any more: drop its row"
    wrong = {file for file in users if not re.fullmatch(DOORS[header], file)}
    assert not wrong, f"only {DOORS[header]} may include {header}"


def test_every_own_header_that_is_named_exists() -> None:
    missing = [
        (file, name)
        for file, foreign, name in includes()
        if not foreign and not CSRC.joinpath(reached(file, name)).is_file()
    ]
    assert not missing
