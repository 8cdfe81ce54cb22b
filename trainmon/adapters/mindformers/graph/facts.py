"""How the trainer cuts a step up: what divides its losses, and where a run goes on."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore

from trainmon.adapters.mindformers.graph.host_config import HostConfig

__all__ = ["Facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one run.

    Attributes:
        divisor: of the loss that a step returns, and of its parts.
        stages: of the pipeline.
        last_loss: whether only the last stage has a loss; else only rank 0 (zero_bubble_v).
        epochs, steps_per_epoch: as the host counts them; 0: not told.
        initial_epoch, initial_step: where the run goes on.
        global_batch: samples of a step, of all ranks; 0: not told.
        clip_limit: the norm to which gradients are clipped; None: they aren't.
        tensor_parallel: ranks that share a layer's heads.
    """

    divisor: int = 1
    stages: int = 1
    last_loss: bool = True
    epochs: int = 0
    steps_per_epoch: int = 0
    initial_epoch: int = 0
    initial_step: int = 0
    global_batch: int = 0
    clip_limit: float | None = None
    tensor_parallel: int = 1

    @classmethod
    def of(cls, host: HostConfig) -> Facts:
        """Those of the host's configuration once its trainer has completed it."""
        stages = int(mindspore.get_auto_parallel_context("pipeline_stages"))
        per_token = host.flag("calculate_per_token_loss")
        divisor = host.number("micro_batch_interleave_num", 1)
        if not per_token:
            divisor *= host.number("runner_config.gradient_accumulation_steps", 1)
            if stages > 1:
                divisor *= host.number("parallel_config.micro_batch_num", 1)
        limit = host.get("runner_wrapper.max_grad_norm", 1.0)
        clips = host.flag("runner_wrapper.use_clip_grad") and isinstance(limit, int | float)
        schedule = mindspore.get_auto_parallel_context("pipeline_scheduler")
        return cls(
            divisor=divisor,
            stages=stages,
            last_loss=schedule != "zero_bubble_v",
            epochs=host.number("runner_config.origin_epochs", host.number("runner_config.epochs", 0)),
            steps_per_epoch=host.number("data_size", 0),
            initial_epoch=host.number("runner_config.initial_epoch", 0),
            initial_step=host.number("runner_config.initial_step", 0),
            global_batch=host.global_batch or host.number("runner_config.global_batch_size", 0),
            clip_limit=float(limit) if clips else None,
            tensor_parallel=host.number("parallel_config.model_parallel", 1),
        )

    def has_loss(self, rank: int, world: int) -> bool:
        """Whether this rank's loss means anything: with a pipeline only one stage's does."""
        if self.stages <= 1:
            return True
        return rank // max(world // self.stages, 1) == self.stages - 1 if self.last_loss else rank == 0

    def steps_before(self, batches: int, sinks: bool) -> int:
        """Steps of earlier lives. Outside of sink mode the host takes its step within the epoch from ``initial_step``,
        and the epoch from ``initial_epoch``."""
        if sinks or not batches:
            return self.initial_step
        return self.initial_epoch * batches + self.initial_step % batches
