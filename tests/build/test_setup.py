"""setup.py: one library a tier, rebuilds after edits, switches, and one helpful sentence for what is missing."""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.build.small_project import SmallProject

X86 = platform.machine().lower() in ("x86_64", "amd64")


@pytest.fixture
def project(tmp_path: Path) -> SmallProject:
    return SmallProject(tmp_path)


def test_each_tier_is_compiled_with_its_own_flags(project: SmallProject) -> None:
    assert project.report()["tiers"] == ((1, 2, 512) if X86 else (1, 0, 0))


def test_edits_of_headers_kernels_and_core_are_rebuilt(project: SmallProject) -> None:
    project.report()
    project.replace("csrc/kernels/kernel.h", "#define VALUE 1", "#define VALUE 3")
    assert project.report()["tiers"] == ((3, 6, 1536) if X86 else (3, 0, 0))
    project.replace("csrc/kernels/kernel.c", "return VALUE;", "return 5;")
    project.replace("csrc/core/core.c", "core_value = 7", "core_value = 8")
    report = project.report()
    assert (report["core"], report["tiers"]) == (8, (5, 6, 1536) if X86 else (5, 0, 0))


def test_differently_switched_builds_do_not_share_objects(project: SmallProject) -> None:
    assert project.report()["optimized"] == 1
    assert project.report(TRAINMON_DEBUG="1")["optimized"] == 0
    assert project.report(TRAINMON_DEBUG="0")["optimized"] == 1


def test_coverage_switch_leaves_gcov_notes(project: SmallProject) -> None:
    project.report(TRAINMON_COVERAGE="1")
    assert list(project.folder.rglob("core.gcno"))


def test_warnings_are_errors_only_where_asked_for(project: SmallProject) -> None:
    project.replace("csrc/python/module.c", "#define MORE", "static int unused_thing;")
    assert project.build().returncode == 0
    project.replace("csrc/python/module.c", "unused_thing", "unused_thing_too")
    strict = project.build(TRAINMON_WERROR="1")
    assert strict.returncode != 0
    assert "unused_thing_too" in strict.stderr


@pytest.mark.skipif(platform.system() != "Linux", reason="the library is copied on Linux only")
def test_openblas_is_carried_along_and_found_without_its_package(project: SmallProject) -> None:
    pytest.importorskip("scipy_openblas32")
    assert str(project.report(TRAINMON_BLAS="scipy-openblas32")["blas"]).startswith("OpenBLAS")
    code = "import trainmon._core; print({line.split()[-1] for line in open('/proc/self/maps') if '/lib' in line})"
    mapped = {Path(name) for name in ast.literal_eval(project.run("-c", code).stdout)}
    carried = set(project.folder.resolve().glob("trainmon/_libs/libscipy_openblas*"))
    assert {path for path in mapped if "openblas" in path.name} == carried != set()
    # No folder of the Python that built it, where a library of the same name would win.
    (extension,) = project.folder.glob("trainmon/_core*.so")
    dynamic = subprocess.run(["readelf", "-d", extension], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"(?:RPATH|RUNPATH).*\[(.*)\]", dynamic) == ["$ORIGIN/_libs"]


def pkg_config_that_knows(folder: Path, *packages: str) -> dict[str, str]:
    """An environment in which pkg-config knows only these packages."""
    folder.mkdir()
    for package in packages:
        found = subprocess.run(
            ["pkg-config", "--variable=pcfiledir", package], capture_output=True, text=True, check=True
        )
        shutil.copy(Path(found.stdout.strip(), f"{package}.pc"), folder)
    return {"PKG_CONFIG_LIBDIR": str(folder), "PKG_CONFIG_PATH": ""}


def check_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    sentence = result.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in sentence
    assert sentence.endswith("."), sentence


def test_missing_compiler_is_one_sentence(project: SmallProject) -> None:
    result = project.build(CC="no-such-cc")
    check_sentence(result, "no-such-cc", "apt install gcc", "dnf install gcc", "xcode-select --install")


def test_missing_pkg_config_is_one_sentence(project: SmallProject) -> None:
    result = project.build(PKG_CONFIG="no-such-pkg-config")
    check_sentence(result, "apt install pkg-config", "dnf install pkgconf-pkg-config", "brew install pkgconf")


def test_missing_libyaml_is_one_sentence(project: SmallProject) -> None:
    result = project.build(**pkg_config_that_knows(project.folder / "pc"))
    check_sentence(result, "apt install libyaml-dev", "dnf install libyaml-devel", "brew install libyaml")


def test_missing_system_openblas_is_one_sentence(project: SmallProject) -> None:
    knows = pkg_config_that_knows(project.folder / "pc", "yaml-0.1")
    result = project.build(TRAINMON_BLAS="system", **knows)
    check_sentence(
        result, "apt install libopenblas-dev", "dnf install openblas-devel", "brew install openblas"
    )


def test_missing_python_headers_are_one_sentence(project: SmallProject) -> None:
    code = (
        "import runpy, sys, sysconfig; sysconfig.get_path = lambda *a, **k: '/nonexistent';"
        "sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']; runpy.run_path('setup.py', run_name='__main__')"
    )
    check_sentence(
        project.run("-c", code), "Python.h", "apt install python3-dev", "dnf install python3-devel"
    )


def test_unknown_blas_is_one_sentence(project: SmallProject) -> None:
    check_sentence(project.build(TRAINMON_BLAS="mkl"), "auto, scipy-openblas32 or system", "'mkl'")
