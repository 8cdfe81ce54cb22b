"""The checkpoints of G1 and G2 (contract 12.1): a directory a step, no marker, no rename, nothing atomic.

The bytes of `_rank<r>_.safetensors` are torch's: no reader of the real format will take them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

FORGIVEN = (OSError, RuntimeError, ValueError)  # a failed save or load with one of these is a warning


def save_weights(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # by name, torch would want the real format
        torch.save(state, file)


def load_weights(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return torch.load(file)


class Writer:
    """Writes one checkpoint of the trainer as it is now. A test may replace `model` to let saves fail."""

    def model(self, path: Path, trainer: Any) -> None:
        save_weights(trainer.model.state_dict(), path)

    def __call__(self, directory: Path, trainer: Any, extra_state: dict[str, Any]) -> None:
        rank = trainer.rank
        directory.mkdir(parents=True, exist_ok=True)
        self.model(directory / f"_rank{rank}_.safetensors", trainer)
        (directory / f".rank{rank}_metadata").write_text("{}", "utf-8")
        torch.save(trainer.optimizer.state_dict(), directory / f"optimizer_rank{rank}.pt")
        if rank == 0:
            torch.save(trainer.lr_scheduler.state_dict(), directory / "scheduler.pt")
            (directory / "extra_state.json").write_text(json.dumps(extra_state), "utf-8")
        torch.save(torch.get_rng_state(), directory / f"rng_rank{rank}.pt")
        if hasattr(trainer.train_dataloader, "state_dict"):
            torch.save(trainer.train_dataloader.state_dict(), directory / f"dataloader_rank{rank}.pt")


def load(directory: Path, trainer: Any) -> dict[str, Any]:
    """Restores the trainer but its state, and returns the saved state; the weights come first.

    Raises:
        OSError, ValueError and what torch raises: perhaps with the weights, already loaded, left in place.
    """
    rank = trainer.rank
    if not directory.is_dir():
        raise FileNotFoundError(directory)
    trainer.model.load_state_dict(load_weights(directory / f"_rank{rank}_.safetensors"))
    extra_state = json.loads((directory / "extra_state.json").read_text("utf-8"))
    trainer.optimizer.load_state_dict(torch.load(directory / f"optimizer_rank{rank}.pt"))
    trainer.lr_scheduler.load_state_dict(torch.load(directory / "scheduler.pt"))
    torch.set_rng_state(torch.load(directory / f"rng_rank{rank}.pt"))
    loader = directory / f"dataloader_rank{rank}.pt"
    if loader.exists() and hasattr(trainer.train_dataloader, "load_state_dict"):
        trainer.train_dataloader.load_state_dict(torch.load(loader))
    return extra_state
