"""What the model keeps of its inside in parameters: largest attention logits, load and place of experts.

They are found by their names, wherever the model has them. Largest logits begin at zero in the host: a head that still
has zero has had none above it, and is null. Each layer is read from its own parameter, not from the host's list, which
leaves out layers whose sum is not positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trainmon.events import AttentionLayer, AttentionSeen, ExpertLayer, ExpertsSeen, MaxLogits
from trainmon.monitor import TrainMonitor

__all__ = ["Inside", "real_model"]

#: Names of the host's parameters, by what they hold; ``counts`` in order of preference.
_COUNTS = ("num_tokens_per_expert", "expert_load", "fi_parameter")
_BIASES = ("expert_bias", "topk_bias")
_PLACES = ("expert_mapping",)
_LOGITS = "max_logits_val"


def real_model(network: Any) -> Any:
    """The model below the cells that train it, as the host finds it."""
    for name in ("network", "_backbone", "network"):
        while getattr(network, name, None) is not None:
            network = getattr(network, name)
    return network


@dataclass(slots=True)
class _Experts:
    """Parameters of one layer, by what they hold."""

    counts: tuple[str, Any] | None = None
    bias: Any = None
    mapping: Any = None
    before: Any = field(default=None)


class Inside:
    """Reads the model's parameters once a step.

    Args:
        network: the training network.
        head_rank: this rank's place among those that share a layer's heads.
        local_experts: experts that each rank of expert parallelism has; 0: not told.
    """

    def __init__(self, network: Any, head_rank: int = 0, local_experts: int = 0) -> None:
        self.head_rank, self._local = head_rank, local_experts
        self._logits: dict[str, Any] = {}
        self._experts: dict[str, _Experts] = {}
        self.logits: dict[str, Any] = {}
        for path, parameter in _parameters(real_model(network)):
            module, _, name = path.rpartition(".")
            if name == _LOGITS:
                self._logits[path] = parameter
            elif name in (*_COUNTS, *_BIASES, *_PLACES):
                self._note(_layer_of(module), name, parameter)
        self._experts = {layer: one for layer, one in self._experts.items() if one.counts is not None}

    def _note(self, layer: str, name: str, parameter: Any) -> None:
        experts = self._experts.setdefault(layer, _Experts())
        if name in _BIASES:
            experts.bias = parameter
        elif name in _PLACES:
            experts.mapping = parameter
        elif experts.counts is None or _COUNTS.index(name) < _COUNTS.index(experts.counts[0]):
            experts.counts = name, parameter

    def attention(self) -> list[AttentionLayer]:
        """Layers that keep their largest logits."""
        return [AttentionLayer(name) for name in self._logits]

    def experts(self) -> list[ExpertLayer]:
        """Layers that count their experts' tokens."""
        return [
            ExpertLayer(name, int(np.prod(one.counts[1].shape)))
            for name, one in self._experts.items()
            if one.counts is not None
        ]

    def show_attention(self, monitor: TrainMonitor, selected: Callable[[str], bool]) -> None:
        """The step's largest logits, of this rank's heads."""
        self.logits = {}
        for name, parameter in self._logits.items():
            if selected(name):
                monitor.offer(AttentionSeen, partial(self._largest, name, parameter))

    def _largest(self, name: str, parameter: Any) -> AttentionSeen | None:
        values = _numbers(parameter)
        self.logits[name] = values
        known = np.where(values == 0, -np.inf, values)
        if np.all(known == -np.inf):
            return None  # no head's largest is known
        return AttentionSeen(name, MaxLogits(known), 0, self.head_rank * len(values))

    def show_experts(self, monitor: TrainMonitor, selected: Callable[[str], bool]) -> None:
        """The step's load of experts, before and where it is set back."""
        for layer, one in self._experts.items():
            if selected(layer):
                monitor.offer(ExpertsSeen, partial(self._load, layer, one))

    def _load(self, layer: str, one: _Experts) -> ExpertsSeen | None:
        if one.counts is None:
            return None
        counts = _numbers(one.counts[1])
        return ExpertsSeen(
            layer,
            experts=len(counts),
            counts=counts if one.before is None else counts - one.before,
            bias=None if one.bias is None else _numbers(one.bias),
            placement=self._placement(one),
        )

    def after(self) -> None:
        """The step's callbacks are through: a load that nobody has set back goes on growing."""
        for one in self._experts.values():
            if one.counts is not None:
                left = _numbers(one.counts[1])
                one.before = left if one.counts[0] != "fi_parameter" and left.any() else None

    def _placement(self, one: _Experts) -> Any:
        """The rank of each expert: the host's mapping names the expert at each place."""
        if one.mapping is None or not self._local:
            return None
        mapping = np.array(one.mapping.asnumpy()).reshape(-1).astype(np.int64)
        ranks = np.empty(len(mapping), np.float64)
        ranks[mapping] = np.arange(len(mapping)) // self._local
        return ranks


def _numbers(parameter: Any) -> Any:
    """A copy; nobody holds on to the host's memory."""
    return np.array(parameter.asnumpy(), np.float64).reshape(-1)


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """With their paths in the model; those that several modules hold, once."""
    walk = getattr(model, "parameters_and_names", None)
    return iter(()) if walk is None else iter(walk())


def _layer_of(module: str) -> str:
    """The layer that a router's or an expert's parameter belongs to."""
    for ending in (
        ".routed_experts.router.router",
        ".routed_experts",
        ".router.router",
        ".router",
        ".experts",
    ):
        if module.endswith(ending):
            return module.removesuffix(ending)
    return module
