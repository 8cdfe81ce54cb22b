"""The command: what is asked for, what stands in the files, and the start of the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from trainmon.config import ConfigError, Place, Problem, load_config
from trainmon.config.files import parse
from trainmon.config.load import Source, stands_for
from trainmon.launch.copies import copy_beside
from trainmon.launch.entry import Entry, find_entry
from trainmon.launch.hosts import HOSTS
from trainmon.launch.script import missing, run_module, run_script
from trainmon.launch.trainers import Trainers

__all__ = ["USAGE", "main"]

USAGE = """\
usage: trainmon launch [--monitor FILE] -- SCRIPT [ARGUMENT ...]
       trainmon launch [--monitor FILE] -- -m MODULE [ARGUMENT ...]

Runs a training script as python would, and attaches TrainMonitor to the trainer that it builds. The configuration is
the entry `- type: TrainMonitor` under `callbacks:` of a YAML or JSON file among the arguments; the script is given a
copy of that file without the entry.

  --monitor FILE  a configuration; joined key by key over the entry, if there is one
  -h, --help      this text

With several processes: torchrun ... -m trainmon.launch -- [--monitor FILE] SCRIPT [ARGUMENT ...]
"""

_SUFFIXES = (".yaml", ".yml", ".json")
# As launchers set them: torchrun, msrun, mpirun, srun.
_RANK = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True, slots=True)
class _Command:
    monitor: str | None = None
    module: str | None = None
    script: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A file with our entry."""

    path: str
    entry: Entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script under the monitor.

    Returns:
        0 when the script has ended, 2 for a command that can't be. What the script raises is raised, SystemExit too.

    Raises:
        SystemExit: 2, if the configuration is wrong.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _read(words)
    if isinstance(command, str):
        if not command:
            print(USAGE, end="")
            return 0
        print(f"{USAGE}\ntrainmon launch: {command}", file=sys.stderr)
        return 2
    try:
        config, command = _prepare(command)
    except ConfigError as error:
        _refuse(error)
    trainers = Trainers(HOSTS, config, _say, _refuse)
    if config is not None:
        trainers.install()
    try:
        if command.module is not None:
            run_module(command.module, command.arguments)
        else:
            assert command.script is not None
            run_script(command.script, command.arguments)
    except SystemExit as left:
        if left.code in (None, 0):
            _say_at_the_end(config, trainers)
        raise
    _say_at_the_end(config, trainers)
    return 0


def _read(words: list[str]) -> _Command | str:
    """The command; a sentence if it is wrong, an empty one if help is asked for."""
    command = _Command()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            return ""
        if name == "--monitor":
            if not equals and not words:
                return "--monitor needs a file"
            if command.monitor is not None:
                return "--monitor is given twice"
            command = replace(command, monitor=value if equals else words.pop(0))
        elif word == "--":
            continue  # options may follow: torchrun would take --monitor for an option of its own before it
        elif word == "-m":
            if not words:
                return "-m needs a module"
            return replace(command, module=words[0], arguments=tuple(words[1:]))
        elif word.startswith("-"):
            return f"unknown option {word}; options of the script follow the script"
        else:
            return replace(command, script=word, arguments=tuple(words))
    return "no script is given"


# ---- before the start ----


def _prepare(command: _Command) -> tuple[Source, _Command]:
    """Where the configuration stands (None: nowhere), and the command with what the script is given.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems: list[Problem] = []
    absent = missing(command.script, command.module)
    if absent is not None:
        problems.append(Problem(Place(), "", absent))
    paths = {os.path.realpath(name): name for name in map(_file_in, reversed(command.arguments)) if name}
    names = list(reversed(paths.values()))
    found: list[_Found] = []
    hints: list[str] = []
    for name in names:
        try:
            entry, hint = find_entry(name)
        except ConfigError as error:
            problems += error.problems
            continue
        if entry is not None:
            found.append(_Found(name, entry))
        elif hint:
            hints.append(hint)
    if len(found) > 1:
        first, others = found[0], found[1:]
        problems += [
            Problem(other.entry.place, "", f"a second entry (the first is {first.entry.place}); keep one")
            for other in others
        ]
    files = [os.path.abspath(one.path) for one in found[:1]]
    if command.monitor is not None:
        files.append(os.path.abspath(os.path.expanduser(command.monitor)))
    source: Source = files[0] if len(files) == 1 else tuple(files) or None
    if source is not None:
        try:
            load_config(source)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if source is None:
        _say_nothing_found(names, hints)
        return None, command
    for hint in hints:
        _say(hint)
    if found:
        return _hand_over(found[0], source, command)
    return source, command


def _file_in(argument: str) -> str | None:
    """The configuration file that an argument names: `cfg.yaml`, `--config=cfg.yaml`, `config=cfg.yaml`."""
    for word in (argument, argument.partition("=")[2]):
        if word.lower().endswith(_SUFFIXES) and os.path.isfile(word) and os.access(word, os.R_OK):
            return word
    return None


def _hand_over(found: _Found, source: Source, command: _Command) -> tuple[Source, _Command]:
    """The script gets a copy without the entry."""
    entry = found.entry
    if entry.rest is None:
        _say(f"{entry.place}: the host builds this entry by itself (auto_register); nothing is attached")
        return None, command
    try:
        copy, warning = copy_beside(found.path, entry.rest)
    except OSError as error:
        text = f"no copy of it can be written for the host, beside it or among temporary files: {error}"
        raise ConfigError([Problem(Place(found.path), "", text)]) from None
    left = parse(entry.rest, found.path).data
    assert isinstance(left, dict)
    stands_for(copy, os.path.abspath(found.path), left)
    if warning:
        _say(warning)
    _say(f"{entry.place} configures the monitor; the script is given {copy}")
    arguments = []
    for argument in command.arguments:
        name = _file_in(argument)
        if name is not None and os.path.realpath(name) == os.path.realpath(found.path):
            argument = argument[: len(argument) - len(name)] + copy
        arguments.append(argument)
    return source, replace(command, arguments=tuple(arguments))


# ---- what is said ----


def _first(names: Sequence[str]) -> bool:
    """Whether this process is the first one, or the only one."""
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def _refuse(error: ConfigError) -> NoReturn:
    if _first(_LOCAL_RANK):
        print(f"trainmon launch: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _say(text: str) -> None:
    if _first(_RANK):
        print(f"trainmon launch: {text}", file=sys.stderr, flush=True)


def _say_nothing_found(names: Sequence[str], hints: Sequence[str]) -> None:
    for hint in hints:
        _say(hint)
    where = f"in {', '.join(names)}" if names else "(no argument is a YAML or JSON file)"
    _say(f"no entry `- type: TrainMonitor` {where} and no --monitor: nothing is attached")


def _say_at_the_end(config: Source, trainers: Trainers) -> None:
    """What a script that is through has left undone."""
    if config is None or trainers.attached:
        return
    if trainers.failed is not None:
        _say(f"nothing was monitored: the trainer could not be attached to: {trainers.failed}")
        return
    if "trainmon.monitor" in sys.modules:
        return  # the script has one of its own
    known = ", ".join(f"{host.name} ({' '.join(host.trainers)})" for host in HOSTS)
    _say(
        f"nothing was attached: the script has built no trainer that is known here: {known}; in a loop of your own, "
        f"trainmon.attach() does it"
    )
