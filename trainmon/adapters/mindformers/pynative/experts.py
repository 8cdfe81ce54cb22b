"""Expert layers of a model: the tokens that each expert was given in a micro-batch, and the bias of its router.

The router of a layer returns, third, how many tokens each expert gets; a layer without one that does counts them in
``tokens_per_expert``, which is read before and after. What runs again in the backward pass is left out. Counts are this
rank's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trainmon.adapters.mindformers.pynative.forward import Forward
from trainmon.adapters.mindformers.pynative.settings import Layers, Place
from trainmon.adapters.mindformers.pynative.values import read_together
from trainmon.adapters.mindspore_parts.parameters import own_piece
from trainmon.events import ExpertLayer, ExpertsSeen
from trainmon.monitor import TrainMonitor

__all__ = ["ExpertCounts", "ExpertHooks", "place_of"]

_PLACES = (
    (re.compile(r"(?:.*\.)?decoder\.layers\.(\d+)\.mlp"), "decoder"),
    (re.compile(r"(?:.*\.)?mtp\.layers\.(\d+)\.transformer_layer\.mlp"), "mtp"),
    (re.compile(r"(?:.*\.)?mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.(\d+)\.mlp"), "mtp"),
)


def place_of(name: str) -> Place | None:
    """By the name of the layer's cell; None: none of those that the host has."""
    for pattern, block in _PLACES:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        numbers = [int(number) for number in match.groups()]
        if block == "decoder":
            return Place(block, -1, numbers[0])
        return Place(block, numbers[0], numbers[1] if len(numbers) > 1 else 0)
    return None


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Tokens of each expert of a layer in one micro-batch of a step, 0-based."""

    name: str
    place: Place | None
    micro: int
    counts: Any


class _Layer:
    """A cell with experts, and where it has its numbers."""

    def __init__(self, name: str, cell: Any) -> None:
        self.name, self.cell, self.place = name, cell, place_of(name)
        self.router = getattr(cell, "router", None)
        self.bias = getattr(cell, "expert_bias", None)
        self.before: Any = None
        self.routed = False

    @property
    def experts(self) -> int | None:
        counter = getattr(self.cell, "tokens_per_expert", None)
        return None if counter is None else int(counter.size)

    def counted(self) -> Any:
        counter = getattr(self.cell, "tokens_per_expert", None)
        return None if counter is None else np.array(own_piece(counter).asnumpy(), np.float64).reshape(-1)


class ExpertHooks:
    """Makes :class:`ExpertsSeen` of a step's micro-batches when it ends, and keeps the counts for records.

    Args:
        cells: the chunks of the model; the host looks at the first alone.
        records: which layers are recorded; None: none.
    """

    def __init__(
        self,
        cells: Sequence[Any],
        monitor: TrainMonitor,
        forward: Forward,
        records: Layers | None,
        addressable: bool,
    ) -> None:
        self._monitor, self._forward, self._records = monitor, forward, records
        self._addressable = addressable
        several = len(cells) > 1
        self._layers = [
            _Layer(f"{number}.{name}" if several else name, cell)
            for number, chunk in enumerate(cells)
            for name, cell in _expert_cells(chunk)
        ]
        self._handles: list[Any] = []
        self._seen: list[tuple[_Layer, int, Any]] = []
        self._on = False

    def known(self) -> list[ExpertLayer]:
        return [ExpertLayer(layer.name, layer.experts) for layer in self._layers]

    def missing(self) -> list[int]:
        """Numbers of layers of the decoder that are to be recorded and have no experts."""
        wanted = self._records and self._records.decoder
        there = {
            layer.place.layer for layer in self._layers if layer.place and layer.place.block == "decoder"
        }
        return sorted(set(wanted or ()) - there)

    @property
    def wanted(self) -> bool:
        """Whether anybody looks at experts."""
        return bool(self._layers) and (self._monitor.listens(ExpertsSeen) or self._records is not None)

    def install(self) -> None:
        if not self.wanted:
            self.remove()
        elif not self._handles:
            for layer in self._layers:
                if layer.router is not None:
                    self._handles.append(layer.router.register_forward_hook(self._after_router(layer)))
                self._handles.append(layer.cell.register_forward_pre_hook(self._before_layer(layer)))
                self._handles.append(layer.cell.register_forward_hook(self._after_layer(layer)))

    def remove(self) -> None:
        """Idempotent."""
        self._on, self._seen = False, []
        while self._handles:
            self._handles.pop().remove()

    def arm(self, recorded: bool) -> None:
        """A step begins; ``recorded``: a record may fall into it."""
        self._seen = []
        self._on = bool(self._handles) and (recorded or self._monitor.wants(ExpertsSeen))

    def step_ends(self) -> list[ExpertCounts]:
        """Hands over what was seen; returns it."""
        seen, self._seen, self._on = self._seen, [], False
        found: list[ExpertCounts] = []

        def read() -> None:
            arrays = read_together([counts for _, _, counts in seen], self._addressable)
            for (layer, micro, _), counts in zip(seen, arrays, strict=True):
                found.append(ExpertCounts(layer.name, layer.place, micro, counts.reshape(-1)))

        if seen:
            self._monitor.guard(read)
        for one in found:
            self._monitor.handle(ExpertsSeen(one.name, one.micro, len(one.counts), counts=one.counts))
        if seen and self._monitor.wants(ExpertsSeen):
            for layer in self._layers:
                if layer.bias is not None:
                    self._monitor.offer(ExpertsSeen, partial(_biased, layer))
        return found

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _looks(self) -> bool:
        return self._on and self._forward.running

    def _after_router(self, layer: _Layer) -> Callable[..., None]:
        def see(_cell: Any, _inputs: Any, output: Any) -> None:
            if self._looks():
                self._monitor.guard(lambda: self._take(layer, _counts(output, layer.experts)))

        return see

    def _before_layer(self, layer: _Layer) -> Callable[..., None]:
        def mark() -> None:
            layer.routed, layer.before = False, layer.counted() if self._addressable else None

        def see(_cell: Any, _inputs: Any) -> None:
            if self._looks():
                self._monitor.guard(mark)

        return see

    def _after_layer(self, layer: _Layer) -> Callable[..., None]:
        def count() -> None:
            now, before, layer.before = layer.counted(), layer.before, None
            if now is not None and before is not None:
                # A counter that is smaller was emptied meanwhile.
                self._seen.append(
                    (layer, self._forward.micro, _Counted(now if (now < before).any() else now - before))
                )

        def see(_cell: Any, _inputs: Any, _output: Any) -> None:
            if self._looks() and not layer.routed:
                self._monitor.guard(count)

        return see

    def _take(self, layer: _Layer, counts: Any) -> None:
        if counts is not None:
            layer.routed = True
            self._seen.append((layer, self._forward.micro, counts))


class _Counted:
    """An array that is read like a tensor."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def asnumpy(self) -> Any:
        return self._array


def _expert_cells(chunk: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in chunk.cells_and_names():
        if hasattr(cell, "tokens_per_expert"):
            yield name, cell


def _counts(output: Any, experts: int | None) -> Any:
    """The third of what a router returns, if it is one number for each expert."""
    if not isinstance(output, tuple | list) or len(output) < 3:
        return None
    counts = output[2]
    size = getattr(counts, "size", None)
    return counts if size is not None and experts in (None, size) else None


def _biased(layer: _Layer) -> ExpertsSeen:
    return ExpertsSeen(layer.name, 0, layer.experts, bias=np.array(own_piece(layer.bias).asnumpy()))
