"""The plain PyTorch loop: ``with trainmon.attach(model, optimizer) as mon`` and a few calls.

Gives: train, step, micro-batch, data and optimizer events, gradients ``reduced`` (``grads_ready`` before clipping) and
``clipped`` (when the optimizer steps). Can't give: forward and backward times, pipeline stages, evaluations unless told.
Hooks only: one before and one after the optimizer's step, and on modules where a section looks inside the model; all
gone after ``close``; nothing is patched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch

from trainmon.adapters.base import Watched, layout_from_environment
from trainmon.adapters.torch_parts.parameters import NameOf, PieceOf
from trainmon.adapters.torch_parts.shards import without_graph
from trainmon.adapters.torch_parts.watch import Watch, all_ranks, backend_for
from trainmon.backend import Backend
from trainmon.backend.determinism import reproduction
from trainmon.dist import Group
from trainmon.events import (
    ENGINE_ACTIONS,
    Action,
    AttentionSeen,
    DataBegin,
    DataEnd,
    Decision,
    ExceptionRaised,
    ExpertsSeen,
    Layout,
    MaxLogits,
    QueryKey,
    RowSums,
    TokenLosses,
    TrainBegin,
    TrainEnd,
)
from trainmon.health import TrainingStopped
from trainmon.monitor import TrainMonitor

__all__ = ["TorchLoop", "attach"]

#: What a loop can do when a rule asks for it, as long as it looks at what ``grads_ready`` and ``should_stop`` say.
ACTIONS = ENGINE_ACTIONS | {Action.SKIP_STEP, Action.STOP, Action.RAISE}


def attach(
    model: torch.nn.Module,
    optimizer: Any,
    config: Any = None,
    *,
    total_steps: int | None = None,
    resumed_step: int = 0,
    consumed_tokens: int | None = None,
    consumed_samples: int | None = None,
    backend: Literal["auto", "host", "torch"] = "auto",
    counts_tokens: bool = True,
    data_rank: int | None = None,
    stage: int = 0,
    name_of: NameOf | None = None,
    piece_of: PieceOf | None = None,
    **overrides: Any,
) -> TorchLoop:
    """Starts watching a loop; use it as a context manager, or call ``close()`` at the end.

    With several ranks, call it on all of them after ``init_process_group`` and after the model has been wrapped: values
    are then those of all ranks.

    Args:
        model: its trainable parameters give names and gradients.
        optimizer: gives learning rates, moments and the time of the update: a torch optimizer, a list of them, or a
            wrapper that holds one as ``.optimizer`` or several as ``.optimizers`` (Accelerate, torchtitan ...).
        config: path of a YAML or JSON file (a host's, with ``callbacks:``, or trainmon's own), a mapping, or None for
            the defaults.
        total_steps: last step, for progress and the time left.
        resumed_step: last step that an earlier life finished; the first step here is the next one.
        consumed_tokens, consumed_samples: what earlier lives consumed; None: what the run's own ``scalars.jsonl`` has at
            ``resumed_step``, and without one the totals are null.
        backend: ``host`` reads with the C kernels, ``torch`` computes on the tensors' device; ``auto`` takes ``host``
            if all parameters are in host memory.
        counts_tokens: whether this rank's loss, tokens and samples count. Of ranks that are fed the same tokens (tensor
            parallel) one says yes; of a pipeline's stages, one that knows the loss.
        data_rank: which part of the global batch this rank is fed, any number: ranks with equal numbers are fed the same
            tokens (tensor parallel, the stages of a pipeline). Without it, what layers see of their tokens is counted on
            the ranks with ``counts_tokens``, and on all that see a layer that none of these sees.
        stage: of the pipeline that this rank runs, from 0: of several ranks with values that are not finite, the first
            stage is the cause in forward, the last in backward.
        name_of: the name over all ranks of a parameter or module, given its name on this one: for experts or stages that
            every rank numbers from 0.
        piece_of: which piece of a parameter (name, parameter) this rank holds, for tensors that don't tell, such as
            stacked experts of an expert parallel rank: ``(first, whole)``, where it begins along the first dimension and
            the size of the whole there, or a text. Equal answers mean equal numbers; None: as the tensor says.
        **overrides: top-level configuration keys.

    Raises:
        ConfigError: the configuration is wrong, or a rule asks for what a loop can't do; nothing has begun.
        TypeError: no torch optimizer is found in ``optimizer``.
        ValueError: the ranks measure different things, or ``piece_of`` says what can't be.
    """
    monitor = TrainMonitor(config, **overrides)
    group = all_ranks(60.0 if monitor.config.health is None else monitor.config.health.timeout)
    layout = layout_from_environment() if group is None else Layout(group.rank, group.size)
    return TorchLoop(
        model,
        optimizer,
        monitor,
        TrainBegin(
            layout=replace(layout, counts_tokens=counts_tokens, data_rank=data_rank, stage=stage),
            resumed_step=resumed_step,
            total_steps=total_steps,
            consumed_tokens=consumed_tokens,
            consumed_samples=consumed_samples,
            host="torch",
            actions=ACTIONS,
            reproduction=reproduction(),
        ),
        backend_for(model, backend),
        group,
        name_of,
        piece_of,
    )


class TorchLoop(Watched):
    """A watched loop. Per step: ``micro_end`` after each backward, ``grads_ready`` before clipping, ``step_end`` last."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        monitor: TrainMonitor,
        begin: TrainBegin,
        backend: Backend,
        group: Group | None = None,
        name_of: NameOf | None = None,
        piece_of: PieceOf | None = None,
    ) -> None:
        self.monitor = monitor
        self._watch = Watch(model, optimizer, monitor, name_of, piece_of)
        self._stop = Decision()
        self._skipped = False
        self._watch.begin(begin, backend, group)
        self._begin_step(begin.resumed_step + 1)

    # -- what the loop calls ----------------------------------------------------------------------------------------

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Times the fetching of data."""
        self.monitor.handle(DataBegin(time.perf_counter()))
        try:
            yield
        finally:
            self.monitor.handle(DataEnd(time.perf_counter()))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Marks an evaluation, so that its time does not pass for a step's."""
        self._watch.evaluation(True)
        try:
            yield
        finally:
            self._watch.evaluation(False)

    def micro_end(
        self,
        loss: Any = None,
        tokens: Any = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        parts: Mapping[str, Any] | None = None,
        token_losses: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        sources: torch.Tensor | None = None,
        loss_scale: Any = None,
    ) -> None:
        """A micro-batch is through its backward pass.

        Args:
            loss: mean over ``tokens`` counted tokens (``reduction="mean"``) or their sum; any scalar, on any device.
            tokens: counted tokens; None if unknown.
            parts: named losses beside it (auxiliary, multi-token prediction), over the same tokens.
            token_losses: losses of single tokens, positions last, for ``loss.positions`` and ``loss.sources``.
            weights: of their shape, 0 for tokens that don't count.
            sources: ids of the data's sources, e.g. ``[batch, 1]``.
            loss_scale: what multiplied the loss before its backward pass; without it that of ``grads_ready`` is taken.
        """
        self._watch.micro_end(
            loss,
            tokens,
            reduction=reduction,
            parts=parts,
            token_losses=None
            if token_losses is None
            else TokenLosses(without_graph(token_losses), weights, sources),
            loss_scale=loss_scale,
        )

    def attention(self, layer: str, *, max_logit: Any, first_head: int = 0) -> None:
        """Largest logits of this call of a layer, where the model knows them itself (section ``attention``).

        Args:
            layer: its name.
            max_logit: one number for the layer, or one a head.
            first_head: which of the layer's heads on all ranks the first one is (tensor parallel).
        """
        self._attention_seen(layer, lambda: MaxLogits(without_graph(max_logit)), first_head)

    def attention_rows(self, layer: str, row_max: Any, row_sum: Any, *, first_head: int = 0) -> None:
        """What a fused kernel returns of each row: its largest logit and the sum of exp(logit - that).

        Args:
            layer: its name.
            row_max, row_sum: [..., heads, rows].
            first_head: as in :meth:`attention`.
        """
        self._attention_seen(
            layer, lambda: RowSums(without_graph(row_max), without_graph(row_sum)), first_head
        )

    def attention_qk(
        self,
        layer: str,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        q_start: int = 0,
        mask: torch.Tensor | None = None,
        first_head: int = 0,
    ) -> None:
        """What a layer's kernel is given, after rotary embeddings and norms.

        Args:
            layer: its name.
            q: [..., Hq, Sq, D].
            k: [..., Hk, Sk, D], Hq a multiple of Hk.
            scale: None is 1 / sqrt(D).
            causal: row i sees the keys up to i + ``q_start``.
            mask: what a row may see besides: bool (True: may) or added to the scores, broadcasting to [..., Hq, Sq, Sk].
            first_head: as in :meth:`attention`.
        """
        size = q.shape[-1] ** -0.5 if scale is None else scale
        self._attention_seen(
            layer,
            lambda: QueryKey(without_graph(q), without_graph(k), size, causal, q_start, without_graph(mask)),
            first_head,
        )

    def experts(
        self,
        layer: str,
        *,
        indices: Any = None,
        counts: Any = None,
        num_experts: int | None = None,
        first_expert: int = 0,
        dropped: Any = None,
        placement: Any = None,
        previous: Any = None,
    ) -> None:
        """What a mixture of experts did with this call's tokens, where its router is not found (section ``moe``).

        Args:
            layer: its name.
            indices: the experts chosen for this rank's tokens, integers of any shape.
            counts: or assignments of each expert; with ``first_expert`` those of this rank's own experts after dispatch.
            num_experts: of the layer, on all ranks; needed with ``indices`` and ``first_expert``.
            first_expert: number of the first expert in ``counts``.
            dropped: how many of the assignments were dropped.
            placement: the rank of each expert, for ``moe.placement``.
            previous: what an earlier routing of the same tokens chose, of the shape of ``indices`` [..., k].
        """
        self.monitor.offer(
            ExpertsSeen,
            lambda: ExpertsSeen(
                layer,
                self._watch.micro,
                num_experts,
                without_graph(indices),
                without_graph(counts),
                first_expert,
                without_graph(dropped),
                placement=without_graph(placement),
                previous=without_graph(previous),
            ),
        )

    def _attention_seen(
        self, layer: str, make: Callable[[], MaxLogits | RowSums | QueryKey], first_head: int
    ) -> None:
        self.monitor.offer(AttentionSeen, lambda: AttentionSeen(layer, make(), self._watch.micro, first_head))

    def grads_ready(
        self, *, clip_norm: float | None = None, loss_scale: float | None = None, grad_norm: Any = None
    ) -> Decision:
        """Gradients are final, and the optimizer has not stepped yet.

        Args:
            clip_norm: what they will be clipped to, or were if ``grad_norm`` is given.
            loss_scale: what still multiplies them.
            grad_norm: their norm before clipping, if the loop has it as a number: then rules need no read of their own.

        Returns:
            What rules say with ``health.gate: before_update``: with ``skip`` set leave the weights as they are
            (``zero_grad()`` instead of ``step()``), then call ``step_end()`` as ever. Without this gate it is never set.

        Raises:
            TrainingStopped: a rule with the action ``raise`` ends the run; on every rank at the same step.
        """
        self._watch.show_gradients("reduced", clip_norm, loss_scale, grad_norm)
        decision = self.monitor.before_update()
        self._skipped |= decision.skip
        self._obey(decision)
        return decision

    def step_end(
        self,
        loss: Any = None,
        *,
        tokens: Any = None,
        samples: Any = None,
        grad_norm: Any = None,
        overflow: Any = None,
        loss_parts: Mapping[str, Any] | None = None,
    ) -> None:
        """The step is over.

        Args:
            loss: the step's mean loss, if no micro-batch gave one.
            tokens: counted tokens, if no micro-batch gave them.
            samples: sequences in this step.
            grad_norm: the norm before clipping (``clip_grad_norm_`` returns it), if ``grads_ready`` is not called.
            overflow: whether a loss scaler skipped the update.
            loss_parts: named losses of the step, if no micro-batch gave them.

        Raises:
            TrainingStopped: a rule with the action ``raise`` ends the run; on every rank at the same step.
        """
        self._watch.step_end(
            skipped=self._skipped,
            loss=without_graph(loss),
            loss_parts=loss_parts,
            tokens=tokens,
            samples=samples,
            grad_norm=grad_norm,
            overflow=overflow,
        )
        self._begin_step(self._watch.step + 1)
        self._obey(self.monitor.decide())

    @property
    def should_stop(self) -> bool:
        """Whether a rule with the action ``stop`` has ended the run: leave the loop. It turns true on every rank at the
        same step, in ``step_end`` or ``grads_ready``."""
        return self._stop.stop

    @property
    def stop_reason(self) -> str | None:
        """Why the run should stop."""
        return self._stop.reason if self._stop.stop else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; after ``attach(resumed_step=)``. One that can't be used is said, and starts anew."""
        self.monitor.load_state_dict(state)

    def load_state(self, path: str | os.PathLike[str]) -> bool:
        """Goes on from a file of :meth:`save_state`, on any number of ranks: call it on all of them, after
        ``attach(resumed_step=)``. Rank 0 reads the file.

        Returns:
            Whether there was a state that is whole. If not, why is said, and all starts anew.
        """
        return self.monitor.load_state(path)

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that this thread has spent inside trainmon."""
        return self.monitor.overhead_ns

    def close(self) -> None:
        """Ends the run: hooks are removed, files written. Idempotent."""
        self._watch.remove_hooks()
        self.monitor.handle(TrainEnd(self._watch.step - 1, "stopped" if self._stop.stop else "completed"))
        self.monitor.close()

    def __enter__(self) -> TorchLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._watch.remove_hooks()
        self.monitor.handle(ExceptionRaised(self._watch.step, "step", error))
        self.monitor.close()

    def _obey(self, decision: Decision) -> None:
        if decision.stop:
            self._stop = decision
        if Action.RAISE in decision.actions:
            raise TrainingStopped(decision)

    def _begin_step(self, step: int) -> None:
        self._skipped = False
        self._watch.begin_step(step)
