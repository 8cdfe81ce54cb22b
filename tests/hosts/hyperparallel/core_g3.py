"""What the trainers of all G3 bases share: attributes, the loop, losses over global token counts (contract 5.3, 8.3)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn

from tests.hosts.hyperparallel import config_g3
from tests.hosts.hyperparallel import model as task
from tests.hosts.hyperparallel.callbacks_g3 import ProfilingCallback, TrainerState, built_in, epochs
from tests.hosts.hyperparallel.clip import clip_grad_norm_
from tests.hosts.hyperparallel.optimizers_g3 import (
    ChainedOptimizer,
    FP32MainParamsOptimizer,
    LRSchedulersContainer,
)
from tests.hosts.hyperparallel.parallel import (
    CheckpointWrapper,
    DeviceMesh,
    data_parallel,
    destroy_distributed,
    init_distributed,
    set_gradient_sync,
)


@dataclass
class MeshContext:
    device_mesh: DeviceMesh
    dp_cp_mesh: DeviceMesh
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    dp_replicate_size: int = 1
    sequence_parallel: bool = False
    dp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0


class ModelOutputLoss(nn.Module):
    """The default `loss_fn`: the loss that the model has computed."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.loss


def get_batch(iterator: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs of the model, inputs of the loss) of the next micro-batch."""
    batch = next(iterator)
    return dict(batch), {"labels": batch["labels"]}


def token_counts(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        "foundation_tokens": torch.tensor(task.valid_labels(batch)[1]),
        "image_decoder_tokens": torch.tensor(0),
    }


class CoreTrainer:
    """A base of G3 but for what differs between its commits: the seams around the update, `add_callback`."""

    def __init__(self, config: config_g3.TrainerConfig, *, grouped: bool = True) -> None:
        self.config = config
        self.global_rank, self.world_size = init_distributed()
        self.local_rank = self.global_rank
        self.device = torch.device("cpu")
        training = config.training
        if training.enable_full_determinism:
            torch.use_deterministic_algorithms(True)
        world = distributed.group.WORLD
        tensor = config.fsdp_config.wrap == "tp"  # else all ranks are data parallel
        dp, tp = (1, self.world_size) if tensor else (self.world_size, 1)
        self.num_micro_batches = training.global_batch_size // (training.micro_batch_size * dp)
        sizes = {"dp": dp, "tp": tp, "ep": dp if config.fsdp_config.wrap.startswith("ep") else 1}
        mesh = DeviceMesh(sizes, {name: world if size > 1 else None for name, size in sizes.items()})
        ranks = {"tp_rank" if tensor else "dp_rank": self.global_rank}
        self.mesh = MeshContext(mesh, mesh["dp"], dp_size=dp, tp_size=tp, **ranks)
        self.device_mesh, self.dp_cp_mesh = mesh, self.mesh.dp_cp_mesh
        self.distributed_setup = self.mesh
        self.tokenizer = self.processor = self.model_integration = None
        self.get_batch = get_batch
        settings = task.settings(**config_g3.to_settings(config, self.num_micro_batches))
        self._build_model(settings)
        self._build_optimizer(settings)
        self.loss_fn = config.loss_fn.build() if config.loss_fn is not None else ModelOutputLoss()
        self.train_dataloader = task.loader(settings, self.mesh.dp_rank, grouped)
        self.valid_dataloader = self.test_dataloader = self.data_iterator = None
        self._count_steps(grouped)
        self.start_step = 0
        self.state = TrainerState()
        self.current_token_counts: dict[str, torch.Tensor] = {}
        self.step_token_counts: dict[str, torch.Tensor] = {}
        self.step_train_metrics: dict[str, float] = {}
        self.step_env_metrics: dict[str, float] = {}
        self._callbacks: list[Any] = built_in(self)

    def _build_model(self, settings: dict[str, Any]) -> None:
        extra = {"dtype": torch.bfloat16} if self.config.optimizer.fp32_main_params else {}
        whole = self.config.model.build(**extra)
        self.model_config = whole.config
        if self.config.fsdp_config.recompute:
            whole.moe = CheckpointWrapper(whole.moe)
        self.model = data_parallel(whole, self.config.fsdp_config.wrap, self.world_size)
        self.model_parts = getattr(self.model, "parts", None) or [self.model]
        self.hsdp_model_parts = [
            part for part in self.model_parts if hasattr(part, "set_requires_gradient_sync")
        ]

    def _build_optimizer(self, settings: dict[str, Any]) -> None:
        names, parameters = zip(*self.model.named_parameters(), strict=True)

        def chain(mine: list[nn.Parameter]) -> ChainedOptimizer:
            if not self.config.optimizer.two:
                return ChainedOptimizer({"adamw": task.adamw(settings, mine)})
            leaves = {}
            for name, embedding in (("embed", True), ("rest", False)):
                some = [p for n, p in zip(names, mine, strict=True) if ("embed" in n) is embedding]
                leaves[name] = task.adamw(settings, some)
            return ChainedOptimizer(leaves)

        if self.config.optimizer.fp32_main_params:
            self.optimizer: Any = FP32MainParamsOptimizer(list(parameters), chain)
            leaves = self.optimizer.optimizer.chained_optimizers
        else:
            self.optimizer = chain(list(parameters))
            leaves = self.optimizer.chained_optimizers
        if self.config.fsdp_config.wrap == "main_grad":
            for leaf in leaves:
                self.model.lend(leaf)
        self.lr_scheduler: Any = LRSchedulersContainer([task.warm_up(settings, leaf) for leaf in leaves])
        if self.config.optimizer.listed:
            self.optimizer = [ChainedOptimizer({"adamw": leaf}) for leaf in leaves]
            self.lr_scheduler = self.lr_scheduler.schedulers

    def _count_steps(self, grouped: bool) -> None:
        training = self.config.training
        if (training.train_iters is None) == (training.train_samples is None):
            raise config_g3.ConfigResolutionError("give exactly one of train_iters, train_samples")
        self.train_iters = (
            training.train_iters
            if training.train_iters is not None
            else training.train_samples // training.global_batch_size
        )
        try:
            length = len(self.train_dataloader)
        except TypeError:  # then exhausted data ends the training early
            self.train_steps, self.train_epochs = self.train_iters, 1
            return
        self.train_steps = length if grouped else length // self.num_micro_batches
        self.train_epochs = epochs(self.train_iters, self.train_steps)

    def after_backward(self, step: int, index: int, count: int) -> None:
        """Not the host's: after the backward pass of micro-batch `index` of `count`; a test spoils gradients here."""

    # Events: each loops the live list.

    def on_train_begin(self) -> None:
        for callback in self._callbacks:
            callback.on_train_begin(self.state)

    def on_train_end(self) -> None:
        for callback in self._callbacks:
            callback.on_train_end(self.state)

    def on_epoch_begin(self) -> None:
        for callback in self._callbacks:
            callback.on_epoch_begin(self.state)

    def on_epoch_end(self) -> None:
        for callback in self._callbacks:
            callback.on_epoch_end(self.state)

    def on_step_begin(self, **kwargs: Any) -> None:
        for callback in self._callbacks:
            callback.on_step_begin(self.state, **kwargs)

    def on_step_end(self, *, loss: float, loss_dict: dict[str, float], grad_norm: float) -> None:
        for callback in self._callbacks:
            callback.on_step_end(self.state, loss=loss, loss_dict=loss_dict, grad_norm=grad_norm)

    def on_micro_step_begin(self, micro_batch: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_micro_step_begin(self.state, micro_batch)

    def on_micro_step_end(self) -> None:
        """Nothing in the host calls it."""
        for callback in self._callbacks:
            callback.on_micro_step_end(self.state)

    # The step.

    def sync_for(self, index: int) -> None:
        """Gradients are reduced in the last micro-batch's backward pass alone."""
        if self.world_size > 1 and self.num_micro_batches > 1:
            for part in self.hsdp_model_parts:
                set_gradient_sync(part, index == self.num_micro_batches - 1)

    def forward_backward(
        self, model_inputs: dict[str, Any], labels: torch.Tensor, step: int, index: int
    ) -> dict[str, float]:
        """The micro-batch's losses by name, already global: each rank's times its tokens over the step's tokens."""
        output = self.model(**model_inputs)
        local = self.loss_fn(model_output=output, labels=labels)
        mine = self.current_token_counts["foundation_tokens"]
        total = self.step_token_counts["foundation_tokens"].clone()
        distributed.all_reduce(total)
        weighted = local * mine / total
        (weighted * self.world_size).backward()
        self.after_backward(step, index, self.num_micro_batches)
        reported = weighted.detach().clone()
        distributed.all_reduce(reported)
        return {"foundation_loss": float(reported)}

    def _clip(self) -> torch.Tensor:
        return clip_grad_norm_(self.model.parameters(), self.config.training.max_grad_norm)

    def update(self) -> float:
        """Clips, steps and zeroes; the norm before clipping. Where a replacement can be put differs between bases."""
        raise NotImplementedError

    def train_step(self, data_iterator: Any) -> None:
        """BaseTrainer's own: all data first, then on_step_begin with the step's number already up."""
        batches = next(data_iterator)
        self.state.global_step += 1
        self.on_step_begin(micro_batches=batches)
        counts = [token_counts(batch) for batch in batches]
        self.step_token_counts = {name: sum(count[name] for count in counts) for name in counts[0]}
        losses: defaultdict[str, float] = defaultdict(float)
        for index, batch in enumerate(batches):
            self.sync_for(index)
            self.current_token_counts = counts[index]
            for name, value in self.forward_backward(
                batch, batch["labels"], self.state.global_step, index
            ).items():
                losses[name] += value
        grad_norm = self.update()
        self.on_step_end(loss=sum(losses.values()), loss_dict=losses, grad_norm=grad_norm)

    def train(self) -> None:
        self.run(self.train_step)

    def run(self, train_step: Any) -> None:
        """The loop of every G3 trainer. After an exception there is no on_train_end, and the process group stays up."""
        state = self.state
        try:
            self.on_train_begin()
            for epoch in range(state.epoch, self.train_epochs):
                if state.global_step >= self.train_iters:
                    break
                self.train_dataloader.set_epoch(epoch)
                state.epoch = epoch
                self.on_epoch_begin()
                self.data_iterator = iter(self.train_dataloader)
                for _ in range(self.start_step, self.train_steps):
                    if state.global_step >= self.train_iters:
                        break
                    try:
                        train_step(self.data_iterator)
                    except StopIteration:
                        break
                self.start_step = 0
                self.on_epoch_end()
                state.epoch += 1
            self.on_train_end()
        except BaseException:
            self.abort_profilers()
            raise
        self.destroy_distributed()

    def abort_profilers(self) -> None:
        for callback in self._callbacks:
            if isinstance(callback, ProfilingCallback):
                callback.abort()

    def destroy_distributed(self) -> None:
        destroy_distributed()


class MicroMeanTrainer:
    """TextTrainer and VLMTrainer: a base inside, and the plain mean of the micro-batches' global means as the loss."""

    base_class: type[CoreTrainer]

    def __init__(self, config: config_g3.TrainerConfig) -> None:
        self.base = self.base_class(config, grouped=False)

    def train(self) -> None:
        self.base.run(self.train_step)

    def train_step(self, data_iterator: Any) -> None:
        raise NotImplementedError

    def _count(self, batch: dict[str, Any]) -> torch.Tensor:
        base = self.base
        base.current_token_counts = token_counts(batch)
        base.step_token_counts = {
            name: count * base.num_micro_batches for name, count in base.current_token_counts.items()
        }
        return base.current_token_counts["foundation_tokens"]

    def _finish(self, losses: dict[str, float]) -> None:
        base = self.base
        grad_norm = base.update()
        base.state.global_step += 1
        base.on_step_end(loss=sum(losses.values()), loss_dict=losses, grad_norm=grad_norm)


class TextLoop(MicroMeanTrainer):
    """Reads a micro-batch at a time, after on_step_begin: exhausted data may leave gradients behind."""

    sends_micro_step_begin = True

    def train_step(self, data_iterator: Any) -> None:
        base, losses = self.base, defaultdict(float)
        size = base.num_micro_batches
        ahead = [base.get_batch(data_iterator) for _ in range(size if base.config.dataset.source else 0)]
        base.on_step_begin()
        for index in range(size):
            model_inputs, loss_inputs = ahead[index] if ahead else base.get_batch(data_iterator)
            base.sync_for(index)
            count = self._count(model_inputs)
            if self.sends_micro_step_begin:
                base.on_micro_step_begin({**model_inputs, **loss_inputs, "token_count": count})
            step = base.state.global_step + 1
            for name, value in base.forward_backward(
                model_inputs, loss_inputs["labels"], step, index
            ).items():
                losses[name] += value
        self._finish(losses)


class VLMLoop(MicroMeanTrainer):
    """Reads all data of the step first."""

    def train_step(self, data_iterator: Any) -> None:
        base, losses = self.base, defaultdict(float)
        batches = [base.get_batch(data_iterator) for _ in range(base.num_micro_batches)]
        base.on_step_begin(micro_batches=[model_inputs for model_inputs, _ in batches])
        for index, (model_inputs, loss_inputs) in enumerate(batches):
            base.sync_for(index)
            self._count(model_inputs)
            step = base.state.global_step + 1
            for name, value in base.forward_backward(
                model_inputs, loss_inputs["labels"], step, index
            ).items():
                losses[name] += value
        self._finish(losses)
