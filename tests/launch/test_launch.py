"""What a user of `trainmon launch` meets: arguments, errors before the start, what is attached and what is said."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.launch.started import copies, launch, run, soon

CONFIG = "# of the host\nmodel: {size: 3}\ncallbacks:\n  - type: TrainMonitor\n    every: 5\nsteps: 1\n"

SCRIPT = """
import json, os, sys, yaml
from hyper_parallel.trainer import TextTrainer

words = [word.rpartition("=")[2] for word in sys.argv[1:]]
path = next(word for word in words if word.endswith(".yaml"))
print("argv", json.dumps(sys.argv))
print("beside", sorted(name for name in os.listdir(os.path.dirname(path) or ".") if not name.startswith(".")))
trainer = TextTrainer(yaml.safe_load(open(path)))
trainer.train()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "cfg.yaml").write_text(CONFIG)
    return tmp_path


def argv(output: str) -> list[str]:
    found: list[str] = json.loads(output.partition("argv ")[2].splitlines()[0])
    return found


@pytest.mark.parametrize("form", ["{}", "--config {}", "--config={}", "config={}", "--x -- {} --y --"])
@pytest.mark.parametrize("place", ["", "conf/"])
def test_the_host_gets_a_copy_beside_the_file_and_the_trainer_the_monitor(
    folder: Path, form: str, place: str
) -> None:
    (folder / "conf").mkdir()
    (folder / "conf" / "cfg.yaml").write_text(CONFIG)
    words = form.format(f"{place}cfg.yaml").split()
    done = launch(folder, "--", "train.py", *words)
    assert done.returncode == 0, done.stderr
    given = argv(done.stdout)
    assert given[0] == "train.py" and len(given) == len(words) + 1
    changed = [(new, old) for new, old in zip(given[1:], words, strict=True) if new != old]
    assert len(changed) == 1 and f"{place}.cfg.trainmon-" in changed[0][0] and changed[0][0].endswith(".yaml")
    assert "'cfg.yaml'" in done.stdout  # beside the original
    assert "attached TextTrainer: every 5" in done.stdout and "TextTrainer step 1" in done.stdout
    assert done.stderr.count("\n") == 1 and f"{place}cfg.yaml:4:5 configures the monitor" in done.stderr
    assert copies(folder) == copies(folder / "conf") == []


@pytest.mark.parametrize(
    "words",
    [
        ["trainmon.launch", "train.py", "cfg.yaml"],
        ["trainmon.cli", "launch", "--", "train.py", "cfg.yaml"],
        ["trainmon.launch", "-m", "train", "cfg.yaml"],
        ["trainmon.launch", "--", "-m", "train", "cfg.yaml"],
        ["trainmon.launch", "--", "--monitor=more.yaml", "--", "train.py", "cfg.yaml"],
    ],
)
def test_ways_to_ask_for_it(folder: Path, words: list[str]) -> None:
    (folder / "more.yaml").write_text("every: 5\n")
    done = run([sys.executable, "-m", *words], folder)
    assert done.returncode == 0, done.stderr
    assert "attached TextTrainer: every 5" in done.stdout


def test_a_monitor_file_alone_and_over_the_entry(folder: Path) -> None:
    (folder / "mon.yaml").write_text("every: 7\n")
    (folder / "plain.yaml").write_text("steps: 1\n")
    done = launch(folder, "--monitor", "mon.yaml", "--", "train.py", "plain.yaml")
    assert "attached TextTrainer: every 7" in done.stdout and done.stderr == ""
    assert argv(done.stdout) == ["train.py", "plain.yaml"]
    done = launch(folder, "--monitor=mon.yaml", "--", "train.py", "cfg.yaml")
    assert "attached TextTrainer: every 7" in done.stdout
    (folder / "mon.yaml").write_text("run_name: x\n")
    done = launch(folder, "--monitor=mon.yaml", "train.py", "cfg.yaml")
    assert "attached TextTrainer: every 5" in done.stdout


