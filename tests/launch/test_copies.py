"""The host's copy is there as long as somebody uses it, and gone afterwards, however the processes end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.launch.started import copies, launch, soon, start
from trainmon.launch.copies import sweep

CONFIG = "a: 1\ncallbacks:\n  - type: TrainMonitor\n"
WAITS = """
import os, sys, time
print(os.path.basename(sys.argv[1]), open(sys.argv[1]).read() == "a: 1\\n", flush=True)
end = time.monotonic() + 60
while not os.path.exists(sys.argv[2]) and time.monotonic() < end:
    time.sleep(0.01)
assert os.path.exists(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cfg.yaml").write_text(CONFIG)
    (tmp_path / "waits.py").write_text(WAITS)
    return tmp_path


def waiting(folder: Path, until: str) -> tuple[subprocess.Popen[str], str]:
    """A script that has read its copy and waits for a file."""
    process = start(folder, "waits.py", "cfg.yaml", until)
    assert process.stdout is not None
    name, good = process.stdout.readline().split()
    assert good == "True"
    return process, name


def watchers(folder: Path) -> list[str]:
    """The processes that wait to remove a copy in this directory."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode().split("\0")
        except OSError:
            continue
        found += [place.parent.name for word in words if word.startswith(f"{folder}/.cfg.trainmon-")]
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_goes_when_the_process_is_ended_by_a_signal(folder: Path, number: signal.Signals) -> None:
    process, name = waiting(folder, "never")
    assert copies(folder) == [name]
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    assert soon(lambda: copies(folder) == [])


@pytest.mark.parametrize("end", ["pass", "1 / 0", "import os; os._exit(3)", "import sys; sys.exit(1)"])
def test_it_goes_when_the_script_ends(folder: Path, end: str) -> None:
    (folder / "ends.py").write_text(f"import os, sys\nassert os.path.exists(sys.argv[1])\n{end}\n")
    launch(folder, "ends.py", "cfg.yaml")
    assert soon(lambda: copies(folder) == [] and watchers(folder) == [])


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are listed in /proc")
def test_the_watcher_is_one_and_no_child_that_the_script_would_meet(folder: Path) -> None:
    (folder / "meets.py").write_text(
        "import os, sys\ntry:\n    os.wait()\nexcept ChildProcessError:\n    print('none')\n"
    )
    assert launch(folder, "meets.py", "cfg.yaml").stdout == "none\n"
    process, _ = waiting(folder, "end")
    other, _ = waiting(folder, "end")
    assert soon(lambda: len(watchers(folder)) == 1)
    (folder / "end").touch()
    for one in (process, other):
        one.communicate(timeout=60)
    assert soon(lambda: watchers(folder) == [])


def test_a_process_left_behind_keeps_nobody_waiting(folder: Path) -> None:
    (folder / "leaves.py").write_text(
        "import os\nif os.fork() == 0:\n    os.closerange(0, 3)\n    import time; time.sleep(30)\n"
    )
    done = launch(folder, "leaves.py", "cfg.yaml")
    assert done.returncode == 0
    assert soon(lambda: copies(folder) == [] and watchers(folder) == [], 10)


def test_processes_that_start_together_share_one_and_the_last_one_removes_it(folder: Path) -> None:
    first = [start(folder, "waits.py", "cfg.yaml", "first") for _ in range(4)]
    lines = [process.stdout.readline().split() for process in first if process.stdout]
    assert len({name for name, _ in lines}) == 1 and {good for _, good in lines} == {"True"}
    last, name = waiting(folder, "last")
    first[0].kill()
    (folder / "first").touch()
    for process in first:
        process.communicate(timeout=60)
    assert [process.returncode for process in first[1:]] == [0, 0, 0]
    assert copies(folder) == [name]
    (folder / "last").touch()
    last.communicate(timeout=60)
    assert last.returncode == 0 and soon(lambda: copies(folder) == [])


def test_what_was_left_is_removed_by_the_next_and_other_files_are_not(folder: Path) -> None:
    process, name = waiting(folder, "never")
    text = (folder / name).read_text()
    process.kill()
    process.communicate(timeout=60)
    assert soon(lambda: copies(folder) == [])
    (folder / name).write_text(text)  # as after the machine went down
    (folder / ".cfg.trainmon-00000000.yaml").touch()
    (folder / ".mine.trainmon-12345678.yaml").write_text("somebody else's")
    (folder / ".link.trainmon-12345678.yaml").symlink_to(folder / name)
    (folder / "cfg.yaml").write_text(CONFIG.replace("a: 1", "a: 2"))
    (folder / "shows.py").write_text("import sys; print(open(sys.argv[1]).read())")
    done = launch(folder, "shows.py", "cfg.yaml")
    assert done.stdout == "a: 2\n\n"
    assert soon(lambda: copies(folder) == [".link.trainmon-12345678.yaml", ".mine.trainmon-12345678.yaml"])


def test_one_in_use_is_not_swept(folder: Path) -> None:
    process, name = waiting(folder, "end")
    sweep(str(folder))
    assert copies(folder) == [name]
    (folder / "end").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_fork_and_a_new_start_of_the_script_keep_it(folder: Path) -> None:
    (folder / "again.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('AGAIN'):\n    time.sleep(0.3); print(os.path.exists(sys.argv[1]))\n"
        "elif os.fork() == 0:\n    sys.exit()\nelse:\n"
        "    os.wait(); print(os.path.exists(sys.argv[1]), flush=True); os.environ['AGAIN'] = '1'\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv])\n"
    )
    done = launch(folder, "again.py", "cfg.yaml")
    assert done.stdout == "True\nTrue\n", done.stderr
    assert soon(lambda: copies(folder) == [])


def test_it_is_as_private_as_the_original(folder: Path) -> None:
    (folder / "cfg.yaml").chmod(0o600)
    (folder / "mode.py").write_text("import os, sys; print(os.stat(sys.argv[1]).st_mode & 0o777)")
    assert launch(folder, "mode.py", "cfg.yaml").stdout == f"{0o600}\n"
    (folder / "cfg.yaml").chmod(0o444)
    mask = os.umask(0o022)
    os.umask(mask)
    mode = stat.S_IMODE((folder / "cfg.yaml").stat().st_mode)
    assert launch(folder, "mode.py", "cfg.yaml").stdout == f"{(mode | 0o200) & ~mask}\n"


def test_a_file_system_without_locks(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(
        "import fcntl\ndef flock(*_):\n    raise OSError(37, 'No locks available')\nfcntl.flock = flock\n"
    )
    (folder / "shows.py").write_text("import sys; print(open(sys.argv[1]).read())")
    done = launch(
        folder, "shows.py", "cfg.yaml", PYTHONPATH=f"{folder}{os.pathsep}{Path(__file__).parents[2]}"
    )
    assert done.stdout == "a: 1\n\n", done.stderr
    assert copies(folder) == []
