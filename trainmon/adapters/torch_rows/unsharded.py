"""Gradients under FSDP before the ranks reduce them: of the whole parameters, which modules have while they run.

FSDP2 gives its modules gathered parameters, FSDP1 views of its flat ones. What autograd sends there is this rank's own
gradient of the micro-batch; what comes of it after backward has been reduced, and only that is summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_rows.gradients import GradientHooks

__all__ = ["UnshardedHooks"]


class UnshardedHooks(GradientHooks):
    """Hooks on the modules that have parameters of their own.

    Args:
        modules: all of the model.
        parameters, more: as :class:`GradientHooks` has them.
    """

    def __init__(
        self, modules: Sequence[Named], parameters: Sequence[Named], *given: Any, **more: Any
    ) -> None:
        super().__init__(parameters, *given, sharded=True, **more)
        of = {named.name: named.thing for named in modules}
        self._owners: dict[nn.Module, list[tuple[str, Named]]] = {}
        for named in parameters:
            prefix = "" if named.stage < 0 else f"{named.stage}:"
            path, _, own = named.name.removeprefix(prefix).rpartition(".")
            owner = of.get(prefix + path)
            if owner is not None:
                self._owners.setdefault(owner, []).append((own, named))
        self._hooked: Any = WeakIdKeyDictionary()  # whole parameters: their handles

    def install(self) -> None:
        if not self._installed:
            self._model_handles = [
                owner.register_forward_pre_hook(self._before(held)) for owner, held in self._owners.items()
            ]
        self._installed = True

    def watched(self) -> str:
        return f"{sum(map(len, self._owners.values()))} parameters"

    def remove(self) -> None:
        super().remove()
        for handle in list(self._hooked.values()):
            handle.remove()
        self._hooked.clear()

    def _before(self, held: Sequence[tuple[str, Named]]) -> Callable[..., None]:
        def hook(module: nn.Module, _arguments: Any) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            try:
                for own, named in held:
                    whole = getattr(module, own, None)
                    if isinstance(whole, torch.Tensor) and whole.requires_grad and whole not in self._hooked:
                        self._hooked[whole] = whole.register_hook(self._on_own(named))  # type: ignore[no-untyped-call]
            except Exception as error:
                self._failed(error)

        return hook
