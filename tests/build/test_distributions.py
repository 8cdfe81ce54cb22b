"""sdist and wheel, installed in fresh environments away from the source tree.

`make dist` names the folder of both in TRAINMON_DIST; without it they are built first.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
LINUX = sys.platform.startswith("linux")
CONFIG = ROOT / "examples" / "gpt" / "train.yaml"

# Uses both extensions and BLAS, then says which files of the process are whose.
PROBE = """
import trainmon
assert 5e-324 / 2 + 5e-324 > 0, "flush-to-zero is on"
import numpy
assert trainmon.multi_norm([numpy.full(4, 0.5)]) == 1.0
assert trainmon.build_info()["blas"]["works"], trainmon.build_info()
print({"file": trainmon.__file__, "version": trainmon.__version__,
       "mapped": sorted({line.split()[-1] for line in open("/proc/self/maps") if "/" in line})})
"""


def run(*command: str | Path, **environment: str) -> str:
    """Standard output of a command that must succeed, run outside the source tree."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    result = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def fresh_environment(folder: Path) -> Path:
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def check_probe(python: Path, home: Path) -> None:
    """trainmon of that interpreter works, and its two libraries are those below `home`."""
    found = ast.literal_eval(run(python, "-c", PROBE))
    assert Path(found["file"]).is_relative_to(home)
    assert (
        found["version"]
        == re.search(r'^version = "(.+)"', ROOT.joinpath("pyproject.toml").read_text(), re.M)[1]
    )
    if LINUX:
        blas = [Path(name) for name in found["mapped"] if re.match(r"libscipy_openblas[-.]", Path(name).name)]
        assert len(blas) == 1, blas
        assert blas[0].is_relative_to(home)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("TRAINMON_DIST"):
        return Path(folder).resolve()
    folder = tmp_path_factory.mktemp("dist")
    run("bash", ROOT / "scripts" / "wheel.sh", folder, PYTHON=sys.executable)
    return folder


@pytest.fixture(scope="session")
def sdist(distributions: Path) -> Path:
    (path,) = distributions.glob("trainmon-*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("trainmon-*.whl")
    return path


def source_files() -> Iterator[str]:
    folders = ("csrc", "trainmon", "tests", "benchmarks", "examples", "docs", "scripts", ".ci")
    built = re.compile(r"(^|/)(__pycache__|_libs|\.\w+_cache)/|\.(so|pyc|o|a)$")
    for path in (path for folder in folders for path in ROOT.joinpath(folder).rglob("*") if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        if not built.search(name):
            yield name
    yield from ("setup.py", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", ".clang-format")


def test_sdist_holds_every_source_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert set(source_files()) - names == set()
    assert not [name for name in names if re.search(r"\.(so|o|a|pyc)$|/_libs/", name)]


def test_sdist_builds_offline_from_its_build_requirements(sdist: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(run(sys.executable, ROOT / "scripts" / "build-requires.py"))
    run(python, "-m", "pip", "install", "-q", "-r", requirements)
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}
    run(python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", sdist, **offline)
    # The build requirements hold a library of the same name: ours must not need it.
    run(python, "-m", "pip", "uninstall", "-q", "-y", "scipy-openblas32")
    check_probe(python, tmp_path)


def test_isolated_install_from_source_keeps_its_libraries(sdist: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", sdist)
    check_probe(python, tmp_path)


@pytest.mark.skipif(not LINUX, reason="auditwheel repairs wheels of Linux")
def test_wheel_holds_each_library_once(wheel: Path) -> None:
    assert "manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".so" in name]
        assert len([name for name in names if "openblas" in name]) == 1, names
        assert len([name for name in names if "libyaml" in name]) == 1, names
        assert {"trainmon/py.typed", "trainmon/series.tsv", "trainmon/_core.pyi"} <= set(archive.namelist())
        assert not [
            name for name in archive.namelist() if name.startswith(("tests/", "csrc/", "benchmarks/"))
        ]


def test_wheel_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", wheel)
    check_probe(python, tmp_path)
    run(python.with_name("trainmon"), "check", CONFIG)
    run(python.with_name("trainmon"), "info")
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert "scipy-openblas32" not in installed
    assert "torch" not in installed


def test_wheel_runs_the_demo_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the demo trains with torch")
    python = fresh_environment(tmp_path / "venv")
    version = torch.__version__.partition("+")[0]
    run(python, "-m", "pip", "install", "-q", f"{wheel}[tensorboard]", f"torch=={version}", "PyYAML")
    demo = shutil.copytree(ROOT / "examples" / "gpt", tmp_path / "gpt")
    config = demo / "train.yaml"
    config.write_text(config.read_text().replace("output_dir: runs/gpt", f"output_dir: {tmp_path / 'runs'}"))
    output = run(python, demo / "train.py", config, "--steps", "3")
    assert "What trainmon saw" in output
    (scalars,) = (tmp_path / "runs").glob("*/rank_0/scalars.jsonl")
    assert [line for line in scalars.read_text().splitlines() if '"step": 3' in line or '"step":3' in line]
    assert list((tmp_path / "runs").glob("*/rank_0/tensorboard/events.*"))