@pytest.mark.parametrize("ranks", [{}, {"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1", "LOCAL_RANK": "1"}])
def test_nothing_to_attach_is_said_by_rank_0(folder: Path, ranks: dict[str, str]) -> None:
    (folder / "plain.yaml").write_text("steps: 1\ncallbacks: [a]\n")
    done = launch(folder, "--", "train.py", "plain.yaml", **ranks)
    assert done.returncode == 0 and "attached" not in done.stdout
    said = "trainmon launch: no entry `- type: TrainMonitor` in plain.yaml and no --monitor: nothing is attached\n"
    assert done.stderr == ("" if ranks.get("RANK") == "1" else said)
    (folder / "none.py").write_text("print('ran')")
    done = launch(folder, "none.py", **ranks)
    assert done.stdout == "ran\n"
    assert "no argument is a YAML or JSON file" in done.stderr or ranks.get("RANK") == "1"


def test_a_type_that_is_nearly_ours(folder: Path) -> None:
    (folder / "cfg.yaml").write_text(CONFIG.replace("TrainMonitor", "TrainMoniter"))
    done = launch(folder, "--", "train.py", "cfg.yaml")
    assert "cfg.yaml:4:3: no entry of type TrainMonitor; did you mean 'TrainMonitor'" in done.stderr


def test_all_that_is_wrong_is_said_before_the_start(folder: Path) -> None:
    (folder / "cfg.yaml").write_text(CONFIG.replace("every: 5", "evry: 5\n    loss: 3"))
    (folder / "mon.yaml").write_text("sinks: {logg: true}\n")
    done = launch(folder, "--monitor", "mon.yaml", "--", "gone.py", "cfg.yaml")
    assert done.returncode == 2 and done.stdout == ""
    for said in (
        "can't find the script gone.py",
        "cfg.yaml:5:5: ",
        "evry",
        "cfg.yaml:6:11: ",
        "mon.yaml:1:9: ",
    ):
        assert said in done.stderr
    assert "did you mean 'every'" in done.stderr and "Traceback" not in done.stderr
    assert copies(folder) == []
    assert launch(folder, "train.py", "cfg.yaml", RANK="3", LOCAL_RANK="1").stderr == ""


