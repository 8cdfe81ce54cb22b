"""What the host's own sections ask for: ``monitor.train_state``, ``monitor.moe_monitor``, ``monitor.tensorboard``; the
attention logits that Muon's QK-clip and ``MaxLogitsMonitor`` make the model keep.

Names of ``local_norm`` and ``device_norm`` are substrings, not regular expressions. Versions differ: 1.9.0 knows
``train_state`` with bools and no ``moe_monitor``; the directory of TensorBoard has another key before 2.1.0.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["HostSettings", "Layers", "Names", "Place", "read", "settings_of"]


def read(section: Any, *path: str) -> Any:
    """What stands at a path of attributes or keys; None where something is missing."""
    for name in path:
        if section is None:
            return None
        section = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return section


@dataclass(frozen=True, slots=True)
class Names:
    """Which parameters a norm is asked for of.

    Attributes:
        parts: texts of which a name holds one; empty: any name.
    """

    parts: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return not self.parts or any(part in name for part in self.parts)

    @staticmethod
    def of(value: Any, key: str) -> Names | None:
        """None: none at all.

        Raises:
            TypeError: neither a bool nor a text nor a list of texts.
        """
        if value is None or value is False or value == "":
            return None
        if value is True:
            return Names()
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"{key}: expected true, false, a text or a list of texts, found {value!r}")
        found = tuple(part for part in parts if part)
        return Names(found) if found else None


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where an expert layer stands: in the decoder, or in a multi-token prediction layer of number ``mtp``."""

    block: str
    mtp: int
    layer: int


@dataclass(frozen=True, slots=True)
class Layers:
    """Of which expert layers the tokens of each expert are recorded.

    Attributes:
        every: micro-batches of the run from one record to the next.
        decoder: numbers of layers of the decoder, which leave prediction layers out; None: all layers.
    """

    every: int
    decoder: frozenset[int] | None = None

    def __contains__(self, place: Place) -> bool:
        return self.decoder is None or (place.block == "decoder" and place.layer in self.decoder)

    @staticmethod
    def of(every: Any, target: Any) -> Layers | None:
        """None: nothing is recorded.

        Raises:
            TypeError, ValueError: not what the keys can be.
        """
        decoder = _decoder_layers(target)
        if every is None:
            return None
        key = "monitor.moe_monitor.save_tokens_per_expert_interval"
        if isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"{key}: expected an integer or null, found {every!r}")
        if every <= 0:
            raise ValueError(f"{key}: expected at least 1, found {every}")
        return Layers(every, decoder)


def _decoder_layers(target: Any) -> frozenset[int] | None:
    key = "monitor.moe_monitor.target_layers"
    if target is None:
        return None
    numbers = [target] if isinstance(target, int) else target
    whole = isinstance(numbers, list | tuple) and all(
        isinstance(number, int) and not isinstance(number, bool) for number in numbers
    )
    if not whole:
        raise TypeError(f"{key}: expected an integer, a list of integers or null, found {target!r}")
    if isinstance(target, int):
        if target <= 0:
            raise ValueError(f"{key}: expected at least 1 layer, found {target}")
        return frozenset(range(target))
    if any(number < 0 for number in numbers):
        raise ValueError(f"{key}: expected no number below 0, found {target!r}")
    return frozenset(numbers)


@dataclass(slots=True)
class HostSettings:
    """What was found.

    Attributes:
        local_norm, device_norm: whose norms are printed; None: nobody's.
        local_loss, device_loss: whether losses are.
        experts: which tokens of experts are recorded.
        tensorboard: the directory of the host's event files; None: it writes none.
        max_norm: what gradients are clipped to; None: not told.
        skips: whether the host leaves out updates whose gradients are not finite.
        deterministic: whether computation is to be deterministic.
        ranks: how many train together.
        config: top-level configuration keys, below the user's own.
        taken: the host's keys that they come from.
        problems: what could not be followed, and why.
    """

    local_norm: Names | None = None
    device_norm: Names | None = None
    local_loss: bool = False
    device_loss: bool = False
    experts: Layers | None = None
    tensorboard: str | None = None
    max_norm: float | None = None
    skips: bool = False
    deterministic: bool = False
    ranks: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, source: str, section: str, **keys: Any) -> None:
        self.config.setdefault(section, {}).update(keys)
        if source not in self.taken:
            self.taken.append(source)


