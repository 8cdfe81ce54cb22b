"""What a run carries over to its next life beside the health rules' state: what probes remember, and the file for both.

A state is plain data and comes from merged values alone, so it is the same on every rank, and a life with another number
of ranks can go on from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trainmon.messages import Told
from trainmon.sinks.base import publish

__all__ = ["Remembers", "content_of", "go_on", "read_state", "restore", "save", "states_of", "write_state"]

_FORMAT = 1
_KIND = "trainmon state"


@runtime_checkable
class Remembers(Protocol):
    """A probe whose values depend on earlier steps."""

    name: str

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain data, the same on every rank; empty for nothing."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Goes on from a state; returns what to say of it, for all ranks alike.

        Raises:
            ValueError: no state of this probe, or a damaged one; the probe is as it was.
        """
        ...


def states_of(probes: Iterable[object]) -> dict[str, Any]:
    """What probes remember, by section."""
    states = {probe.name: probe.state_dict() for probe in probes if isinstance(probe, Remembers)}
    return {name: state for name, state in states.items() if state}


def restore(probes: Iterable[object], states: object, step: int) -> list[Told]:
    """Probes go on from their states; returns what is to be said.

    Args:
        states: of :func:`states_of`; a section that is off now is passed over.
        step: the running step.
    """
    given = states if isinstance(states, Mapping) else {}
    said: list[Told] = []
    for probe in probes:
        if not isinstance(probe, Remembers) or probe.name not in given:
            continue
        try:
            text = probe.load_state_dict(given[probe.name])
            said.append(Told("info", f"{probe.name}_restored", f"{probe.name}: {text}", step))
        except ValueError as error:
            text = f"{probe.name}: {error}: it begins anew"
            said.append(Told("warning", f"{probe.name}_not_restored", text, step))
    return said


def go_on(
    state: Mapping[str, Any],
    step: int,
    running: int,
    health: Callable[[Mapping[str, Any], int], Sequence[Told]] | None,
    probes: Iterable[object],
) -> list[Told]:
    """Rules and probes go on from a state of :meth:`TrainMonitor.state_dict`; returns what is to be said.

    Args:
        step: the last step that has begun.
        running: the running step, or the one that comes next.
        health: takes the rules' part of a state, and the step; None: there are no rules.
    """
    told: list[Told] = []
    taken = state.get("step")
    # While a step ran that was not over yet, or once the next one had begun.
    if isinstance(taken, int) and running - taken not in (0, 1):
        text = (
            f"the state was taken in step {taken}, and this life is in step {running}: what rules and probes go on "
            "from is of another time"
        )
        told.append(Told("warning", "state_of_another_step", text, step))
    if health is not None and state.get("health") is not None:
        told += health(state["health"], step)
    return told + restore(probes, state.get("probes"), step)


def save(path: str | os.PathLike[str], state: Mapping[str, Any], step: int) -> Told | None:
    """Writes a state, whole or not at all; why not is returned."""
    try:
        write_state(path, state)
    except Exception as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        text = (
            f"the state of rules and probes can't be written to {os.fspath(path)!r}: {why} (training goes on)"
        )
        return Told("warning", "state_not_written", text, step)
    return None


def content_of(path: str | os.PathLike[str] | None, step: int) -> tuple[bytes, Told | None]:
    """The JSON text of a state, empty where none can be used, and then why. None: none is looked for."""
    if path is None:
        return b"", None
    try:
        return read_state(path), None
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error)
        text = f"no state of rules and probes from {os.fspath(path)!r}: {why}; they start anew"
        return b"", Told("warning", "state_not_read", text, step)


def write_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Publishes a state in one file: a reader sees the old one or the new one, whenever this process is killed.

    Raises:
        OSError: the file can't be written; what was there is as it was.
    """
    place = Path(path)
    content = json.dumps(state, separators=(",", ":")).encode()
    header = {"kind": _KIND, "format": _FORMAT, "bytes": len(content), "blake2b": _digest(content)}
    place.parent.mkdir(parents=True, exist_ok=True)
    publish(place, json.dumps(header).encode() + b"\n" + content)


def read_state(path: str | os.PathLike[str]) -> bytes:
    """The JSON text of a state, checked to be whole.

    Raises:
        OSError: it can't be read.
        ValueError: it is something else, or damaged.
    """
    head, newline, content = Path(path).read_bytes().partition(b"\n")
    try:
        header = json.loads(head)
    except ValueError:
        header = None
    if not newline or not isinstance(header, dict) or header.get("kind") != _KIND:
        raise ValueError("it is no state of trainmon, or its beginning is damaged")
    if header.get("format") != _FORMAT:
        raise ValueError(f"it has format {header.get('format')}, this trainmon reads {_FORMAT}")
    if header.get("bytes") != len(content):
        raise ValueError(f"it is cut off: {len(content)} of {header.get('bytes')} bytes are there")
    if header.get("blake2b") != _digest(content):
        raise ValueError("it is damaged: its bytes are not those that were written")
    return content


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
