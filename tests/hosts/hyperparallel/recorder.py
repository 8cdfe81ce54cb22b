"""Records what a callback sees in a trainer, in the form of the recorded traces (traces/README.md)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLOCK = ("step_time", "tokens_per_sec")


class Recording:
    """The events of one rank's run, each with the trainer's state at that moment."""

    def __init__(self, generation: str, directory: Path, settings: dict[str, Any]) -> None:
        self.generation, self.directory, self.settings = generation, directory, settings
        self.events: list[dict[str, Any]] = []
        self.trainer: Any = None  # the inner one; set once there is one
        self.raised: BaseException | None = None  # by a callback's behaviour

    def encode(self, value: Any) -> Any:
        """JSON: tensors become dtype and shape (and value, if one number), other objects their class."""
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, (str, Path)):
            return str(value).replace(str(self.directory), "<dir>")
        if isinstance(value, torch.Tensor):
            told: dict[str, Any] = {
                "tensor": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
            }
            return told if value.dim() else {**told, "value": self.encode(value.item())}
        if isinstance(value, BaseException):
            return {"exception": type(value).__name__}
        if isinstance(value, dict):
            return {key: "varies" if key in CLOCK else self.encode(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.encode(one) for one in value]
        return {"object": type(value).__name__}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name.removeprefix("module."): p for name, p in self.trainer.model.named_parameters()}

    def moment(self) -> dict[str, Any]:
        """What every event carries."""
        trainer, parameters = self.trainer, list(self.parameters().values())
        moe = next(m for m in trainer.model.modules() if hasattr(m, "tokens_per_expert"))
        told = {
            "global_step": trainer.state.global_step,
            "epoch": trainer.state.epoch,
            "grads": self._alive([p.grad for p in parameters]),
            "lr": {
                "optimizer": [group["lr"] for group in trainer.optimizer.param_groups],
                "scheduler": list(trainer.lr_scheduler.get_last_lr()),
            },
            "tokens_per_expert": [int(count) for count in moe.tokens_per_expert],
            "expert_bias": moe.expert_bias.tolist(),
        }
        if self.settings["fp32_main_params"]:
            told["main_grads"] = self._alive([p.main_param.grad for p in parameters])
        if threading.current_thread() is not threading.main_thread():
            told["thread"] = "worker"
        return told

    def _alive(self, gradients: list[torch.Tensor | None]) -> dict[str, Any]:
        live = [g for g in gradients if g is not None]
        told = {"alive": len(live), "of": len(gradients)}
        return {**told, "norm": self.encode(norm(live))} if live else told

    def near_clip(self) -> dict[str, Any]:
        """Each parameter's norm and its non-finite elements."""
        gradients = {name: p.grad for name, p in self.parameters().items() if p.grad is not None}
        bad = {name: int((~torch.isfinite(g)).sum()) for name, g in gradients.items()}
        bad = {name: count for name, count in bad.items() if count}
        told: dict[str, Any] = {"param_grad_norms": {n: self.encode(norm([g])) for n, g in gradients.items()}}
        return {**told, "nonfinite_elements": bad} if bad else told

    def add(
        self, cb: str | None, kind: str, name: str, args: Any = (), kwargs: Any = None, **more: Any
    ) -> None:
        event = {"cb": cb, "kind": kind, "name": name, **self.moment(), **more}
        if args:
            event["args"] = self.encode(list(args))
        if kwargs is not None:
            event["kwargs"] = self.encode(kwargs)
        self.events.append(event)

    def seam(self, name: str, kwargs: Any = None, **more: Any) -> None:
        self.add(None, "seam", name, (), kwargs, **more)

    def pointer(self) -> int | None:
        path = self.directory / "out" / "latest_checkpoint_iteration.txt"
        return int(path.read_text("utf-8")) if path.exists() else None

    def hook(self, cb: str, name: str, state: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An event that a callback got; `state` is the hook's first argument."""
        more: dict[str, Any] = {}
        if self.generation == "G1":
            more = {
                "substep_info": self.encode(state.substep_info),
                "log_history_len": len(state.log_history),
            }
            close = name == "on_pre_optimizer_step"
        elif self.generation == "G2":
            more = {"context": self._context(state)}
            close = name in ("on_after_grad_sync", "on_before_optimizer_step")
        else:
            close = False
            if self.settings["save_steps"] > 0:
                more["latest_pointer"] = self.pointer()
            if name == "on_step_end":
                metrics = self.trainer.step_env_metrics
                more["metrics"] = self.encode(
                    {k: v for k, v in metrics.items() if not k.startswith("performance/")}
                )
        if close:
            more |= self.near_clip()
        self.add(cb, "hook", name, args, kwargs, **more)

    def _context(self, context: Any) -> dict[str, Any]:
        state = context.state
        return {
            "rank": context.rank,
            "world_size": context.world_size,
            "logs": sorted(context.logs),
            "control": [f for f in vars(context.control) if f != "metadata" and getattr(context.control, f)],
            "state_lr": state.lr,
            "is_training": state.is_training,
            "resume_step": state.resume_step,
            "consumed_tokens": state.consumed_tokens,
            "log_history_len": len(state.log_history),
        }

    def final(self) -> dict[str, Any]:
        weights = self.parameters()
        told = self.moment()
        told.pop("main_grads", None)
        told["process_group_alive"] = torch.distributed.is_initialized()
        told["weights_norm"] = self.encode(norm(list(weights.values())))
        told["param_norms"] = {name: self.encode(norm([p])) for name, p in weights.items()}
        told["nonfinite_parameters"] = [n for n, p in weights.items() if not torch.isfinite(p).all()]
        if self.settings["save_steps"] > 0:
            root = self.directory / "out"
            files = sorted(str(f.relative_to(root)) for f in root.rglob("*") if f.is_file())
            told["checkpoint_files"] = files
            if self.generation != "G3":
                told["saved_state"] = {d.name: saved_state(d) for d in sorted(root.glob("step_*"))}
        return told


def norm(tensors: list[torch.Tensor]) -> float:
    """L2 over all elements, in float64."""
    return float(sum(float((t.detach().double() ** 2).sum()) for t in tensors) ** 0.5)


def saved_state(directory: Path) -> dict[str, Any]:
    """What G1's and G2's files of rank 0 say of the moment at which they were written; {} for a failed save."""
    import json

    if not (directory / "extra_state.json").exists():
        return {}
    try:
        extra = json.loads((directory / "extra_state.json").read_text("utf-8"))
    except ValueError:
        extra = None
    moments = torch.load(directory / "optimizer_rank0.pt")["state"]
    return {
        "extra_state": extra,
        "optimizer_steps": int(moments[0]["step"]),
        "scheduler_steps": torch.load(directory / "scheduler.pt")["last_epoch"],
        "loader": torch.load(directory / "dataloader_rank0.pt"),
    }


def wrapped(
    recording: Recording, owner: Any, name: str, before: Callable[..., None], after: Any = None
) -> None:
    """Replaces a method on the instance by one that records around it."""
    call = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        returned = call(*args, **kwargs)
        if after is not None:
            after(returned)
        return returned

    setattr(owner, name, replacement)


def watch_seams(recording: Recording) -> None:
    """Records at the seams of contract 6, beside the callbacks. Results are the same without."""
    trainer, seam = recording.trainer, recording.seam
    clip = {"G1": "_non_pp_clip_grad_norm", "G3": "prepare_optimizer_step"}.get(recording.generation)
    if clip is not None:
        wrapped(
            recording,
            trainer,
            clip,
            lambda *_: seam("before_clip", **recording.near_clip()),
            lambda returned: seam("after_clip", {"returned": returned}),
        )
        if hasattr(trainer.model, "set_requires_gradient_sync"):
            wrapped(
                recording,
                trainer.model,
                "set_requires_gradient_sync",
                lambda on: seam("gradient_sync", {"on": on}),
            )
    if recording.settings["fp32_main_params"]:
        wrapped(recording, trainer.optimizer.optimizer, "step", lambda: seam("inner_optimizer_step"))
    wrapped(recording, trainer.optimizer, "step", lambda: seam("optimizer_step"))
    if recording.generation == "G3":
        trainer.loss_fn.register_forward_hook(
            lambda _, args, kwargs, output: seam("loss_fn", _loss_seen(trainer, args, kwargs, output)),
            with_kwargs=True,
        )
        for callback in trainer._callbacks:
            if type(callback).__name__ == "CheckpointerCallback":
                wrapped(
                    recording,
                    callback,
                    "_save",
                    lambda **kwargs: seam("save_begins", kwargs),
                    lambda _: seam("save_returns", latest_pointer=recording.pointer()),
                )


def _loss_seen(trainer: Any, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> dict[str, Any]:
    return {
        "local_loss": output.item(),
        "current_tokens": int(trainer.current_token_counts["foundation_tokens"]),
        "step_tokens": int(trainer.step_token_counts["foundation_tokens"]),
        "keywords": sorted(kwargs),
        "positional": len(args),
    }
