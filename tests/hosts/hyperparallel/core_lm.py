"""What the trainers of G1 and G2 share: the set-up, the weights of a step's micro-batches, clipping (contract 3, 8.1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn

from tests.hosts.hyperparallel import config_lm, moe
from tests.hosts.hyperparallel import model as task
from tests.hosts.hyperparallel.clip import clip_grad_norm_, live_gradients
from tests.hosts.hyperparallel.parallel import (
    CheckpointWrapper,
    DeviceMesh,
    GroupInfo,
    ParallelDims,
    data_parallel,
    destroy_distributed,
    init_distributed,
    set_gradient_sync,
)
from tests.hosts.hyperparallel.pipeline import Schedule, stages

WHOLE_STEP = -1  # index of the micro-batch at which the pipeline's one backward pass is done


class Groups:
    """Yields up to `size` micro-batches at a time; the last group of an epoch may be shorter."""

    def __init__(self, loader: Any, size: int) -> None:
        self._iterator, self._size = iter(loader), size

    def __iter__(self) -> Groups:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        group = []
        for _ in range(self._size):
            try:
                group.append(next(self._iterator))
            except StopIteration:
                break
        if not group:
            raise StopIteration
        return group


class Sampler:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class LMTrainerCore:
    """Attributes of contract 3.3, and the arithmetic of one step; events are the generations' own."""

    def _setup(self, args: Any) -> None:
        self.args = args
        self.rank, self.world_size = init_distributed()
        self.local_rank = self.rank
        self.device = torch.device("cpu")
        settings = task.settings(**config_lm.to_settings(args))
        parallel = args.train.parallel
        if parallel.pp not in (1, self.world_size):
            raise ValueError("the fake's pipeline has one stage a rank and no data parallelism beside it")
        tp = self.world_size if parallel.wrap == "tp" else 1
        ep = self.world_size if parallel.wrap in ("ep", "ep_plain") else 1
        dp = self.world_size // parallel.pp // tp
        self.parallel_dims = ParallelDims(dp_size=dp, dp_shard=dp, pp=parallel.pp, tp=tp, ep=ep)
        world = distributed.group.WORLD
        self._dp_group_info = GroupInfo("dp", world if dp > 1 else None, dp)
        sizes = {"pp": parallel.pp, "dp": dp, "tp": tp, "ep": ep}
        self.mesh = DeviceMesh(sizes, {name: world if size > 1 else None for name, size in sizes.items()})
        whole, self.optimizer, self.lr_scheduler = task.build(settings)
        if args.model.moe == "earlier":
            moe.earlier(whole.moe)
        self.model: nn.Module = whole
        self._pp_stage_modules: list[nn.Module] = []
        self.pp_schedule: Schedule | None = None
        self.pp_has_first_stage = self.pp_has_last_stage = True
        self._grad_accum = self.pp_micro_batch_num = args.train.gradient_accumulation_steps
        if parallel.pp > 1 or parallel.pp_chunks > 1:
            mine = stages(whole, parallel.pp, parallel.pp_chunks, self.rank)
            self.model = mine[0] if len(mine) == 1 else nn.ModuleList(mine)
            self._pp_stage_modules = list(mine)
            self.pp_schedule = Schedule(mine, parallel.pp, self.rank)
            self.pp_has_first_stage = self.rank == 0
            self.pp_has_last_stage = self.rank == parallel.pp - 1
            self.optimizer = task.adamw(settings, self.model.parameters())
            self.lr_scheduler = task.warm_up(settings, self.optimizer)
        else:
            if parallel.recompute:
                whole.moe = CheckpointWrapper(whole.moe)
            self.model = data_parallel(whole, parallel.wrap, dp)
            if parallel.wrap != "hsdp":  # their parameters are others, or lend their gradients
                self.optimizer = task.adamw(settings, self.model.parameters())
                self.lr_scheduler = task.warm_up(settings, self.optimizer)
            if parallel.wrap == "main_grad":
                self.model.lend(self.optimizer)
        self.spec = SimpleNamespace(model_cls=type(whole), clip_grad_fn=None)
        self.sampler, self.collate_fn = Sampler(), None
        self.train_dataloader = task.loader(settings, self.rank if dp > 1 else 0)
        self.train_dataset = self.train_dataloader
        self._last_global_tokens = 1

    def after_backward(self, step: int, index: int, count: int) -> None:
        """Not the host's: after the backward pass of micro-batch `index` of `count`; a test spoils gradients here."""

    def _sum(self, value: float) -> float:
        """Over the combined data-parallel group, in float64."""
        if self._dp_group_info.rank_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total, group=self._dp_group_info.group)
        return float(total)

    def _train_micro_batches(self, batches: list[dict[str, Any]], step: int) -> float:
        """Forward and backward of a step; the step's loss over all ranks, which the caller gets only now."""
        counts = [task.valid_labels(batch)[0] for batch in batches]
        self._last_global_tokens = int(self._sum(max(1, sum(counts))))
        average = self.args.train.optimizer.loss_aggregation == "rank_average"
        if self.pp_schedule is not None:
            raws = self.pp_schedule.step(batches, [1] * len(batches) if average else counts)
            self.after_backward(step, WHOLE_STEP, len(batches))
            self._pp_divisor = len(batches) if average else self._last_global_tokens
        else:
            raws = []
            for index, (batch, count) in enumerate(zip(batches, counts, strict=True)):
                set_gradient_sync(self.model, index == len(batches) - 1)
                outputs = self.model(**batch)
                self._after_forward(outputs, batch)
                if average:
                    scaled = outputs.loss / len(batches)
                else:
                    scaled = outputs.loss * count / self._last_global_tokens * self.parallel_dims.dp_size
                scaled.backward()
                self.after_backward(step, index, len(batches))
                raws.append(float(outputs.loss.detach()))
                self._after_micro_batch(index, raws[-1], count)
        if average:
            return self._sum(sum(raws) / len(raws)) / self._dp_group_info.rank_size
        return self._sum(sum(r * c for r, c in zip(raws, counts, strict=True))) / self._last_global_tokens

    def _after_forward(self, outputs: Any, batch: dict[str, Any]) -> None:
        """For the generation's event."""

    def _after_micro_batch(self, index: int, loss: float, tokens: int) -> None:
        """For the generation's event."""

    def _clip(self) -> float | None:
        """The pre-clip norm; None, and no function called, when clipping is off (then a pipeline only divides)."""
        limit = self.args.train.optimizer.max_grad_norm
        if self.pp_schedule is not None:
            return self._pp_clip_grad_norm(limit)
        return float(self._non_pp_clip_grad_norm(limit)) if limit > 0 else None

    def _non_pp_clip_grad_norm(self, max_grad_norm: float) -> torch.Tensor:
        clip = self.spec.clip_grad_fn or clip_grad_norm_
        return clip(self.model.parameters(), max_grad_norm)

    @torch.no_grad()
    def _pp_clip_grad_norm(self, max_grad_norm: float) -> float | None:
        gradients = live_gradients(self.model.parameters())
        for gradient in gradients:
            gradient.div_(self._pp_divisor)
        if max_grad_norm <= 0:
            return None
        squares = sum((g.square().sum() for g in gradients), torch.zeros(()))
        if self.parallel_dims.pp_enabled:
            distributed.all_reduce(squares, group=self.mesh.get_group("pp"))
        norm = squares.sqrt()
        for gradient in gradients:
            gradient.mul_(torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0))
        return float(norm)

    def _destroy(self) -> None:
        destroy_distributed()
