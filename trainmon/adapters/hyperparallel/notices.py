"""What is said of a trainer when its run begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from trainmon.adapters.hyperparallel.reading import checkpoint_wanted
from trainmon.adapters.hyperparallel.settings import HostSettings

__all__ = ["Notice", "dropless", "not_resumed", "settings", "tied", "unknown"]

#: Level, kind, text, facts.
Notice = tuple[Literal["info", "warning"], str, str, "Mapping[str, Any] | None"]


def unknown(texts: Sequence[str]) -> Iterator[Notice]:
    """What of this rank's place could not be told, and what that makes uncertain."""
    for text in texts:
        yield "warning", "place_unknown", text, None


def tied(names: Mapping[str, str]) -> Iterator[Notice]:
    """Parameters that another stage has too."""
    for own, other in names.items():
        yield (
            "info",
            "tied_parameters",
            f"{own} is {other} of the first stage, tied: it counts once, as that",
            None,
        )


def settings(found: HostSettings) -> Iterator[Notice]:
    """What of the host's own sections is followed, and what isn't."""
    if found.taken:
        text = f"the host's own settings are followed: {', '.join(found.taken)}"
        yield "info", "host_settings", text, {"config": found.config}
    for problem in found.problems:
        yield "warning", "host_settings", f"not followed: {problem}", None


def not_resumed(trainer: Any, generation: str) -> Iterator[Notice]:
    """A checkpoint that can't be loaded is a warning to the host, and training begins anew."""
    wanted = checkpoint_wanted(trainer)
    if wanted is None:
        return
    text = f"the host was to go on from {wanted}, but has loaded nothing: training begins at step 0"
    if generation != "g3":
        text += ", perhaps with weights of the checkpoint"
    yield "info" if wanted == "LATEST" else "warning", "not_resumed", text, None


def dropless(layers: int, model: torch.nn.Module) -> Iterator[Notice]:
    """Why a share of dropped tokens is nowhere: no layer of experts drops any, or counts what it drops."""
    if layers and not any("drop" in name for name, _ in model.named_buffers()):
        text = f"moe/drop_rate is not published: routing is dropless ({layers} layers of experts, none counts drops)"
        yield "info", "dropless", text, None
