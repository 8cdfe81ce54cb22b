"""Runs a recorded trace's case on the fake of its generation, and compares event by event.

Order, names, keywords, counts, liveness and learning rates must be equal; floats to `TOLERANCE` (16-bit parameters:
`ROUGH`), relative; clock values may be anything. Not compared: expert counts after the first NaN (they depend on how
top-k orders it), gradients at G2's micro-batch events with two ranks (the recorded stand-in reduced each
micro-batch; the host doesn't), the names of stand-ins and of files that stand-ins wrote.
"""

from __future__ import annotations

import builtins
import json
import os
import tarfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from tests.hosts.hyperparallel import config_g3, config_lm, fake_g1, fake_g2, fake_g3
from tests.hosts.hyperparallel import model as task
from tests.hosts.hyperparallel.recorder import Recording, watch_seams

TRACES = Path(__file__).parent / "traces.tar.xz"
TOLERANCE, ROUGH = 1e-4, 2e-2
FAKES: dict[str, Any] = {"G1": fake_g1, "G2": fake_g2, "G3": fake_g3}


def traces() -> dict[str, dict[str, Any]]:
    """By name, such as `g1_base`; more of them from the directory that `HYPERPARALLEL_TRACES` names."""
    with tarfile.open(TRACES) as archive:
        found = {
            Path(member.name).stem: json.load(archive.extractfile(member))  # type: ignore[arg-type]
            for member in archive.getmembers()
            if member.isfile()
        }
    more = os.environ.get("HYPERPARALLEL_TRACES")
    if more:
        found |= {
            path.stem: json.loads(path.read_text("utf-8")) for path in sorted(Path(more).glob("*.json"))
        }
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread and no oneDNN: the fewest sources of difference between machines."""
    threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    task.setup()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = mkldnn


class Player:
    """One run of a trace on one rank: the fake, recording callbacks with the run's behaviour, faults."""

    def __init__(self, trace: dict[str, Any], number: int, directory: Path, rank: int) -> None:
        self.trace, self.run, self.directory = trace, trace["runs"][number], directory
        self.settings = self.run["settings"]
        self.generation = trace["generation"]
        self.recording = Recording(self.generation, directory, self.settings)
        self.behaviour = list(self.run["behaviour"])
        self.rank = rank
        self.trouble = ""  # the traceback of what ended the run

    def callback(self, name: str) -> Any:
        """A callback of the fake's own class whose every hook records, and then does what the run says."""
        fake = FAKES[self.generation]
        base = fake.BaseCallback if self.generation == "G2" else fake.Callback

        def hook(event: str) -> Any:
            def record(mine: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
                self.recording.hook(name, event, state, args, kwargs)
                return self._behave(mine, name, event)

            return record

        made = type(f"Recorder_{name}", (base,), {event: hook(event) for event in fake.HOOKS})
        if self.generation == "G2":
            callback = made()
            callback.priority = self.run["priority"]
            return callback
        return made(self.recording.trainer)

    def _behave(self, callback: Any, name: str, event: str) -> Any:
        trainer = self.recording.trainer
        if self.run["fault"] == "async_save" and self.generation == "G3" and event == "on_step_end":
            writing = self._checkpointer()._writing
            if writing is not None:
                writing.join()
        for planned in self.behaviour if name == "main" else ():
            if planned["hook"] == event and planned["step"] == trainer.state.global_step:
                self.behaviour.remove(planned)
                return self._do(planned, callback)
        return None

    def _do(self, planned: dict[str, Any], callback: Any) -> Any:
        what = planned["do"]
        if what == "raise":
            self.recording.raised = getattr(builtins, planned["exception"])("on purpose")
            raise self.recording.raised
        if what == "control":
            return fake_g2.TrainerControl(**planned["flags"])
        if what == "remove_self":
            self._remove(callback)
        elif what == "add_late":
            self._attach(self.callback("late"))
        elif what == "release_writer":
            owner = self._checkpointer()
            self.gate.set()
            owner._thread.join()
        else:
            raise ValueError(f"unknown behaviour {what}")
        return None

    def _attach(self, callback: Any) -> None:
        trainer = self.recording.trainer
        if self.generation == "G3":
            trainer._callbacks.append(callback)
        else:
            trainer.add_callback(callback)

    def _remove(self, callback: Any) -> None:
        trainer = self.recording.trainer
        if self.generation == "G2":
            trainer.remove_callback(callback)
        else:
            (trainer.user_callbacks if self.generation == "G1" else trainer._callbacks).remove(callback)

    def _checkpointer(self) -> Any:
        trainer = self.recording.trainer
        if self.generation == "G3":
            return next(c for c in trainer._callbacks if type(c).__name__ == "CheckpointerCallback")
        return trainer.checkpoint_callback if self.generation == "G1" else trainer

    def build(self) -> Any:
        """The trainer with the run's callbacks; G2's get on_init_end while it is built."""
        fake, settings, names = FAKES[self.generation], dict(self.settings), self.run["callbacks"]
        if settings["resume"] not in (None, "LATEST"):
            settings["resume"] = str(self.directory / settings["resume"])
        output = str(self.directory / "out")
        if self.generation == "G3":
            outer = getattr(fake, self.trace["trainer"])(config_g3.from_settings(settings, output))
            self.recording.trainer = getattr(outer, "base", outer)
        elif self.generation == "G1":
            outer = getattr(fake, self.trace["trainer"])(config_lm.from_settings(settings, output))
            self.recording.trainer = getattr(outer, "base", outer)
        else:
            outer = self._build_g2(config_lm.from_settings(settings, output))
        trainer = self.recording.trainer
        if self.generation != "G2":
            for name in names:
                self._attach(self.callback(name))
            for name, place in self.run["inserted_at"].items():
                trainer._callbacks.insert(place, self.callback(name))
        for name in self._registered_late():
            self._attach(self.callback(name))
        return outer

    def _build_g2(self, args: Any) -> Any:
        """The recorder must know the trainer before the wrapper's constructor sends on_init_end."""
        player = self

        class Watched(fake_g2.BaseTrainer):
            def _setup(self, args: Any) -> None:
                super()._setup(args)
                player.recording.trainer = self

        original, fake_g2.BaseTrainer = fake_g2.BaseTrainer, Watched
        try:
            made = getattr(fake_g2, self.trace["trainer"])
            return made(args, callbacks=[self.callback(name) for name in self.run["callbacks"]])
        finally:
            fake_g2.BaseTrainer = original

    def _registered_late(self) -> list[str]:
        """Callbacks that the trace has, though neither the run's lists nor its behaviour name them."""
        seen = dict.fromkeys(e["cb"] for e in self.run["ranks"][0]["events"] if e["cb"])
        known = {*self.run["callbacks"], *self.run["inserted_at"]}
        known |= {"late"} if any(one["do"] == "add_late" for one in self.run["behaviour"]) else set()
        return [name for name in seen if name not in known]

    def _spoil(self) -> None:
        trainer, planned = self.recording.trainer, self.settings["nan_grad"]
        if planned is not None:

            def after_backward(step: int, index: int, count: int) -> None:
                if step == planned["step"] and index == count - 1:
                    gradient = self.recording.parameters()[planned["param"]].grad
                    gradient.view(-1)[planned["index"]] = float("nan")

            trainer.after_backward = after_backward
        if self.run["fault"] is not None:

            def fails(*_: Any) -> None:
                raise OSError("no space left on purpose")

            if self.generation == "G3":
                self._checkpointer().write = fails
            else:
                self._checkpointer().writer.model = fails
        self._hold_writer()

    def _hold_writer(self) -> None:
        """A background save waits until the run's behaviour releases it."""
        import threading

        self.gate = threading.Event()
        if any(one["do"] == "release_writer" for one in self.behaviour):
            owner = self._checkpointer()
            write = owner.writer

            def held(*args: Any) -> None:
                if threading.current_thread() is not threading.main_thread():
                    self.gate.wait(60)
                write(*args)

            owner.writer = held

    def play(self) -> dict[str, Any]:
        """What the recorder wrote of this rank: events, ended, final; and `trouble`."""
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outer = self.build()
            self._spoil()
            watch_seams(self.recording)
            ended: dict[str, Any] = {"returned": True}
            try:
                outer.train()
            except Exception as error:
                ended = {
                    "returned": False,
                    "exception": type(error).__name__,
                    "raised_by_callback": error is self.recording.raised,
                }
                self.trouble = traceback.format_exc()
            final = self.recording.final()
            if distributed.is_initialized():
                distributed.destroy_process_group()
        told = {"rank": self.rank, "events": self.recording.events, "ended": ended, "final": final}
        return {**told, "trouble": self.trouble}


def between_runs(trace: dict[str, Any], directory: Path) -> None:
    """What the case does to the first run's files."""
    if "broken_state" in trace["case"]:
        for file in (directory / "out").glob("step_*/extra_state.json"):
            file.write_text("no JSON", "utf-8")


def play_on_rank(trace: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    """All runs of a trace on a rank that tests.ranks.gloo started; it leaves that rank a group to take down."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    distributed.barrier()  # a group mustn't go while another rank is joining it
    distributed.destroy_process_group()
    told = []
    for number in range(len(trace["runs"])):
        join(directory, f"run{number}", rank, size)
        told.append(Player(trace, number, Path(directory), rank).play())
    join(directory, "end", rank, size)
    distributed.barrier()
    return told


def join(directory: str, name: str, rank: int, size: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/{name}.store", rank=rank, world_size=size
    )


def play(trace: dict[str, Any], directory: Path) -> list[list[dict[str, Any]]]:
    """By run, then by rank."""
    world = trace["runs"][0]["settings"]["world"]
    if world > 1:
        from tests.ranks.gloo import on_ranks

        by_rank = on_ranks(world, play_on_rank, trace, str(directory))
        return [[by_rank[rank][number] for rank in range(world)] for number in range(len(trace["runs"]))]
    told = []
    for number in range(len(trace["runs"])):
        told.append([Player(trace, number, directory, 0).play()])
        between_runs(trace, directory)
    return told


class Comparison:
    """Collects where `got` differs from what was recorded."""

    def __init__(self, trace: dict[str, Any], settings: dict[str, Any]) -> None:
        self.generation, self.settings = trace["generation"], settings
        self.tolerance = ROUGH if settings["fp32_main_params"] else TOLERANCE
        self.differences: list[str] = []

    def rank(self, expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
        self.value("ended", expected["ended"], got["ended"])
        if self.differences:
            self.differences.append(got["trouble"])
        pairs = list(zip(expected["events"], got["events"], strict=False))
        spoiled = False
        for number, (one, other) in enumerate(pairs):
            place = f"event {number} ({one['cb'] or 'seam'} {one['name']} at {one['global_step']})"
            if (one["cb"], one["name"]) != (other["cb"], other["name"]):
                self.differences.append(f"{place}: got {other['cb'] or 'seam'} {other['name']} instead")
                return self.differences
            self.event(place, one, other, spoiled)
            spoiled = spoiled or '"nan"' in json.dumps(one)
        for name, longer, shorter in (("missing", expected, got), ("too many", got, expected)):
            for event in longer["events"][len(shorter["events"]) :]:
                self.differences.append(
                    f"{name}: {event['cb'] or 'seam'} {event['name']} at {event['global_step']}"
                )
        final, mine = dict(expected["final"]), dict(got["final"])
        if self.settings["world"] > 1:
            self.own_files(expected["rank"], final, mine)
        self.event("final", final, mine, spoiled)
        return self.differences

    def own_files(self, rank: int, *finals: dict[str, Any]) -> None:
        """With several ranks: what another one has written by now depends on who is faster."""
        names = (f"rank{rank}", f"rank_{rank}")
        for final in finals:
            if "checkpoint_files" in final:
                files = final["checkpoint_files"]
                final["checkpoint_files"] = [file for file in files if any(name in file for name in names)]
            if rank > 0:
                final.pop("saved_state", None)

    def event(self, place: str, expected: dict[str, Any], got: dict[str, Any], spoiled: bool) -> None:
        skip = {"tokens_per_expert", "expert_bias"} if spoiled else set()
        expected, got = dict(expected), dict(got)
        for event in (expected, got):
            event.setdefault("kwargs", {})  # of a seam that has none
        unreduced = self.generation == "G2" and self.settings["world"] > 1
        if unreduced and expected.get("name") in ("on_micro_batch_end", "on_forward_end"):
            expected["grads"], got["grads"] = expected["grads"]["alive"], got["grads"]["alive"]
        if self.generation == "G3" and "checkpoint_files" in expected:
            names = {"model_rank0.bytes": "_rank0_.safetensors", "optimizer_rank0.bytes": "_rank0_.bytes"}
            for recorded, real in names.items():
                files = [file.replace(recorded, real) for file in expected["checkpoint_files"]]
                expected["checkpoint_files"] = sorted(files)
        self.value(
            place,
            {k: v for k, v in expected.items() if k not in skip},
            {k: v for k, v in got.items() if k not in skip},
        )

    def value(self, place: str, expected: Any, got: Any) -> None:
        if isinstance(expected, dict) and isinstance(got, dict):
            if "object" in expected and "stand-in" in str(expected["object"]):
                expected = got if "object" in got else expected
            if expected.keys() != got.keys():
                self.differences.append(f"{place}: keys {sorted(got)} for {sorted(expected)}")
                return
            for key in expected:
                self.value(f"{place}.{key}", expected[key], got[key])
        elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
            for number, (one, other) in enumerate(zip(expected, got, strict=True)):
                self.value(f"{place}[{number}]", one, other)
        elif isinstance(expected, float) and isinstance(got, float) and ".lr" not in place:
            if abs(expected - got) > self.tolerance * max(abs(expected), abs(got)):
                self.differences.append(f"{place}: {got!r} for {expected!r}")
        elif expected != got or isinstance(expected, bool) != isinstance(got, bool):
            self.differences.append(f"{place}: {got!r} for {expected!r}")


def differences(trace: dict[str, Any], directory: Path) -> list[str]:
    """Of all runs and ranks; [] if the fake does what the trace says."""
    told = play(trace, directory)
    found = []
    for number, (run, ranks) in enumerate(zip(trace["runs"], told, strict=True)):
        for expected, got in zip(run["ranks"], ranks, strict=True):
            compared = Comparison(trace, run["settings"]).rank(expected, got)
            found += [f"run {number}, rank {expected['rank']}: {one}" for one in compared]
    return found