def settings_of(args: Any, ranks: int = 1) -> HostSettings:
    """The host's settings that trainmon follows.

    Args:
        args: its configuration.
        ranks: how many train together.
    """
    found = HostSettings(ranks=ranks)
    for follow in (_norms, _losses, _experts, _logits, _tensorboard, _health, _training):
        try:
            follow(args, found)
        except (TypeError, ValueError, ImportError) as error:
            found.problems.append(str(error))
    return found


def _norms(args: Any, found: HostSettings) -> None:
    state = read(args, "monitor", "train_state")
    for key in ("local_norm", "device_norm"):
        name = f"monitor.train_state.{key}"
        try:
            setattr(found, key, Names.of(read(state, key), name))
        except TypeError as error:
            found.problems.append(str(error))
    if found.local_norm is not None:
        # The host looks at every step.
        found.put("monitor.train_state.local_norm", "gradients", micro=True, micro_every=1)
    if found.device_norm is not None:
        found.put("monitor.train_state.device_norm", "gradients", local=True, device=True)
    asked = [names for names in (found.local_norm, found.device_norm) if names is not None]
    if asked and all(names.parts for names in asked):
        found.config["gradients"]["target"] = _patterns(part for names in asked for part in names.parts)


def _patterns(parts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.escape(part) for part in parts))


def _losses(args: Any, found: HostSettings) -> None:
    state = read(args, "monitor", "train_state")
    found.local_loss = bool(read(state, "local_loss"))
    found.device_loss = bool(read(state, "device_loss"))
    if found.local_loss:
        found.put("monitor.train_state.local_loss", "loss", micro=True)
    if found.device_loss:
        found.taken.append("monitor.train_state.device_loss")


def _experts(args: Any, found: HostSettings) -> None:
    section = read(args, "monitor", "moe_monitor")
    found.experts = Layers.of(
        read(section, "save_tokens_per_expert_interval"), read(section, "target_layers")
    )
    if found.experts is not None:
        found.taken.append("monitor.moe_monitor")


def _logits(args: Any, found: HostSettings) -> None:
    """The model keeps its largest logits where one of these is there: to look at them costs next to nothing."""
    optimizer = read(args, "optimizer")
    for entry in read(args, "callbacks") or ():
        if read(entry, "type") == "MaxLogitsMonitor":
            every = read(entry, "step_interval")
            whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
            found.put("callbacks: MaxLogitsMonitor", "attention", every=every if whole else 1, per_head=True)
    if read(optimizer, "type") == "Muon" and read(optimizer, "qk_clip_enabled") is not False:
        limit = read(optimizer, "qk_clip_threshold")
        number = isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0
        found.put("optimizer: Muon with qk_clip", "attention", qk_clip=float(limit) if number else 100.0)
        found.config["attention"].setdefault("every", 1)


def _tensorboard(args: Any, found: HostSettings) -> None:
    """Our numbers go into the host's event files where it has a store for them (from 2.1.0 on) and they come in time (one
    rank), else into our own."""
    section = read(args, "monitor", "tensorboard")
    directory = read(section, "output_dir") or read(section, "tensorboard_dir")
    found.tensorboard = str(directory) if directory else None
    if not directory:
        return
    if found.ranks > 1 or importlib.util.find_spec("mindformers.pynative.tools.monitor_utils") is None:
        if importlib.util.find_spec("tensorboard") is None:
            found.problems.append(
                "monitor.tensorboard: our numbers can't go into the host's event files here, and there are none of our "
                "own without the package tensorboard (trainmon[tensorboard])"
            )
        else:
            found.put("monitor.tensorboard", "sinks", tensorboard={})


#: What the host fills in.
_HEALTH = {
    "embedding_local_norm_threshold": 100.0,
    "global_norm_skip_threshold": 100.0,
    "global_norm_skip_time": 10,
}


def _health(args: Any, found: HostSettings) -> None:
    """Read by the host, and used nowhere."""
    section = read(args, "monitor", "health_checkpoint")
    asked = [key for key, usual in _HEALTH.items() if read(section, key) not in (None, usual)]
    if asked:
        found.problems.append(
            f"monitor.health_checkpoint ({', '.join(asked)}): the host does nothing with it either; rules under health: "
            "watch grad/norm"
        )


def _training(args: Any, found: HostSettings) -> None:
    section = read(args, "training")
    limit = read(section, "max_norm")
    if isinstance(limit, int | float) and not isinstance(limit, bool):
        found.max_norm = float(limit)
    found.skips = bool(read(section, "use_skip_step_on_nan"))
    found.deterministic = bool(read(section, "deterministic"))
