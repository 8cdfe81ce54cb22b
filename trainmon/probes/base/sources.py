"""Which copy of the weights is looked at: the optimizer's master copies where it keeps some, or the model's own."""

from __future__ import annotations

from typing import Literal

from trainmon.events import TensorView, TrainBegin

__all__ = ["Source", "weights_of"]

Source = Literal["auto", "master", "model"]


def weights_of(begin: TrainBegin, source: Source) -> tuple[TensorView, int]:
    """The weights, live, and how many of them are master copies.

    Args:
        source: ``model``: the model's own; ``master``: those of which the optimizer keeps a copy of its own to update,
            that copy; ``auto``: that copy where there is one, the model's own otherwise.
    """
    masters = TensorView((), ())
    if source != "model" and begin.optimizer is not None:
        masters = begin.optimizer.masters()
    if source == "master" or begin.model is None:
        return masters, len(masters)
    view = begin.model.weights()
    if not len(masters):
        return view, 0
    held = dict(zip(masters.names, masters.tensors, strict=True))
    tensors = [held.get(name, own) for name, own in zip(view.names, view.tensors, strict=True)]
    return TensorView(view.names, tensors, view.shards), len(held)
