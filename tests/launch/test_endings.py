"""Trainings under `trainmon launch` that don't end by themselves: Ctrl-C, a signal, a rank that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.launch.started import LAUNCH, ROOT, copies, environment, soon
from tests.launch.test_hosts import ENTRY, HOSTS
from trainmon.sinks.blackbox import find_boxes, merge_boxes, read_box

#: The step in which the end comes, after its last backward pass.
STEP = 3
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainmon.launch"]

#: Goes on for ever; says who it is when it comes to the step, and waits there for its end.
SCRIPT = """
import os, sys, time
from hyper_parallel.trainer.config import parse_args
from hyper_parallel.trainer.{module} import {trainer}

trainer = {trainer}(parse_args(sys.argv[1:]))

def after_backward(step, index, count):
    if (step, index) == ({step}, 1):
        sys.stdout.write("pid %s %d\\n" % (os.environ.get("RANK", "0"), os.getpid()))  # at once: ranks share it
        sys.stdout.flush()
        time.sleep(60)

trainer.base.after_backward = after_backward
trainer.train()
"""
WORDS = {
    "g1": ("llm_trainer", "LLMTrainer"),
    "g2": ("llm_trainer", "LLMTrainer"),
    "g3": ("text_trainer", "TextTrainer"),
}


def prepare(folder: Path, generation: str, world: int) -> None:
    package = HOSTS / f"package_{generation}"
    module, trainer = WORDS[generation]
    (folder / "train.py").write_text(SCRIPT.format(module=module, trainer=trainer, step=STEP))
    tiny = (package / "tiny.yaml").read_text()
    if world > 1:  # of all ranks
        tiny = tiny.replace("global_batch_size: 4", "global_batch_size: 8")
    (folder / "tiny.yaml").write_text(tiny + ENTRY)
    if not (folder / "package").exists():
        shutil.copytree(package, folder / "package")


def end(folder: Path, start: list[str], world: int, who: str, number: int) -> tuple[int, str]:
    """Starts, waits until all ranks have come to the step, sends the signal; the exit status and what was said."""
    path = os.pathsep.join([str(folder / "package"), str(ROOT)])
    names = environment(PYTHONPATH=path, OMP_NUM_THREADS="1", HYPER_PARALLEL_PLATFORM="torch")
    with subprocess.Popen(
        [*start, "--", "train.py", "tiny.yaml"],
        cwd=folder,
        env=names,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pids: dict[str, int] = {}
        while len(pids) < world:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            if line.startswith("pid "):
                _, rank, pid = line.split()
                pids[rank] = int(pid)
        if who == "all":  # as a terminal does
            os.killpg(process.pid, number)
        else:
            os.kill(pids[who], number)
        said = process.communicate(timeout=60)[1]
        return process.returncode, said


def life_and_steps(folder: Path) -> tuple[dict[str, Any], list[int]]:
    life = json.loads((folder / "runs/here/run.json").read_text())["lives"][-1]
    lines = (folder / "runs/here/rank_0/scalars.jsonl").read_text().splitlines()
    return life, [record["step"] for record in map(json.loads, lines) if "step" in record]


def test_ctrl_c(tmp_path: Path) -> None:
    """The process ends by the signal, as it would without us; files are whole and say how."""
    prepare(tmp_path, "g3", 1)
    code, said = end(tmp_path, LAUNCH, 1, "0", signal.SIGINT)
    assert code == -signal.SIGINT, said
    life, steps = life_and_steps(tmp_path)
    assert (life["status"], life["reason"], life["last_step"]) == ("interrupted", "Ctrl-C", STEP - 1)
    assert steps == list(range(1, STEP)) and soon(lambda: copies(tmp_path) == [])


def test_kill(tmp_path: Path) -> None:
    """Nothing can be said any more: the black box has what was."""
    prepare(tmp_path, "g1", 1)
    code, said = end(tmp_path, LAUNCH, 1, "0", signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    life, steps = life_and_steps(tmp_path)
    assert life["status"] == "running" and steps == list(range(1, STEP))
    verdict = merge_boxes([read_box(path) for path in find_boxes([tmp_path / "runs/here"])])
    assert verdict.summary == f"stopped at step {STEP}: micro-batch 0 done (left no word)"
    assert soon(lambda: copies(tmp_path) == [])


def test_a_rank_that_is_killed_under_torchrun(tmp_path: Path) -> None:
    """torchrun ends the others, which say so, and fails; which rank it was stands in the black boxes."""
    prepare(tmp_path, "g3", 2)
    code, said = end(tmp_path, TORCHRUN, 2, "1", signal.SIGKILL)
    assert code == 1 and "Signal 9 (SIGKILL)" in said
    life, steps = life_and_steps(tmp_path)
    assert life["status"] in ("terminated", "failed") and life["last_step"] == STEP - 1
    assert steps == list(range(1, STEP))
    verdict = merge_boxes([read_box(path) for path in find_boxes([tmp_path / "runs/here"])])
    assert verdict.first == [1] and [view.state for view in verdict.ranks] == ["ended", "gone"]
    assert [view.box.last_complete_step for view in verdict.ranks] == [STEP - 1] * 2
    assert soon(lambda: copies(tmp_path) == [])


def test_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    prepare(tmp_path, "g2", 2)
    code, said = end(tmp_path, TORCHRUN, 2, "all", signal.SIGINT)
    assert code == 1 and "got signal: 2" in said
    life, steps = life_and_steps(tmp_path)
    assert (life["status"], life["last_step"]) == ("interrupted", STEP - 1) and steps == [1, 2]
    verdict = merge_boxes([read_box(path) for path in find_boxes([tmp_path / "runs/here"])])
    assert verdict.summary.startswith("all ranks stopped at the same place, step 3")
    assert "interrupted: Ctrl-C" in verdict.summary
    assert soon(lambda: copies(tmp_path) == [])