def test_two_files_with_entries(folder: Path) -> None:
    (folder / "b.yaml").write_text(CONFIG)
    done = launch(folder, "--", "train.py", "cfg.yaml", "b.yaml")
    assert (
        done.returncode == 2
        and "b.yaml:4:5: a second entry (the first is cfg.yaml:4:5); keep one" in done.stderr
    )
    (folder / "b.yaml").unlink()
    (folder / "b.yaml").symlink_to("cfg.yaml")
    done = launch(folder, "--", "train.py", "cfg.yaml", "--again=./cfg.yaml", "b.yaml")
    assert done.returncode == 0 and done.stdout.count(".cfg.trainmon-") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script is given"),
        (["--"], "no script is given"),
        (["-m"], "-m needs a module"),
        (["--monitor"], "--monitor needs a file"),
        (["--monitr", "x", "train.py"], "unknown option --monitr"),
        (["--monitor=a", "--monitor=b", "train.py"], "given twice"),
        (["--monitor", "gone.yaml", "train.py"], "no such configuration file"),
        (["gone.py"], "can't find the script gone.py"),
        (["-m", "gone.module"], "can't run the module gone.module: No module named 'gone'"),
        (["torchrun", "train.py"], "torchrun ... -m trainmon.launch -- train.py"),
        (["json"], "for a module write -m json"),
        (["empty"], "directory or archive without __main__.py"),
    ],
)
def test_commands_that_cant_be(folder: Path, words: list[str], said: str) -> None:

    (folder / "empty").mkdir()
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    done = launch(folder, *words, PATH=path)
    assert done.returncode == 2 and done.stdout == "" and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_help(folder: Path) -> None:
    done = launch(folder, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: trainmon launch") and not done.stderr
    (folder / "h.py").write_text("import sys; print(sys.argv)")
    assert (
        launch(folder, "h.py", "--help", "-m", "--monitor=x").stdout
        == "['h.py', '--help', '-m', '--monitor=x']\n"
    )


def test_a_trainer_that_is_never_built(folder: Path) -> None:
    (folder / "never.py").write_text("import hyper_parallel.trainer, sys\nif 'bad' in sys.argv: sys.exit(3)")
    done = launch(folder, "never.py", "cfg.yaml")
    assert (
        done.returncode == 0
        and "the script has built no trainer that is known here: HyperParallel" in done.stderr
    )
    done = launch(folder, "never.py", "cfg.yaml", "bad")
    assert done.returncode == 3 and "no trainer" not in done.stderr


def test_a_class_that_the_host_builds_by_itself(folder: Path) -> None:
    (folder / "cfg.yaml").write_text(
        CONFIG.replace("every: 5", "every: 5\n    auto_register: a.TrainMonitor")
    )
    (folder / "show.py").write_text("import sys; print(sys.argv)")
    done = launch(folder, "show.py", "cfg.yaml")
    assert done.stdout == "['show.py', 'cfg.yaml']\n" and "auto_register" in done.stderr


def test_nothing_is_written_where_nothing_can_be(folder: Path) -> None:
    """Beside a file in a directory that can't be written to; relative paths are warned of."""

    code = """
import os, sys
from trainmon.launch import copies, main
real = copies._take
def refuse(path, *rest):
    if path.startswith(".cfg"):
        raise PermissionError(13, "Permission denied", path)
    return real(path, *rest)
copies._take = refuse
sys.exit(main(["train.py", "cfg.yaml"]))
"""
    done = run([sys.executable, "-c", code], folder, TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    place = folder / f"trainmon-{os.getuid()}"
    assert argv(done.stdout)[1].startswith(str(place)) and "attached" in done.stdout
    assert "nothing can be written beside cfg.yaml (Permission denied)" in done.stderr
    assert "relative paths" in done.stderr and copies(place) == []


LOOP = """
import sys, torch, yaml, trainmon
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert trainmon.load_config(yaml.safe_load(open(sys.argv[1]))) == trainmon.load_config(sys.argv[1])
with trainmon.attach(model, optimizer, config=sys.argv[1]) as mon:
    for _ in range(2):
        loss = model(torch.ones(3, 2)).sum()
        loss.backward()
        mon.micro_end(loss=loss, tokens=3)
        optimizer.step()
        optimizer.zero_grad()
        mon.step_end()
print(mon.monitor.config.run_name)
"""


def test_a_loop_of_ones_own_reads_the_entry_through_the_copy(folder: Path) -> None:
    (folder / "loop.py").write_text(LOOP)
    (folder / "cfg.yaml").write_text(CONFIG.replace("every: 5", "run_name: mine"))
    done = launch(folder, "loop.py", "cfg.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("mine\n") and (folder / "runs" / "mine" / "run.json").exists()
    assert "trainmon.attach() does it" not in done.stderr


READS = """
import sys, yaml, trainmon
host = yaml.safe_load(open(sys.argv[1]))
print(trainmon.load_config(host).every, trainmon.load_config({"every": 2}).every)
host["callbacks"].append({"type": "TrainMonitor", "every": 3})
print(trainmon.load_config(host).every)
"""


def test_a_mapping_read_from_the_copy_means_the_original(folder: Path) -> None:
    (folder / "reads.py").write_text(READS)
    (folder / "cfg.yaml").write_text(CONFIG.replace("steps: 1", "  - type: A\nsteps: 1"))
    done = launch(folder, "reads.py", "cfg.yaml")
    assert done.stdout == "5 2\n3\n", done.stderr


ONE_FAILS = """
import os, sys, time
from hyper_parallel.trainer import VLMTrainer
VLMTrainer({"steps": 1}).train()
assert os.path.exists(sys.argv[1])
sys.stdout.flush()
if os.environ["RANK"] == "0":
    open("trained", "x").close()
    time.sleep(60)
while not os.path.exists("trained"):  # torchrun ends the other one at once
    time.sleep(0.05)
sys.exit(9)
"""


def test_a_rank_that_fails_under_torchrun(folder: Path) -> None:
    (folder / "two.py").write_text(ONE_FAILS)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run([*start, "-m", "trainmon.launch", "--", "two.py", "cfg.yaml"], folder, OMP_NUM_THREADS="1")
    assert done.returncode == 1 and re.search(r"exitcode\s*: 9", done.stderr)
    assert done.stdout.count("attached VLMTrainer: every 5") == 2
    assert done.stderr.count("configures the monitor") == 1
    assert soon(lambda: copies(folder) == [])
