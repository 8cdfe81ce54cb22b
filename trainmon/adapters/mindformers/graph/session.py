"""One run of the GRAPH trainer: what its step returns and leaves behind, as events.

Over a run of ``Model.train`` it knows the trainer's divisions of the loss, the squares of gradients that a step may
return, dumped files, separate losses, and what the model keeps of attention and experts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore
from mindspore import nn

from trainmon.adapters.mindformers.graph.attention import AttentionHooks
from trainmon.adapters.mindformers.graph.dumps import Dumped, DumpReader
from trainmon.adapters.mindformers.graph.early import EarlyLook
from trainmon.adapters.mindformers.graph.facts import Facts
from trainmon.adapters.mindformers.graph.host_config import HostConfig
from trainmon.adapters.mindformers.graph.inside import Inside, real_model
from trainmon.adapters.mindformers.graph.losses import SeparateLosses
from trainmon.adapters.mindformers.graph.norm_check import NormCheck
from trainmon.adapters.mindformers.graph.norms import returned_sums, sums_of_norms
from trainmon.adapters.mindformers.graph.settings import HostSettings
from trainmon.adapters.mindspore_parts.outputs import number, read_outputs
from trainmon.adapters.mindspore_parts.parameters import OptimizerView
from trainmon.adapters.mindspore_parts.session import Session
from trainmon.backend.mindspore import CompiledSums
from trainmon.dist import Group
from trainmon.events import (
    Action,
    AttentionSeen,
    Decision,
    ExpertsSeen,
    GradientAccumulated,
    GradsReady,
    Layout,
    Observed,
    StepEnd,
    TensorView,
)
from trainmon.frame import Snapshot
from trainmon.health import TrainingStopped
from trainmon.monitor import TrainMonitor

__all__ = ["GraphSession"]

#: Steps whose lists are kept for lines: with several ranks these come a step late.
_KEPT = 4
_RATES = ("current_default_lr", "current_grouped_lr")


class _Optimizer(OptimizerView):
    """Its rate comes with what a step returns: a schedule that is asked here would be compiled for it."""

    def rates(self, ago: int = 0) -> dict[str, float]:
        return {}


class GraphSession(Session):
    """A run that is watched.

    Attributes:
        facts: of the trainer's configuration.
        local_losses: by step, those of micro-batches by part, as far as the graph has left them in files.
        logits: by step, largest logits by layer: this rank's heads.

    Args:
        host: the trainer's configuration, as it is when training begins.
        settings: what of it is followed.
        own: our callback, which has its place among the host's.
        replaces: whether it stands where the host's own monitor would.
    """

    optimizer_view = _Optimizer

    def __init__(
        self,
        monitor: TrainMonitor,
        params: Any,
        resumed_step: int | None,
        clips: bool | None,
        host: HostConfig,
        settings: HostSettings,
        own: Any,
        replaces: bool = False,
    ) -> None:
        self.facts, self.settings = Facts.of(host), settings
        self._sequence = host.number("model.model_config.seq_length", 0)
        cell = params.train_network
        kinds = {kind.__name__ for kind in type(cell).__mro__}
        self._pipeline_cell = "MFPipelineWithLossScaleCell" in kinds
        self._trainers_cell = "MFTrainOneStepCell" in kinds
        self._returns_squares = bool(getattr(cell, "local_norm", False)) and not self._pipeline_cell
        self._initial: Any = params.get("initial_step")
        self._squares: list[CompiledSums | None] | None = None
        self._dumped: Dumped | None = None
        self.local_losses: dict[int, Mapping[str, list[float]]] = {}
        self.logits: dict[int, Mapping[str, Any]] = {}
        self._loss_parts: dict[str, float] = {}
        shape = host.number("parallel_config.expert_parallel", 1)
        experts = host.number("moe_config.expert_num", host.number("model.model_config.num_experts", 0))
        heads = _rank() % self.facts.tensor_parallel
        self.inside = Inside(params.get("network") or cell, heads, experts // shape)
        compiled = mindspore.get_context("mode") == mindspore.GRAPH_MODE
        model = real_model(params.get("network") or cell)
        self._attention = None if compiled else AttentionHooks(model, monitor)
        undefined = ("aux",) if host.get("model.model_config.moe_aux_loss_coeff") == 0 else ()
        self._separate = SeparateLosses(self.facts.divisor, undefined, resets=replaces)
        dumps = settings.dump_path or mindspore.get_auto_parallel_context("dump_local_norm_path")
        self._dumps = DumpReader(Path(dumps) / f"rank_{_rank()}", take=replaces) if dumps else None
        super().__init__(monitor, params, resumed_step, clips, "mindformers")
        self._left: str | None = None  # why the step that was looked at last is to be left
        self._norm_check = None if settings.norm_limit is None else self._check_norms(settings.norm_limit)
        self._early = EarlyLook(params.get("list_callback") or (), own, self._look_early)
        if settings.precision_sync and mindspore.get_context("deterministic") != "ON":
            text = "train_precision_sync is on, but MindSpore's deterministic mode is not: call trainmon.deterministic()"
            self._tell_once("warning", "not_deterministic", text)
        if self._pipeline_cell and getattr(cell, "local_norm", False):
            self._tell_once(
                "info",
                "pipeline_squares",
                "the pipeline's training cell returns norms of placeholders, not of gradients: they are left out",
            )
        if (
            mindspore.get_context("mode") == mindspore.GRAPH_MODE
            and self.monitor.config.attention is not None
        ):
            self._tell_once(
                "info",
                "attention_sums",
                "a compiled attention layer shows its largest logits at most: how much softmax spreads them "
                "(attention/mean_sum) is null",
            )

    def _layout(self, group: Group | None) -> Layout:
        rank, world = (_rank(), _world()) if group is None else (group.rank, group.size)
        stage = rank // max(world // self.facts.stages, 1)
        return Layout(rank, world, counts_tokens=self.facts.has_loss(rank, world), stage=stage)

    def _host_config(self) -> dict[str, Any]:
        found = super()._host_config()
        return {**found, "followed": list(self.settings.taken), "loss_divisor": self.facts.divisor}

    def _resumed(self, told: int | None) -> int:
        if told is not None or isinstance(self._params.get("initial_step"), int):
            return super()._resumed(told)
        batches = int(self._params.get("batch_num") or 0)
        return self.facts.steps_before(batches, self._sinks) or super()._resumed(None)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return _world()

    def observe(self) -> Observed:
        hooked = [] if self._attention is None else self._attention.layers()
        return Observed(attention=[*hooked, *self.inside.attention()], experts=self.inside.experts())

    def install(self, step: int) -> None:
        super().install(step)
        if self._attention is not None:
            self._attention.install()

    def _find_reducer(self, plain: bool) -> nn.Cell | None:
        """The trainer's own cell takes off the loss scale and the number of tokens first, and clips afterwards."""
        reducer = getattr(self._cell, "grad_reducer", None)
        known = self._trainers_cell and not self._pipeline_cell and isinstance(reducer, nn.Cell)
        return reducer if known else super()._find_reducer(plain)

    def _needs_hooks(self) -> bool:
        """What a step returns are this rank's own."""
        return not self._returns_squares or (_world() > 1 and self._reducer is not None)

    def _clip_limit(self) -> float | None:
        return self.facts.clip_limit

    # -- the step ---------------------------------------------------------------------------------------------------

    def step_begin(self) -> None:
        initial = self._params.get("initial_step")
        if initial != self._initial and isinstance(initial, int):  # the host has gone back to another step
            self._initial, self._base = initial, initial
        if not self.over:
            self._early.begin()
            if self._attention is not None:
                self._attention.begin()
        super().step_begin()

    def _look_up(self) -> None:
        """The rate comes with what the step returns."""
        self._rates = {}
        scale = getattr(self._cell, "scale_sense", None)
        self._scale = number(scale) if scale is not None else None

    def _look_back(self) -> None:
        self._rates, self._scale = {}, None

    def step_end(self) -> Decision:
        self._early.now()
        check, running = self._norm_check, self._running and not self.over
        if check is not None and running:
            self.monitor.guard(lambda: self._look_at_norm(check))
        decision = super().step_end()
        self.monitor.guard(self._after)
        left, self._left = self._left, None
        if left is not None and not decision.stop:
            # Not the run's end: the host may go back to an earlier step, and on.
            raise TrainingStopped(Decision(self.step, frozenset({Action.RAISE}), left))
        return decision

    def _check_norms(self, limit: float) -> NormCheck:
        directory, rank = self.monitor.summary().directory, _rank()

        def say(text: str) -> None:
            self._tell_once("warning", "abnormal_norms", f"{text} (training goes on)")

        check = NormCheck(limit, directory, self._base > 0, rank == 0, say)
        self.monitor.read_by(lambda frame: self._look_at_frame(check, frame))
        return check

    def _look_at_norm(self, check: NormCheck) -> None:
        """The host's own norm, which all ranks have as soon as the step is over."""
        norm = read_outputs(self._params.get("net_outputs")).grad_norm
        if norm is not None:
            self._left = check.look(self.step, norm)

    def _look_at_frame(self, check: NormCheck, frame: Snapshot) -> None:
        """Where the host has none, as it doesn't clip: with several ranks a step later."""
        if read_outputs(self._params.get("net_outputs")).grad_norm is None:
            self._left = check.look(frame.step, frame.scalars.get("grad/norm"))

    def _look_early(self) -> None:
        if self.over or not self._running:
            return
        self.monitor.guard(self._read_left)
        config, self.inside.logits = self.monitor.config, {}
        if self.monitor.wants(AttentionSeen):
            self.inside.show_attention(self.monitor, config.selection("attention").__contains__)
        if self.monitor.wants(ExpertsSeen):
            self.inside.show_experts(self.monitor, config.selection("moe").__contains__)
        self.logits[self.step] = self.inside.logits
        for kept in (self.logits, self.local_losses):
            while len(kept) > _KEPT:
                kept.pop(next(iter(kept)))

    def _read_left(self) -> None:
        """What the step has left in parameters and files."""
        self._loss_parts = self._separate.read()
        dumped = [] if self._dumps is None else self._dumps.steps()
        self._dumped = dumped[-1] if dumped else None
        if self._dumped is not None and self._dumped.local_losses:
            self.local_losses[self.step] = self._dumped.local_losses
            means = {f"local_{part}": sum(v) / len(v) for part, v in self._dumped.local_losses.items()}
            self._loss_parts.update(means)

    def _after(self) -> None:
        self._separate.after()
        self.inside.after()

    def _show_sums(self) -> None:
        self._squares = None
        outputs = self._params.get("net_outputs")
        if self._returns_squares:
            self._squares = returned_sums(outputs, self._parameters.order)
        squares = self._squares
        if self._compiled is not None:
            super()._show_sums()
        elif squares is not None and self._by_sums and self._world == 1 and self.monitor.wants(GradsReady):
            self._show(lambda: self._view_of(squares), "reduced", None)
        if self.monitor.wants(GradientAccumulated):
            self._show_local(self._local_sums() if squares is None else squares)

    def _local_sums(self) -> list[CompiledSums | None]:
        """Where a step returns no squares: those of files, else those of hooks without the loss scale."""
        if self._dumped is not None and self._dumped.local_norms:
            return sums_of_norms(self._dumped.local_norms, self._parameters.names)
        if self._compiled is None or (self._reducer is not None and self._world > 1):
            return []  # behind a reducer they are those of all ranks
        scale = self._backward_scale() or 1.0
        return [
            None if one is None else replace(one, square=one.square / scale**2)
            for one in self._compiled.read()
        ]

    def _show_local(self, sums: list[CompiledSums | None]) -> None:
        for name, one in zip(self._parameters.names, sums, strict=False):
            if one is not None:
                self.monitor.handle(GradientAccumulated(0, name, one))

    def _view_of(self, sums: list[CompiledSums | None]) -> TensorView:
        pairs = [pair for pair in zip(self._parameters.names, sums, strict=True) if pair[1] is not None]
        names = [name for name, _ in pairs]
        return TensorView(names, [one for _, one in pairs], self._parameters.shards(names))

    def _facts(self, end: float) -> StepEnd:
        found = super()._facts(end)
        loss = found.loss
        if loss is not None:
            loss = loss / self.facts.divisor if self.facts.has_loss(_rank(), _world()) else None
        rates = self._grouped_rates() or found.learning_rates
        return replace(
            found,
            loss=loss,
            loss_parts={**found.loss_parts, **self._loss_parts},
            learning_rates=rates,
            tokens=found.samples * self._sequence if found.samples and self._sequence else None,
        )

    def _grouped_rates(self) -> dict[str, float]:
        """Where parameters have rates of their own, the graph leaves them in the host's register."""
        register = getattr(
            sys.modules.get("mindformers.utils.parameter_register"), "parameter_register", None
        )
        known = {} if register is None else dict(register.items())
        if any(name not in known for name in _RATES):
            return {}
        default, grouped = (known[name].asnumpy().reshape(-1).tolist() for name in _RATES)
        return {"default": float(default[0]), **{f"group_{i}": float(rate) for i, rate in enumerate(grouped)}}

    def _samples(self) -> int | None:
        """Of a step on all ranks, as the host counts them, in equal parts."""
        if self.facts.global_batch:
            return self.facts.global_batch // max(self._world, 1) or None
        return super()._samples()

    def exception(self, error: BaseException) -> None:
        """Of another callback it may be, at the end of a step that is not written yet."""
        if self._running and not self.over and self._early.seen:
            with contextlib.suppress(TrainingStopped):  # the host's own goes on
                super().step_end()
        super().exception(error)

    def _let_go(self) -> None:
        super()._let_go()
        self.monitor.guard(self._early.remove)
        if self._attention is not None:
            self.monitor.guard(self._attention.remove)


def _rank() -> int:
    from mindspore.communication import GlobalComm, get_rank

    return int(get_rank()) if GlobalComm.INITED else 0


def _world() -> int:
    from mindspore.communication import GlobalComm, get_group_size

    return int(get_group_size()) if GlobalComm.INITED else 1
