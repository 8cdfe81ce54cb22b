"""Clipping as HyperParallel's core does it on plain tensors (contract 3.1, 7)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as distributed


def live_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that an update would use: `main_grad` where there is one, else `grad`."""
    found = (
        getattr(p, "main_grad", None) if getattr(p, "main_grad", None) is not None else p.grad
        for p in parameters
    )
    return [gradient for gradient in found if gradient is not None]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales the live gradients in place to at most `max_norm`, and returns their norm before that, in their dtype.

    A non-finite norm isn't an error: it spoils every gradient, as it does in the host.
    """
    parameters = list(parameters)
    gradients = live_gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    cut = [i for i, g in enumerate(gradients) if any(p.is_shard() for p in getattr(g, "placements", ()))]
    cut += [i for i, p in enumerate(parameters) if hasattr(p, "expert_group")]  # a rank's own experts
    norms = torch.stack([torch.linalg.vector_norm(g) for g in local])
    norm = torch.linalg.vector_norm(norms)
    if cut:  # all over the same ranks; what every rank has whole counts once
        pieces = norms[cut].square().sum()
        first = gradients[cut[0]]
        group = (
            first.device_mesh.get_group()
            if hasattr(first, "device_mesh")
            else parameters[cut[0]].expert_group
        )
        distributed.all_reduce(pieces, group=group)
        norms[cut] = 0
        norm = (norms.square().sum() + pieces).sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in local:
        gradient.mul_(factor)
    return norm
