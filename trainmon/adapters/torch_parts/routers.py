"""What the routers of mixtures of experts decide, and what layers count themselves.

A layer is a module with a child ``experts`` and a router beside it (``gate``, ``router``, ``wg``). What a router returns
tells how to read it: integers [tokens, k] are the experts chosen, a bool map [tokens, E] marks them, E integers are
counts; of logits [tokens, E] alone the k largest are taken, which is the choice unless the layer adds something to them:
only where the layer counts nothing itself. Where no router is found, called or understood, buffers such as
``tokens_per_expert`` are read before and after the layer runs, so that it does not matter who empties them when, nor what
checkpointing counts again; those of 16 bits are not, since they stop counting at 256 (float16 at 2048). Of a layer inside
torch.compile, whose hooks are not called, they are read when a micro-batch ends and before the weights are updated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainmon.adapters.torch_parts.modules import is_repeated, tensors_in, within
from trainmon.adapters.torch_parts.shards import detached
from trainmon.events import ExpertLayer, ExpertsSeen
from trainmon.monitor import TrainMonitor

__all__ = ["ExpertHooks", "MoeLayer", "moe_layers"]

_ROUTERS = ("router", "gate", "wg", "gating", "gate_network")
_COUNTS = (
    "num_experts",
    "n_routed_experts",
    "num_total_experts",
    "moe_num_experts",
    "n_experts",
    "num_local_experts",
)
_CHOSEN = (
    "top_k",
    "topk",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "n_activated_experts",
    "k",
)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """A mixture of experts in a model.

    Attributes:
        router: None: not found, or its hooks would not be called.
        experts, chosen: E and k; None if the modules don't tell.
        counters, biases: places of buffers and parameters: module and attribute.
        hookable: whether hooks on the layer are called.
    """

    name: str
    module: nn.Module
    router: nn.Module | None
    experts: int | None
    chosen: int | None
    counters: tuple[tuple[nn.Module, str], ...] = ()
    biases: tuple[tuple[nn.Module, str], ...] = ()
    hookable: bool = True


def moe_layers(
    modules: Mapping[str, nn.Module],
    compiled: Mapping[str, nn.Module],
    *,
    routers: Sequence[re.Pattern[str]],
    counters: Sequence[re.Pattern[str]],
    biases: Sequence[re.Pattern[str]],
) -> list[MoeLayer]:
    """The mixtures of experts among modules by name.

    Args:
        modules: whose hooks are called.
        compiled: whose hooks are not called: only their buffers can be looked at.
        routers: names of further routers; the layer is then the module that the router belongs to.
        counters, biases: names of buffers (and parameters) within a layer.
    """
    found: dict[str, tuple[nn.Module, nn.Module | None]] = {}
    everything = {name: within(module) for name, module in {**modules, **compiled}.items()}
    for name, module in everything.items():
        children = dict(module.named_children())
        router = next((children[child] for child in _ROUTERS if child in children), None)
        held = next(_own(module, counters, False), None) is not None
        routed = "experts" in children and router is not None
        inner = any(name.startswith(f"{layer}.") for layer in found)
        if routed or (held and not inner):
            found[name] = module, router
        if any(pattern.search(name) for pattern in routers):
            parent = name.rpartition(".")[0]
            found[parent or name] = everything.get(parent, module), module
    return [
        MoeLayer(
            name=name,
            module=module,
            router=router if name in modules else None,
            experts=_rows(router) or _number(_COUNTS, router, module) or _length(module),
            chosen=_number(_CHOSEN, router, module),
            counters=tuple(_places(module, counters, False)),
            biases=tuple(_places(module, biases, True)),
            hookable=name in modules,
        )
        for name, (module, router) in found.items()
    ]


class ExpertHooks:
    """Makes :class:`ExpertsSeen` of what routers return and layers count.

    Attributes:
        on: whether this step is looked at.
    """

    def __init__(
        self, layers: Sequence[MoeLayer], monitor: TrainMonitor, micro: Callable[[], int], *, hooks: bool
    ) -> None:
        self.on = False
        self._layers, self._monitor, self._micro, self._hooked = layers, monitor, micro, hooks
        self._handles: list[Any] = []
        self._misread: set[str] = set()
        self._routed: set[str] = set()  # layers whose routers were understood: their counters are not needed
        self._counters = {layer.name: _Counter(layer) for layer in layers if _counts(layer)}
        self._too_short = [layer for layer in layers if layer.counters and layer.name not in self._counters]

    def known(self) -> list[ExpertLayer]:
        return [ExpertLayer(layer.name, layer.experts) for layer in self._layers]

    def install(self) -> None:
        for layer in self._layers:
            if layer.router is not None and self._hooked:
                self._handles.append(layer.router.register_forward_hook(self._after(layer)))
            if layer.name in self._counters and layer.hookable:
                before, after = self._around(layer.name)
                self._handles.append(layer.module.register_forward_pre_hook(before))
                self._handles.append(layer.module.register_forward_hook(after))

    def remove(self) -> None:
        """Idempotent."""
        self.on = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def arm(self, on: bool) -> None:
        """A step begins: the counters of compiled layers are read from where they stand now."""
        self.on = on
        if on and self._too_short:
            self._say_too_short()
        for counter in self._counters.values() if on else ():
            if not counter.hookable:
                counter.mark()

    def _say_too_short(self) -> None:
        (first, *others), self._too_short = self._too_short, []
        name = first.counters[0][1]
        more = f" (and of {len(others)} other layers)" if others else ""
        self._monitor.say(
            "warning",
            "counter_too_short",
            f"{name} of {first.name}{more} has 16 bits, perhaps by a cast of the whole model: it stops counting after "
            "a few hundred tokens and is not read; keep it in float32",
            step=self._monitor.step,
        )

    def poll(self) -> None:
        """What compiled layers have counted since the last call, or since the step began; before somebody empties it."""
        for name, counter in self._counters.items() if self.on else ():
            if not counter.hookable:
                self._monitor.offer(ExpertsSeen, partial(self._counted, name, counter))

    def step_ends(self) -> None:
        """The last counts, and the routers' biases."""
        self.poll()
        for layer in self._layers if self.on else ():
            for module, attribute in layer.biases:
                self._monitor.offer(ExpertsSeen, partial(self._biased, layer, module, attribute))

    def _biased(self, layer: MoeLayer, module: nn.Module, attribute: str) -> ExpertsSeen:
        bias = detached(getattr(module, attribute))
        return ExpertsSeen(layer.name, self._micro(), experts=layer.experts, bias=bias)

    def _counted(self, name: str, counter: _Counter) -> ExpertsSeen | None:
        counts = counter.take()
        return None if counts is None else ExpertsSeen(name, self._micro(), counts=counts)

    def _after(self, layer: MoeLayer) -> Callable[..., None]:
        def hook(module: nn.Module, _arguments: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self.on or not module.training or is_repeated():
                return
            self._monitor.offer(ExpertsSeen, lambda: self._read(layer, output))

        return hook

    def _around(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def looks(module: nn.Module) -> bool:
            return not torch.compiler.is_compiling() and self.on and module.training and not is_repeated()

        def before(module: nn.Module, _arguments: Any) -> None:
            if name not in self._routed and looks(module):
                self._monitor.guard(self._counters[name].mark)

        def after(module: nn.Module, _arguments: Any, _output: Any) -> None:
            if name not in self._routed and looks(module):
                self._monitor.offer(ExpertsSeen, partial(self._counted, name, self._counters[name]))

        return before, after

    def _read(self, layer: MoeLayer, output: Any) -> ExpertsSeen | None:
        # A layer that counts knows better than logits: it may add a bias to them, or choose among groups first.
        routing = _routing(output, layer.experts, layer.chosen, logits=layer.name not in self._counters)
        if routing is not None:
            what, tensor = routing
            chosen = {"indices": None, "counts": None} | {what: tensor}
            self._routed.add(layer.name)
            return ExpertsSeen(layer.name, self._micro(), layer.experts, chosen["indices"], chosen["counts"])
        if layer.name not in self._misread and layer.name not in self._counters:
            self._misread.add(layer.name)
            self._monitor.say(
                "warning",
                "router_not_understood",
                f"the router of {layer.name} returns nothing that tells the experts chosen: hand them over with "
                "mon.experts(), or name a counter (moe.counters)",
                step=self._monitor.step,
            )
        return None


class _Counter:
    """Buffers of a layer that count tokens, and what they held when they were last looked at."""

    def __init__(self, layer: MoeLayer) -> None:
        self.hookable = layer.hookable
        self._places = layer.counters
        self._before: list[torch.Tensor] = []

    def _now(self) -> list[torch.Tensor]:
        return [detached(getattr(module, name)) for module, name in self._places]

    def mark(self) -> None:
        self._before = [tensor.clone() for tensor in self._now()]

    def take(self) -> torch.Tensor | None:
        """Assignments since then."""
        total: torch.Tensor | None = None
        for now, before in zip(self._now(), self._before, strict=False):
            # One that is smaller was emptied; what it holds came since.
            counts = torch.where((now < before).any(), now, now - before).reshape(-1)
            total = counts if total is None else total + counts
        self.mark()
        return total


def _counts(layer: MoeLayer) -> bool:
    """Whether the layer has counters, and they can hold what they count."""
    buffers = [getattr(module, name) for module, name in layer.counters]
    return bool(buffers) and not any(b.is_floating_point() and b.element_size() < 4 for b in buffers)


def _routing(
    output: Any, experts: int | None, chosen: int | None, *, logits: bool
) -> tuple[str, torch.Tensor] | None:
    """What a router's output says of the choice: ``indices`` or ``counts``, detached; ``logits``: by those alone, too."""
    tensors = [detached(tensor) for tensor in tensors_in(output)]
    whole = [t for t in tensors if not t.is_floating_point() and not t.is_complex() and not t.is_meta]
    for tensor in whole:
        if tensor.ndim >= 2 and tensor.dtype != torch.bool and (chosen is None or tensor.shape[-1] == chosen):
            return "indices", tensor
    for tensor in whole:
        if tensor.ndim >= 2 and tensor.shape[-1] == experts:
            return "counts", tensor.reshape(-1, tensor.shape[-1]).sum(0)
    for tensor in whole:
        if tensor.ndim == 1 and tensor.shape[0] == experts and tensor.dtype != torch.bool:
            return "counts", tensor
    for tensor in tensors if logits else ():
        if tensor.is_floating_point() and tensor.ndim >= 2 and tensor.shape[-1] == experts and chosen:
            return "indices", tensor.topk(chosen, dim=-1).indices
    return None


def _number(names: Sequence[str], *modules: nn.Module | None) -> int | None:
    for module in modules:
        for place in (module, getattr(module, "config", None)):
            for name in names:
                value = getattr(place, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None


def _rows(router: nn.Module | None) -> int | None:
    """A router's matrix has a row for each expert."""
    weight = getattr(router, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _length(module: nn.Module) -> int | None:
    experts = getattr(module, "experts", None)
    return len(experts) if isinstance(experts, nn.ModuleList | nn.ModuleDict) else None


def _places(
    module: nn.Module, patterns: Sequence[re.Pattern[str]], parameters: bool
) -> Iterator[tuple[nn.Module, str]]:
    for child in module.modules():
        for name in _own(child, patterns, parameters):
            yield child, name


def _own(module: nn.Module, patterns: Sequence[re.Pattern[str]], parameters: bool) -> Iterator[str]:
    """Buffers of the module itself by name, and parameters if they are asked for."""
    named = module.named_parameters(recurse=False) if parameters else ()
    for name, _ in (*module.named_buffers(recurse=False), *named):
        if any(pattern.search(name) for pattern in patterns):
            yield name
