"""Features of attention, linear and expert layers, as msProbe's older monitor has them: a few numbers a layer.

Nothing waits for a device: what is computed there is read with the step's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from trainmon.adapters.rows_parts.kinds import Failed
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_parts.shards import is_dtensor
from trainmon.backend import Backend
from trainmon.backend.base import Lazy
from trainmon.ops.attention import sampled_places

__all__ = ["FeatureHooks", "attention_features", "router_entropy", "router_similarity"]

#: Name, stage, micro-batch from 0 (-1: of the step), numbers in the order of the columns.
FeatureRow: TypeAlias = tuple[str, int, int, Lazy]
BackendOf = Callable[[torch.Tensor], Backend]

#: Query rows of each head that are read.
_ROWS = 64
_SEED = 0x6C32


class FeatureHooks:
    """Of one kind.

    Args:
        kind: ``attention_hook`` and so on.
        modules: which.
        sequence_first: q and k are [sequence, batch, heads, depth]; else [batch, sequence, heads, depth].
        backend_of: where numbers of a tensor are computed.

    Attributes:
        on: whether this step is looked at.
        rows: of the running step.
    """

    def __init__(
        self, kind: str, modules: Sequence[Named], sequence_first: bool, backend_of: BackendOf, failed: Failed
    ) -> None:
        self.on = False
        self.rows: list[FeatureRow] = []
        self.kind = kind
        self._modules, self._first, self._backend_of, self._failed = (
            modules,
            sequence_first,
            backend_of,
            failed,
        )
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._states: dict[str, Any] = {}

    def install(self) -> None:
        for named in self._modules:
            if self.kind == "attention_hook":
                self._handles.append(
                    named.thing.register_forward_pre_hook(self._before(named), with_kwargs=True)
                )
            elif self.kind == "moe_router_logit_hook":
                self._handles.append(named.thing.register_forward_hook(self._after(named)))

    def watched(self) -> str:
        return f"{len(self._modules)} modules"

    def arm(self, on: bool) -> None:
        self.on = on
        self.rows = []
        self._calls = {}

    def remove(self) -> None:
        """Idempotent."""
        self.arm(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def complete(self) -> list[FeatureRow]:
        """All rows of the step; those of weights are read now."""
        if self.kind == "linear_hook":
            self.rows += self._spectra()
        elif self.kind == "moe_router_weight_hook":
            for named in self._modules:
                weight = weight_of(named.thing)
                if weight is not None:
                    value = self._backend_of(weight).scalar(router_similarity(weight))
                    self.rows.append((named.name, named.stage, -1, value))
        return self.rows

    def _spectra(self) -> list[FeatureRow]:
        rows: list[FeatureRow] = []
        for named in self._modules:
            weight = weight_of(named.thing)
            if weight is None:
                continue
            state = self._states.get(named.name)
            backend = self._backend_of(weight)
            lazy, (after,) = backend.spectra([weight.detach()], [state], [_SEED], 0.01, 1e-6)
            self._states[named.name] = after
            rows.append((named.name, named.stage, -1, Lazy(lazy.handles, _spectral(lazy))))
        return rows

    def _before(self, named: Named) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: Any, keywords: Any) -> None:
            if not self.on or torch.compiler.is_compiling():
                return
            try:
                tensors = [one for one in (*arguments, *keywords.values()) if isinstance(one, torch.Tensor)]
                if len(tensors) < 2 or tensors[0].dim() != 4 or tensors[1].dim() != 4:
                    raise ValueError(
                        f"{named.name}: attention_hook needs q and k of four axes as first inputs"
                    )
                q, k = (one.detach().permute(*self._axes()) for one in tensors[:2])
                self._add(named, self._backend_of(q).vector(attention_features(q, k)))
            except Exception as error:
                self._failed(error)

        return hook

    def _axes(self) -> tuple[int, ...]:
        return (1, 2, 0, 3) if self._first else (0, 2, 1, 3)

    def _after(self, named: Named) -> Callable[..., None]:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if not self.on or torch.compiler.is_compiling():
                return
            try:
                logits = output[0] if isinstance(output, tuple | list) else output
                self._add(named, self._backend_of(logits).scalar(router_entropy(logits.detach())))
            except Exception as error:
                self._failed(error)

        return hook

    def _add(self, named: Named, value: Lazy) -> None:
        micro = self._calls.get(named.name, 0)
        self._calls[named.name] = micro + 1
        self.rows.append((named.name, named.stage, micro, value))


def attention_features(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Mean entropy in nats, and mean of the largest probability, of causal attention rows, over all batches and heads.

    Of each head 64 rows are read, evenly spaced.

    Args:
        q: [batch, heads, queries, depth].
        k: [batch, heads of keys, keys, depth]; the heads of q are shared among them.
    """
    with torch.no_grad():
        keys, queries = k.shape[2], q.shape[2]
        places = torch.from_numpy(sampled_places(queries, min(_ROWS, queries), _SEED)).to(q.device)
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q[:, :, places].float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.arange(keys, device=q.device) <= (places + keys - queries)[:, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        p = scores.softmax(-1)
        entropy = -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1)
        return torch.stack([entropy.double().mean(), p.amax(-1).double().mean()])


def router_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the entropy in nats of softmax over the experts, the last axis."""
    with torch.no_grad():
        log_p = logits.float().log_softmax(-1)
        p = log_p.exp()
        return -(p * log_p.clamp_min(torch.finfo(p.dtype).min)).sum(-1).double().mean()


def router_similarity(weight: torch.Tensor) -> torch.Tensor:
    """Mean cosine over pairs of experts, whose axis is the shorter one; 0 for one expert.

    With unit rows u it is (|sum u|^2 - E) / (E (E - 1)): no matrix of pairs.
    """
    with torch.no_grad():
        rows = weight.detach().double()
        rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
        experts = rows.shape[0]
        if experts < 2:
            return torch.zeros((), dtype=torch.float64, device=weight.device)
        units = rows / rows.norm(dim=1, keepdim=True)
        total: torch.Tensor = units.sum(0).square().sum()
        return (total - experts) / (experts * (experts - 1))


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """A matrix that a layer multiplies with."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    for name in ("weight", "wg"):
        found = getattr(module, name, None)
        found = getattr(found, "weight", found) if isinstance(found, nn.Module) else found
        if isinstance(found, torch.Tensor) and found.dim() == 2 and not is_dtensor(found):
            return found
    return None


def fitting(kind: str, modules: Iterable[Named], names: Sequence[str] | None) -> list[Named]:
    """The modules that a kind is of."""
    if names:
        return [one for one in modules if one.name in names]
    if kind != "linear_hook":
        return []
    return [one for one in modules if weight_of(one.thing) is not None]


def _spectral(lazy: Lazy) -> Callable[..., Any]:
    """Stable rank; its root, which msProbe calls so; spectral norm."""
    import numpy as np

    def finish(*values: Any) -> Any:
        squares, low, _ = lazy.finish(*values)[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            rank = np.float64(squares) / low
            return np.array([rank, np.sqrt(rank), np.sqrt(low)])

    return finish
