"""What attention layers are given: q and k of every call of ``scaled_dot_product_attention``, scores of every softmax.

Some modules are taken for attention layers by their children (q and k projections, or a fused one). While such a module
runs in a step that is looked at, a torch function mode is on that looks at two functions: so q and k are those of the
kernel, after rotary embeddings and norms, with its mask and scale, whatever model it is. Nothing of the computation
changes. ``nn.MultiheadAttention``, whose inside the mode can't see, has q and k projected once more.

Not seen: kernels that are called by other names (they hand over row sums or logits: ``TorchLoop.attention_rows``),
modules inside torch.compile, evaluation, and what checkpointing repeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainmon.adapters.torch_parts.modules import is_repeated, within
from trainmon.adapters.torch_parts.shards import detached, local, start_along
from trainmon.events import AttentionLayer, AttentionSeen, MaxLogits, QueryKey, Scores
from trainmon.monitor import TrainMonitor

__all__ = ["AttentionHooks", "TrackedLogits", "attention_layers"]

#: Children that make a module an attention layer: all of one of the lists.
_CHILDREN = (
    *(("q_proj", "k_proj"), ("wq", "wk"), ("to_q", "to_k"), ("query", "key"), ("q_lin", "k_lin")),
    *(
        ("linear_q", "linear_k"),
        ("q", "k"),
        ("q_b_proj", "kv_b_proj"),
        ("q_proj", "kv_b_proj"),
        ("wq_b", "wkv_b"),
    ),
    *(("qkv",), ("c_attn",), ("qkv_proj",), ("Wqkv",), ("wqkv",), ("query_key_value",), ("linear_qkv",)),
    *(("to_qkv",), ("in_proj_qkv",), ("W_pack",)),
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax)


def attention_layers(
    modules: Mapping[str, nn.Module], named: Sequence[re.Pattern[str]] | None
) -> dict[str, nn.Module]:
    """The innermost modules that are attention layers: by their children, and by name."""

    def is_one(name: str, module: nn.Module) -> bool:
        if isinstance(module, nn.MultiheadAttention) or any(p.search(name) for p in named or ()):
            return True
        children = {child for child, _ in module.named_children()}
        return any(children.issuperset(wanted) for wanted in _CHILDREN)

    inner = {name: within(module) for name, module in modules.items()}
    found = {name: module for name, module in inner.items() if is_one(name, module)}
    outer = {name for name in found for other in found if other.startswith(f"{name}.")}
    return {name: module for name, module in found.items() if name not in outer}


class AttentionHooks:
    """Makes :class:`AttentionSeen` of the calls of attention layers.

    Attributes:
        on: whether this step is looked at.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], monitor: TrainMonitor, micro: Callable[[], int]
    ) -> None:
        self.on = False
        self._layers, self._monitor, self._micro = layers, monitor, micro
        self._handles: list[Any] = []
        self._open: list[_Watch] = []

    def known(self) -> list[AttentionLayer]:
        return [_known(name, module) for name, module in self._layers.items()]

    def install(self) -> None:
        for name, module in self._layers.items():
            before, after = self._hooks(name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Idempotent."""
        self.on = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if torch.compiler.is_compiling() or not self.on or not module.training or is_repeated():
                return
            if isinstance(module, nn.MultiheadAttention):
                self._monitor.offer(
                    AttentionSeen,
                    lambda: AttentionSeen(name, _projected(module, arguments, keywords), self._micro()),
                )
                return
            watch = _Watch(module, lambda logits, first: self._emit(name, module, logits, first))
            watch.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(watch)

        def after(module: nn.Module, _arguments: Any, _output: Any) -> None:  # also when the module raises
            if torch.compiler.is_compiling():
                return
            if self._open and self._open[-1].module is module:
                self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        return before, after

    def _emit(self, name: str, module: nn.Module, logits: QueryKey | Scores, first_head: int | None) -> None:
        def make() -> AttentionSeen:
            heads = (logits.q if isinstance(logits, QueryKey) else logits.values).shape[-3]
            first = _first_head(module, heads) if first_head is None else first_head
            return AttentionSeen(name, logits, self._micro(), first)

        self._monitor.offer(AttentionSeen, make)


Emit = Callable[["QueryKey | Scores", "int | None"], None]


class _Watch(TorchFunctionMode):
    """Looks at what attention is made of, and lets it be."""

    def __init__(self, module: nn.Module, emit: Emit) -> None:
        super().__init__()
        self.module, self._emit = module, emit

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if torch.compiler.is_compiling():  # a compiled function within: traced as if this were not here
            return function(*arguments, **keywords)
        if function is functional.scaled_dot_product_attention:
            self._products(*arguments, **keywords)
        elif function in _SOFTMAX:
            self._scores(*arguments, **keywords)
        return function(*arguments, **keywords)

    def _products(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: Any = None,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_others: Any,
    ) -> None:
        if query.is_meta or query.shape[-2] == 0 or key.shape[-2] == 0:
            return
        first_head = start_along(query, -3)
        q, k = detached(query), detached(key)
        if q.ndim == 3:  # no heads
            q, k = q.unsqueeze(-3), k.unsqueeze(-3)
        mask = None if attn_mask is None else detached(attn_mask)
        size = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        self._emit(QueryKey(q, k, size, is_causal, 0, mask), first_head)

    def _scores(self, input: torch.Tensor, dim: Any = None, *_others: Any, **_more: Any) -> None:
        if (
            input.ndim >= 4
            and dim in (-1, input.ndim - 1)
            and input.is_floating_point()
            and not input.is_meta
        ):
            self._emit(Scores(detached(input)), start_along(input, -3))


_ARGUMENTS = (
    *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights"),
    "is_causal",
)


def _projected(module: nn.MultiheadAttention, arguments: Any, keywords: Any) -> QueryKey:
    """q and k of ``nn.MultiheadAttention``, projected as it does."""
    given = {**dict(zip(_ARGUMENTS, arguments, strict=False)), **keywords}
    if module.bias_k is not None or module.add_zero_attn:
        raise NotImplementedError(
            "nn.MultiheadAttention with added keys (add_bias_kv, add_zero_attn) is not seen"
        )
    with torch.no_grad():
        width, heads = module.embed_dim, module.num_heads
        bias: torch.Tensor | None = module.in_proj_bias
        weight: torch.Tensor | None = module.in_proj_weight
        q_bias, k_bias = (None, None) if bias is None else (bias[:width], bias[width : 2 * width])
        if weight is not None:
            q_weight, k_weight = weight[:width], weight[width : 2 * width]
        else:
            q_weight, k_weight = module.q_proj_weight, module.k_proj_weight
        q = functional.linear(given["query"].detach(), q_weight, q_bias)
        k = functional.linear(given["key"].detach(), k_weight, k_bias)
        if q.ndim == 2:  # no batch
            q, k = q.unsqueeze(0), k.unsqueeze(0)
        elif not module.batch_first:
            q, k = q.transpose(0, 1), k.transpose(0, 1)
        q, k = (x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2) for x in (q, k))
        mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
        causal = bool(given.get("is_causal"))  # then the mask, which must be there, says the same
        allowed = None
        if mask is not None and not causal:
            allowed = _allows(mask)
            allowed = allowed if allowed.ndim == 2 else allowed.view(-1, heads, *allowed.shape[1:])
        if padding is not None:
            real = _allows(padding)
            real = (real if real.ndim == 2 else real[None])[:, None, None, :]
            allowed = real if allowed is None else allowed & real
    return QueryKey(q, k, 1 / math.sqrt(q.shape[-1]), causal, 0, allowed)


def _allows(mask: torch.Tensor) -> torch.Tensor:
    """In nn.MultiheadAttention True means: may not."""
    return ~mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _known(name: str, module: nn.Module) -> AttentionLayer:
    for place in (module, getattr(module, "config", None)):
        for attribute in _HEADS:
            heads = getattr(place, attribute, None)
            if isinstance(heads, int):
                return AttentionLayer(name, heads)
    return AttentionLayer(name)


def _first_head(module: nn.Module, heads: int) -> int:
    """The place of this rank's heads among all, while the module runs: read off the first parameter that is cut along its
    rows (tensor parallel; what FSDP cuts is whole now)."""
    for parameter in module.parameters():
        start = start_along(parameter, 0)
        if start is not None and parameter.shape[0] > local(parameter).shape[0] > 0:
            return round(start / local(parameter).shape[0] * heads)
    return 0


class TrackedLogits:
    """Largest logits that modules keep as a buffer or attribute of a certain name, read at the end of a step."""

    def __init__(
        self, modules: Mapping[str, nn.Module], names: Sequence[re.Pattern[str]], monitor: TrainMonitor
    ) -> None:
        self._modules, self._names, self._monitor = modules, names, monitor

    def poll(self, micro: int) -> None:
        """Shows what is there now; the host empties it."""
        for layer, module in self._modules.items():
            for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
                if _is_number(value) and any(pattern.search(name) for pattern in self._names):
                    self._show(layer, value, micro)

    def _show(self, layer: str, value: Any, micro: int) -> None:
        if isinstance(value, torch.Tensor):
            value = detached(value)
        self._monitor.offer(AttentionSeen, lambda: AttentionSeen(layer, MaxLogits(value), micro))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and not value.is_meta and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)
