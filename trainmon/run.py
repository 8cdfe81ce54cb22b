"""A run's outputs: its directory, run.json, the sinks that the configuration asks for, and their writer.

Nothing here may stop a training: a directory that can't be written is said once, and the run goes on with the console
alone.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainmon.config import TrainMonitorConfig
from trainmon.events import TrainBegin
from trainmon.frame import Snapshot
from trainmon.outputs import build_bridge, build_sinks
from trainmon.sinks.base import Message, RunInfo
from trainmon.sinks.blackbox import BlackBox
from trainmon.sinks.run_file import RunFile
from trainmon.sinks.writer import Writer

__all__ = ["Run"]

#: Seconds that a writer has at the end of the run for what still waits.
CLOSING = 10.0

_logger = logging.getLogger("trainmon")


class Run:
    """Opens a run's outputs.

    Args:
        share: gives every rank what rank 0 gave, so that all write into one directory; called once on each rank.
        bridge: an object with ``log(dict, step)``; beats the configuration's.

    Attributes:
        info: what sinks know of the run.
        writer: takes snapshots and messages.
        bridge: the writer of the bridge; None without one.
        box: this rank's black box; None without one.
        writes: whether this rank has outputs at all.

    Raises:
        ConfigError: a sink needs a package that is not installed, or an object that is not there.
    """

    def __init__(
        self,
        config: TrainMonitorConfig,
        begin: TrainBegin,
        units: Mapping[str, str],
        host: str,
        *,
        share: Callable[[bytes], bytes] = bytes,
        bridge: Any = None,
    ) -> None:
        rank = begin.layout.rank
        self.writes = (
            rank == 0 or config.ranks == "all" or (config.ranks is not None and rank in config.ranks)
        )
        sinks = build_sinks(config) if self.writes else []
        bridge_sink = build_bridge(config, bridge) if self.writes else None
        name = config.run_name or time.strftime("%Y%m%d-%H%M%S")
        folder, life = _folder(name), 1
        parent = Path(config.output_dir)
        self._file: RunFile | None = None
        problem: OSError | None = None
        directory: Path | None = None
        if rank == 0:
            directory, problem = self._directory(parent, folder, fresh=config.run_name is None)
        if directory is not None:
            try:
                self._file = RunFile.begin(
                    directory,
                    name=name,
                    resumed_step=begin.resumed_step,
                    config=_without_secrets(config.to_dict()),
                    versions=_versions(host),
                    units=units,
                    reproduction=begin.reproduction,
                )
                folder, life = directory.name, self._file.life
            except OSError as error:
                problem, directory = error, None
        name, folder, life = json.loads(share(json.dumps([name, folder, life]).encode()))
        if rank != 0 and self.writes:
            directory, problem = self._directory(parent, folder, fresh=False)
        self.info = RunInfo(
            directory=directory,
            name=name,
            rank=rank,
            world=begin.layout.world,
            life=life,
            resumed_step=begin.resumed_step,
            total_steps=begin.total_steps,
            tag_style=config.tag_style,
            units=units,
        )
        queue = config.sinks.queue
        self.box = self._open_box(config, parent / folder if rank != 0 else directory, folder)
        self.writer = Writer(sinks, self.info, capacity=queue, on_full=config.sinks.on_full)
        # A tracker may hang on its server: it gets a thread of its own, and never makes training wait.
        self.bridge: Writer | None = None
        if bridge_sink is not None:
            self.bridge = Writer([bridge_sink], self.info, capacity=queue, tell=self.writer.say)
        if self._box_problem is not None:
            self.say("warning", "blackbox_off", self._box_problem, step=begin.resumed_step)
        if problem is not None:
            self.say(
                "error",
                "output_unwritable",
                f"output_dir {config.output_dir!r} can't be written ({problem.strerror or problem}): training goes on, "
                "but this run leaves no files; give a directory that this user may write",
                step=begin.resumed_step,
            )

    def _open_box(self, config: TrainMonitorConfig, directory: Path | None, folder: str) -> BlackBox | None:
        """This rank's black box, whether or not the rank has other outputs."""
        options = config.sinks.blackbox
        self._box_problem: str | None = None
        if options is not None and options.directory is not None:
            directory = Path(options.directory) / folder
        if options is None or directory is None:
            return None
        directory /= f"rank_{self.info.rank}"
        try:
            return BlackBox(
                directory,
                self.info,
                frames=options.frames,
                events=options.events,
                host_every=options.host_every,
                faults=options.faults,
                version=_versions("").get("trainmon", ""),
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._box_problem = f"no black box in {directory}: {reason} (training goes on)"
            return None

    @staticmethod
    def _directory(parent: Path, name: str, *, fresh: bool) -> tuple[Path | None, OSError | None]:
        """Makes the run's directory and proves that it can be written; with ``fresh`` never one that exists."""
        directory, number = parent / name, 1
        try:
            while fresh and directory.exists():
                number += 1
                directory = parent / f"{name}-{number}"
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".write_test_{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            return None, error
        return directory, None

    def put(self, snapshot: Snapshot) -> None:
        """Hands a finished frame to the sinks."""
        if self.box is not None:
            self.box.frame(snapshot)
        self.writer.put(snapshot)
        if self.bridge is not None:
            self.bridge.put(snapshot)

    @property
    def switched_off(self) -> tuple[str, ...]:
        """Names of the sinks that were switched off."""
        return self.writer.switched_off + (() if self.bridge is None else self.bridge.switched_off)

    def say(
        self, level: Any, kind: str, text: str, *, step: int, data: Mapping[str, Any] | None = None
    ) -> None:
        """Hands a message to the sinks; to Python's logging when there is none to show it."""
        self.writer.say(Message(level, kind, text, step, time.time(), data or {}))

    def note_health(self, step: int, state: str) -> None:
        """Keeps a change of the run's health in run.json."""
        if self._file is not None:
            try:
                self._file.note_health(step, state)
            except OSError as error:
                _logger.warning("run.json could not be written: %s", error)

    def configure(self, config: TrainMonitorConfig) -> None:
        """Records a configuration that has changed under way."""
        if self._file is not None:
            try:
                self._file.configure(_without_secrets(config.to_dict()))
            except OSError as error:
                _logger.warning("run.json could not be written: %s", error)

    def end(self, status: str, *, last_step: int, reason: str | None, counters: Mapping[str, Any]) -> None:
        """Writes everything that waits, then how the run ended. Bounded in time; may be called again."""
        if self.box is not None:
            self.box.end(status, step=last_step, reason=reason)
            if self.box.problem is not None:
                self.say("warning", "blackbox_lost", f"black box: {self.box.problem}", step=last_step)
        writers = [self.writer] if self.bridge is None else [self.bridge, self.writer]
        for writer in writers:
            writer.close(CLOSING)
        if self._file is not None:
            losses = [writer.losses() for writer in writers]
            sinks = {key: value for loss in losses for key, value in loss.items()}
            try:
                self._file.end(
                    status, last_step=last_step, reason=reason, counters={**counters, "sinks": sinks}
                )
            except OSError as error:
                _logger.warning("run.json could not be written at the end of the run: %s", error)


def _folder(name: str) -> str:
    """The name as one folder inside the output directory, whatever it holds: no separators, not hidden, not long."""
    plain = re.sub(r"[/\\\x00-\x1f]", "_", name)
    plain = plain.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return "_" + plain[1:] if plain.startswith(".") else plain or "_"


def _without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """The address of a webhook is often all that it takes to post there: its path stays out of the files."""
    health = config.get("health") or {}
    webhook = health.get("webhook") or {}
    if webhook.get("url"):
        scheme, _, rest = webhook["url"].partition("://")
        hidden = {**webhook, "url": f"{scheme}://{rest.split('/')[0].rpartition('@')[2]}/..."}
        return {**config, "health": {**health, "webhook": hidden}}
    return config


def _versions(host: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("trainmon", "numpy", "rich", "tensorboard", "pyarrow", "prometheus_client", host):
        try:
            found[package] = version(package)
        except (PackageNotFoundError, ValueError):
            continue
    return found
