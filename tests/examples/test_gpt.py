"""The demo as a person runs it: whole processes, tiny models, real text."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainmon

torch = pytest.importorskip("torch", reason="the demo trains with torch")
yaml = pytest.importorskip("yaml", reason="the demo reads its own sections with PyYAML")

DEMO = Path(__file__).resolve().parents[2] / "examples" / "gpt"
PATIENCE = 120  # seconds until a process counts as hung

TINY: dict[str, Any] = {
    "model": {"width": 32, "layers": 1, "heads": 2, "context": 32},
    # The demo is single-threaded here, so that two runs of it agree to the last bit on any machine.
    "train": {"steps": 30, "batch": 4, "accumulation": 3, "lr": 1e-2, "warmup": 3, "threads": 1},
}
MONITOR: dict[str, Any] = {
    "type": "TrainMonitor",
    "output_dir": "runs",
    "run_name": "tiny",
    "gradients": {"per_parameter": True},
}


def write(directory: Path, *, monitor: dict[str, Any] | None = MONITOR, steps: int | None = None) -> Path:
    """A YAML of a tiny run."""
    config = {**TINY, "callbacks": [monitor] if monitor else []}
    if steps is not None:
        config["train"] = {**TINY["train"], "steps": steps}
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def command(config: Path, *options: str) -> dict[str, Any]:
    """What to start: beside the configuration, with the very trainmon that is tested here."""
    package = Path(str(trainmon.__file__)).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), "COLUMNS": "200"}
    arguments = [sys.executable, str(DEMO / "train.py"), config.name, *options]
    return {"args": arguments, "cwd": config.parent, "env": environment, "text": True}


def run(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(config, *options), capture_output=True, timeout=PATIENCE, check=False)


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file in which every line must be whole."""
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def steps_of(directory: Path) -> list[dict[str, Any]]:
    records = lines(directory / "runs" / "tiny" / "rank_0" / "scalars.jsonl")
    return [record for record in records if "record" not in record]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that went to its end, and what it said."""
    directory = tmp_path_factory.mktemp("demo")
    done = run(write(directory))
    assert done.returncode == 0, done.stderr
    return directory, done


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The demo's `train` module, gone again afterwards: its modules have everyday names."""
    monkeypatch.syspath_prepend(str(DEMO))
    before = set(sys.modules)
    yield importlib.import_module("train")
    for name in {"train", "model", "data"} - before:
        sys.modules.pop(name, None)


def test_every_step_is_on_disk_and_finite(finished: Any) -> None:
    directory, _ = finished
    steps = steps_of(directory)
    assert [record["step"] for record in steps] == list(range(1, 31))
    for record in steps:
        for name in ("loss/global", "grad/norm", "optim/lr", "perf/tokens_per_second", "time/step"):
            assert isinstance(record[name], float | int), (record["step"], name, record[name])
            assert math.isfinite(record[name]) and record[name] > 0, (record["step"], name)
        assert record["grad/nonfinite"] == 0


