"""A script under `trainmon launch` can't tell that it isn't run by python: what it sees, prints, raises and returns."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch.started import launch, run

SEES = """
import sys, os
g = globals()
print(sorted(n for n in g if n not in ("sys", "os", "g")))
print(__name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__, __builtins__)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is g, os.getcwd())
x: int = 3
print(__annotations__)
"""

SCRIPTS = {
    "sees": SEES,
    "exits": "import sys; sys.exit(7)",
    "exits_with_text": "import sys; sys.exit('a reason')",
    "raises": "def f():\n    raise ValueError('é')\n\nf()\n",
    "chained": "def f():\n    {}[1]\n\ntry:\n    f()\nexcept KeyError as e:\n    raise RuntimeError('x') from e\n",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "syntax": "x = 1\nif x = 2:\n    pass\n",
    "interrupted": "raise KeyboardInterrupt",
    "own_hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0\n",
    "last_words": "import atexit, __main__\ndef f():\n    print('bye', __main__.f is f)\natexit.register(f)\n",
    "thread": "import threading, time\ndef f():\n    time.sleep(0.2); print(__name__, g)\ng = 5\n"
    "threading.Thread(target=f).start()",
    "workers": "import multiprocessing as mp\ndef f(x): return x + 1\nif __name__ == '__main__':\n"
    "    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(f, [1, 2]))\n",
    "pickled": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "imports_beside": "import beside; print(beside.__file__)",
}


def same(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What python and launch make of it."""
    plain, under = run([sys.executable, *words], folder), launch(folder, *words)
    notice = re.compile(r"trainmon launch: no entry .*\n|  File \"<frozen runpy>.*\n")
    assert (under.returncode, under.stdout) == (plain.returncode, plain.stdout), under.stderr
    assert notice.sub("", under.stderr) == notice.sub("", plain.stderr)
    return plain


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SCRIPTS[name])
    (tmp_path / "sub" / "beside.py").write_text("")
    done = same(["sub/script.py", "--a", "-m", "x y"], tmp_path)
    expected = {"exits": 7, "interrupted": -signal.SIGINT, "killed": -signal.SIGTERM}
    failing = {"raises", "chained", "group", "syntax", "own_hook", "exits_with_text"}
    assert done.returncode == expected.get(name, int(name in failing))


@pytest.mark.parametrize("name", ["sees", "raises", "exits", "workers", "interrupted"])
def test_a_module(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    text = SCRIPTS[name].replace("type(__loader__).__name__", "0").replace("__spec__", "__spec__.name")
    for file in ("__main__.py", "module.py"):
        (tmp_path / "package" / file).write_text(text)
    same(["-m", "package.module", "a"], tmp_path)
    if name != "workers":  # which can't be found again in a package's main module
        same(["-m", "package", "a"], tmp_path)


def test_a_directory_and_an_archive(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    text = "import sys\nprint(sys.argv, sys.path[0], __file__)\n1 / 0\n"
    (tmp_path / "directory" / "__main__.py").write_text(text)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", text)
    for script in ("directory", "app.pyz"):
        plain, under = run([sys.executable, script, "a"], tmp_path), launch(tmp_path, script, "a")
        assert (under.returncode, under.stdout) == (plain.returncode, plain.stdout)
        assert "trainmon/" not in under.stderr and under.stderr.endswith(
            "ZeroDivisionError: division by zero\n"
        )


def test_a_link_and_safe_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text(SEES)
    (tmp_path / "link.py").symlink_to("real/script.py")
    same(["link.py"], tmp_path)
    (tmp_path / "path.py").write_text("import sys; print(sys.path)")
    plain = run([sys.executable, "-P", "path.py"], tmp_path)
    under = run([sys.executable, "-P", "-m", "trainmon.launch", "path.py"], tmp_path)
    assert under.stdout == plain.stdout


def test_tracebacks_through_a_trainer_have_no_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text("callbacks: [{type: TrainMonitor}]\n")
    (tmp_path / "script.py").write_text(
        "from hyper_parallel.trainer import TextTrainer\nclass Mine(TextTrainer):\n    def train(self):\n"
        "        super().train()\n        raise ValueError('late')\nMine({}).train()\n"
    )
    plain, under = run([sys.executable, "script.py"], tmp_path), launch(tmp_path, "script.py", "cfg.yaml")
    assert under.returncode == 1 and "attached Mine" in under.stdout
    assert under.stderr.partition("\n")[2] == plain.stderr


def test_what_trainmon_raises_itself_is_shown_with_its_frames(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from trainmon.config import load_config\nload_config({'evry': 1})\n")
    done = launch(tmp_path, "script.py")
    assert done.returncode == 1 and "did you mean 'every'" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert (
        "script.py" in lines[0]
        and "trainmon/config/bind.py" in lines[-1]
        and "trainmon/launch" not in "".join(lines)
    )