def test_the_model_learns_from_knowing_nothing(finished: Any) -> None:
    directory, _ = finished
    losses = [record["loss/global"] for record in steps_of(directory)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_files_of_the_run(finished: Any) -> None:
    directory, _ = finished
    record = json.loads((directory / "runs" / "tiny" / "run.json").read_text())
    assert record["lives"][-1]["status"] == "completed"
    assert record["lives"][-1]["last_step"] == 30
    rank = directory / "runs" / "tiny" / "rank_0"
    assert all("text" in event or "record" in event for event in lines(rank / "events.jsonl"))
    assert (rank / "log.txt").read_text().count("\n") >= 30
    tables = "".join(path.read_text() for path in sorted((rank / "tensors").glob("*.csv")))
    assert "blocks.0.qkv.weight" in tables


def test_ends_with_a_summary_and_the_results(finished: Any) -> None:
    _, done = finished
    for words in ("What trainmon saw", "runs/tiny", "scalars.jsonl", "held-out loss:", "sample:"):
        assert words in done.stdout
    assert "step 30/30" in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_are_those_of_the_training(finished: Any, demo: Any) -> None:
    """The same training again, with the demo's own arithmetic in the monitor's place."""
    directory, _ = finished
    training = tiny_training(demo)

    class Recorder(demo.NoMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.micros: list[tuple[float, int]] = []
            self.consumed = 0

        def micro_end(self, *, loss: Any, tokens: int) -> None:
            self.micros.append((loss.item(), tokens))

        def grads_ready(self) -> Any:
            gradients = [parameter.grad.double() for parameter in training.model.parameters()]
            tokens = sum(count for _, count in self.micros)
            self.consumed += tokens
            self.steps.append(
                {
                    "loss/global": sum(mean * count for mean, count in self.micros) / tokens,
                    "grad/norm": float(torch.nn.utils.get_total_norm(gradients)),
                    "optim/lr": training.optimizer.param_groups[0]["lr"],
                    "data/tokens": self.consumed,
                }
            )
            self.micros.clear()
            return super().grads_ready()

    recorder = Recorder()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(30):
            training.step(recorder)
    finally:
        torch.set_num_threads(threads)
    for mine, record in zip(recorder.steps, steps_of(directory), strict=True):
        for name, value in mine.items():
            assert record[name] == pytest.approx(value, rel=1e-12), (record["step"], name)


def tiny_training(demo: Any) -> Any:
    model = demo.section_of(TINY, "model", demo.ModelConfig)
    data = demo.section_of(TINY, "data", demo.DataConfig)
    train = demo.section_of({"train": {**TINY["train"], "threads": None}}, "train", demo.TrainConfig)
    return demo.Training(model, data, train)


def test_without_monitor_trains_the_same_bits(finished: Any, tmp_path: Path) -> None:
    _, watched = finished
    plain = run(write(tmp_path, monitor=None))
    assert plain.returncode == 0, plain.stderr
    assert not (tmp_path / "runs").exists()
    results = watched.stdout[watched.stdout.index("held-out loss:") :]
    assert plain.stdout == results


def test_micro_batches_differ_in_counted_bytes(demo: Any) -> None:
    """So that the demo's loss shows whether micro-batches are weighted."""
    training = tiny_training(demo)
    batches = [training.data.next_batch() for _ in range(200)]
    assert len({batch.tokens for batch in batches}) > 1
    for batch in batches:
        assert batch.tokens == int((batch.targets >= 0).sum())


def test_held_out_text_is_no_training_text(demo: Any) -> None:
    data = tiny_training(demo).data
    training = {paragraph for text in data.training for paragraph in bytes(text.tolist()).split(b"\n\n")}
    for text in data.held_out:
        assert not training & set(bytes(text.tolist()).split(b"\n\n"))
    counted = sum(batch.tokens for batch in data.held_out_batches())
    assert counted == sum(len(text) - 1 for text in data.held_out)


def test_options_beat_the_file(tmp_path: Path) -> None:
    done = run(write(tmp_path), "--steps", "2", "--set", "train.lr=3e-3", "--set", "train.warmup=1")
    assert done.returncode == 0, done.stderr
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["optim/lr"] == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("callbacks:\n  - type: TrainMonitor\n    gradiants: {norm: true}\n", "3:5", "gradients"),
        ("callbacks:\n  - type: TrainMonitor\n    every: often\n", "3:12", "integer"),
        ("callbacks:\n  - type: TrainMonitor\n    every: 1\n    every: 2\n", "4:5", "every"),
        ("callbacks: [{type: TrainMonitor, every: 1\n", "2:1", "expected"),
    ],
    ids=["unknown key", "wrong type", "duplicate key", "no YAML"],
)
def test_a_wrong_file_is_told_in_one_place(tmp_path: Path, text: str, place: str, words: str) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    done = run(path, "--steps", "1")
    assert done.returncode == 2
    assert f"tiny.yaml:{place}: " in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {widht: 3}\n", "model.widht: unknown key; known are width"),
        ("train: {lr: fast}\n", "train.lr: expected float, not 'fast'"),
        ("train: {lr: true}\n", "train.lr: expected float, not True"),
        ("train: {steps: 0}\n", "train.steps: expected at least 1"),
        ("model: {width: 30, heads: 4}\n", "model.width: 30 is no multiple of model.heads, 4"),
        ("data: {held_out: 1}\n", "data.held_out: expected a share between 0 and 1"),
        ("callbacks: [{type: Checkpoint}]\n", "callbacks[0]: unknown type 'Checkpoint'"),
        ("- 1\n", "expected the sections"),
        ("", "expected the sections"),
    ],
)
def test_the_programs_own_sections_are_checked(
    demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    assert demo.main([str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{path}: ")
    assert words in told


def test_a_missing_file(demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.yaml"
    assert demo.main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: No such file or directory\n"


def interrupted(directory: Path, number: signal.Signals) -> tuple[int, str, str]:
    """A run that gets a signal after its fifth step: exit status, stdout, stderr."""
    config = write(directory, steps=1_000_000)
    scalars = directory / "runs" / "tiny" / "rank_0" / "scalars.jsonl"
    with subprocess.Popen(
        **command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while not (scalars.exists() and scalars.read_bytes().count(b"\n") > 5):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "no steps on disk"
                time.sleep(0.02)
            process.send_signal(number)
            out, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return process.returncode, out, error


def test_ctrl_c_closes_the_run(tmp_path: Path) -> None:
    status, out, error = interrupted(tmp_path, signal.SIGINT)
    assert status == 130
    assert "Traceback" not in error
    assert "runs/tiny" in out  # the summary says where the files are
    assert "held-out" not in out
    steps = [record["step"] for record in steps_of(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    life = json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())["lives"][-1]
    assert life["status"] == "interrupted"
    assert life["last_step"] == steps[-1]


def test_sigterm_kills_and_leaves_whole_files(tmp_path: Path) -> None:
    status, _, error = interrupted(tmp_path, signal.SIGTERM)
    assert status == -signal.SIGTERM
    assert "Traceback" not in error
    steps = [record["step"] for record in steps_of(tmp_path)]
    assert len(steps) >= 5
    assert steps == list(range(1, len(steps) + 1))
    life = json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())["lives"][-1]
    assert life["status"] == "terminated"


def test_an_unwritable_output_directory_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file where a directory should be")
    done = run(write(tmp_path, monitor={**MONITOR, "output_dir": "occupied"}, steps=3))
    assert done.returncode == 0
    assert "held-out loss:" in done.stdout
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if "occupied" in line]
    assert len(told) == 1, done.stderr
    assert (tmp_path / "occupied").read_text() == "a file where a directory should be"


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra of trainmon")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = {"jsonl": True, "tensorboard": True}
    done = run(write(tmp_path, monitor={**MONITOR, "sinks": sinks}, steps=4))
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "runs" / "tiny" / "rank_0" / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss/global")]
    written = [(record["step"], record["loss/global"]) for record in steps_of(tmp_path)]
    assert [step for step, _ in shown] == [step for step, _ in written] == [1, 2, 3, 4]
    assert [value for _, value in shown] == pytest.approx([value for _, value in written], rel=1e-6)


def test_the_shipped_yaml_is_valid(demo: Any) -> None:
    """Every key of `train.yaml` is known, to the program and to the monitor."""
    path = DEMO / "train.yaml"
    config = demo.read_config(path)
    assert demo.wants_monitor(config)
    model = demo.section_of(config, "model", demo.ModelConfig)
    data = demo.section_of(config, "data", demo.DataConfig)
    train = demo.section_of(config, "train", demo.TrainConfig)
    training = demo.Training(model, data, train)
    assert 3_000_000 < training.parameters < 5_000_000
    assert trainmon.load_config(path).gradients is not None
