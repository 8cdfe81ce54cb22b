"""One watched run of a HyperParallel trainer: what the callbacks of all generations share.

The host's hooks come in orders of their own: a step may begin and never end (the data ran out), a step may be asked for
and skipped, gradients may be left over, a save may be announced on another thread. Here that becomes steps which begin
and end.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from trainmon.adapters.base import Watched
from trainmon.adapters.hyperparallel import notices
from trainmon.adapters.hyperparallel.auxiliary import AuxiliaryLoss
from trainmon.adapters.hyperparallel.axes import axis
from trainmon.adapters.hyperparallel.batches import Batches
from trainmon.adapters.hyperparallel.checkpoints import Checkpoints
from trainmon.adapters.hyperparallel.model import Experts, chunk_names, model_of
from trainmon.adapters.hyperparallel.notices import Notice
from trainmon.adapters.hyperparallel.places import Places, places_of
from trainmon.adapters.hyperparallel.reading import max_grad_norm
from trainmon.adapters.hyperparallel.seams import Seams
from trainmon.adapters.hyperparallel.settings import HostSettings
from trainmon.adapters.hyperparallel.tied import renamed, tied_names
from trainmon.adapters.torch_parts.shards import without_graph
from trainmon.adapters.torch_parts.watch import Watch, all_ranks, backend_for
from trainmon.backend import Backend
from trainmon.backend.determinism import deterministic, reproduction
from trainmon.dist import Group
from trainmon.events import (
    ENGINE_ACTIONS,
    Action,
    DataBegin,
    DataEnd,
    Decision,
    EpochBegin,
    EpochEnd,
    ExceptionRaised,
    Layout,
    TrainBegin,
    TrainEnd,
)
from trainmon.health import TrainingStopped
from trainmon.monitor import TrainMonitor

__all__ = ["ACTIONS", "Session", "guarded"]

#: What rules may ask for in every generation.
ACTIONS = ENGINE_ACTIONS | {Action.SKIP_STEP, Action.STOP, Action.RAISE}

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """A hook out of which nothing comes but a rule's decision to end the run: not even StopIteration, which a host takes
    for the end of its data."""

    @functools.wraps(hook)
    def safe(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return hook(self, *arguments, **keywords)
        except TrainingStopped:
            raise
        except Exception as error:
            self.session.failed(error)
            return None

    return safe  # type: ignore[return-value]


class Session(Watched):
    """A run that is watched; what :func:`trainmon.attach_hyperparallel` returns.

    Attributes:
        monitor: the engine.
        generation: of the trainer's callbacks: ``g1``, ``g2`` or ``g3``.
        callback: what hangs in the trainer's list.
        seams: methods of the trainer that are replaced while it is watched.
        stops: whether the host was told to end the run.
        auxiliary: the auxiliary loss of the model's expert layers.
        checkpoints: the host's.
        batches: the running step's data, where the host does not tell of them.
        stages: of the pipeline.
    """

    def __init__(
        self,
        trainer: Any,
        generation: str,
        monitor: TrainMonitor,
        backend: Literal["auto", "host", "torch"],
        settings: HostSettings,
    ) -> None:
        self.monitor, self.generation = monitor, generation
        self._settings = settings
        self.callback: Any = None
        self.seams = Seams(trainer)
        self._trainer = weakref.ref(trainer)
        model = model_of(trainer)
        self._backend: Backend = backend_for(model, backend)
        experts = Experts(trainer, model, chunk_names(model))
        self._unknown = [] if experts.unknown is None else [experts.unknown]
        self.stages = axis(trainer, "pp")[1]
        self._tied: dict[str, str] = {}  # another stage's names of parameters that this one has too
        naming = experts.naming if self.stages == 1 else renamed(experts.naming, self._tied)
        self.watch = Watch(model, trainer.optimizer, monitor, naming, experts.piece)
        self.auxiliary = AuxiliaryLoss(model)
        self._unhang: Callable[[], None] | None = None
        self._begun = self._over = False
        self._done = 0  # the last step that has ended
        self._running = False
        self._mark: float | None = None  # when it ended
        self._asked = self._skip = self._left = False
        self._micro_seen = 0
        self._places = Places(Layout(), 1)
        self._limit: float | None = None
        self._limit_of = -1
        self.checkpoints = Checkpoints(monitor, trainer)
        self.batches = Batches(monitor)
        self._contexts = axis(trainer, "cp")[1]
        self._reads: list[tuple[float, float]] = []  # since the last step has ended
        self._release: list[Callable[[], None]] = []
        self._afterwards: list[Callable[[], None]] = []
        self._followed: list[Seams] = []
        self.stops = False

    @property
    def trainer(self) -> Any:
        """The trainer; None once it is gone."""
        return self._trainer()

    def hangs(self, callback: Any, unhang: Callable[[], None]) -> None:
        """The callback is in the host's list; ``unhang`` takes it out."""
        self.callback, self._unhang = callback, unhang

    def on_release(self, work: Callable[[], None]) -> None:
        """Is called when the run is over, to take hooks away."""
        self._release.append(work)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Is called when ``train()`` has returned, as far as that is seen."""
        self._afterwards.append(work)

    def follow(self, *trainers: Any) -> None:
        """Sees by which exception ``train()`` of one of them is left, where the host tells nobody."""

        def around(original: Callable[[], Any]) -> Any:
            try:
                returned = original()
            except BaseException as error:
                self.exception(error)
                raise
            for work in self._afterwards:
                work()
            return returned

        for trainer in trainers:
            self._followed.append(Seams(trainer))
            self._followed[-1].around("train", around, keeps=True)

    # -- the run ----------------------------------------------------------------------------------------------------

    def begin(self, done: int, total: int | None = None) -> None:
        """The run begins after ``done`` steps of earlier lives."""
        if self._begun or self._over:
            return
        self._begun = True
        self._done = done
        config = self.monitor.config
        group = all_ranks(60.0 if config.health is None else config.health.timeout)
        self._places = places_of(self.trainer, group)
        if self.stages > 1 and group is not None:
            self._find_tied(group)
        if self._settings.deterministic:
            deterministic(frameworks=("torch",), warn_only=self._settings.deterministic == "warn")
        begin = TrainBegin(
            layout=self._places.layout,
            resumed_step=done,
            total_steps=total,
            host=f"hyperparallel_{self.generation}",
            actions=ACTIONS,
            reproduction=reproduction(),
        )
        self.watch.begin(begin, self._backend, group)
        self.checkpoints.begin()
        if self.generation != "g3":  # which tells of its data itself
            self.batches.install(self.trainer)
            self.on_release(self.batches.remove)
        for level, kind, text, data in self._notices():
            self.monitor.say(level, kind, text, step=done, data=data)
        self.checkpoints.tell()

    def epoch(self, number: Any, begins: bool) -> None:
        """An epoch begins or ends."""
        if isinstance(number, int):
            self.monitor.handle(EpochBegin(number) if begins else EpochEnd(number))

    def end(self, reason: str | None = None) -> None:
        """The run is over. Idempotent."""
        if self._over:
            return
        self._over = True
        self._let_go()
        if self._begun:
            self.checkpoints.tell()
            self.checkpoints.keep()
            self.monitor.handle(TrainEnd(self._done, reason or ("stopped" if self.stops else "completed")))
            self.monitor.close()

    def exception(self, error: BaseException) -> None:
        """The host's loop was left. Idempotent."""
        if self._over:
            return
        self._over = True
        self._let_go()
        if self._begun:
            self.monitor.handle(ExceptionRaised(self.watch.step, "step", error))
            self.monitor.close()

    def failed(self, error: Exception) -> None:
        """Says what went wrong in here, once."""

        def again() -> None:
            raise error

        self.monitor.guard(again)

    def saved(self, step: int, path: Any) -> None:
        """A checkpoint was written; on any thread."""
        self.checkpoints.saved(step, path, self.running)

    def loaded(self, step: int, path: Any) -> None:
        """The host goes on from this checkpoint; before the run begins."""
        self.checkpoints.loaded(step, path)

    def evaluation(self, running: bool) -> None:
        """The host begins or ends to evaluate."""
        if self._begun:
            self.watch.evaluation(running)

    # -- the step ---------------------------------------------------------------------------------------------------

    def step_begin(self, step: int, total: int | None = None) -> None:
        """A step begins, perhaps in vain."""
        self.begin(step - 1, total)
        if self._over:
            return
        self.checkpoints.keep()
        if self.running and self.watch.step == step and not self._micro_seen:
            self.batches.step_begins()
            return  # it was begun in vain before the data ended
        self.left_over()
        self._running, self._micro_seen = True, 0
        self._asked = self._skip = self._left = False
        # What lies between two steps (data, checkpoints) is the later one's.
        self.watch.begin_step(step, self._mark)
        self.checkpoints.tell()  # of what was written since, too
        while self._reads:
            self._tell_read(*self._reads.pop(0))
        self.batches.step_begins()

    @property
    def begun(self) -> bool:
        """Whether the run has begun."""
        return self._begun

    @property
    def done_here(self) -> int:
        """The last step that has ended in this life; 0: none has."""
        return self._done if self._mark is not None else 0

    @property
    def next_step(self) -> int:
        """The step after the last one that has ended."""
        return self._done + 1

    @property
    def limit(self) -> float | None:
        """What gradients are clipped to, asked once a step; None: they are not, or it can't be told."""
        if self._limit_of != self.watch.step:
            self._limit, self._limit_of = max_grad_norm(self.trainer), self.watch.step
        return self._limit

    @property
    def skips(self) -> bool:
        """Whether rules want this step's update left out."""
        return self._skip

    @property
    def running(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._running and not self._over

    def reading(self, read: Callable[[], Any]) -> Any:
        """The host reads data, within a step or for the next one."""
        began, running = time.perf_counter(), self.running
        if running:
            self.monitor.handle(DataBegin(began))
        try:
            return read()
        finally:
            ended = time.perf_counter()
            if running:
                self.monitor.handle(DataEnd(ended))
            else:
                self._reads.append((began, ended))

    def _tell_read(self, began: float, ended: float) -> None:
        self.monitor.handle(DataBegin(began))
        self.monitor.handle(DataEnd(ended))

    def micro(self, loss: Any, tokens: Any) -> None:
        """A micro-batch is through."""
        if self.running:
            self._micro_seen += 1
            config = self.monitor.config.loss
            auxiliary = self.auxiliary.of_micro_batch() if config is not None and config.parts else None
            self.watch.micro_end(loss, tokens, parts=None if auxiliary is None else {"aux": auxiliary})

    def reduced(self, clip_norm: float | None) -> None:
        """Gradients are final and not clipped."""
        if self.running:
            self.watch.show_gradients("reduced", clip_norm)

    def before_update(self, clip_norm: float | None, grad_norm: Any, clipped: bool = True) -> Decision:
        """Gradients are as the optimizer gets them.

        Args:
            grad_norm: before clipping, if the host knows it.
            clipped: whether they were clipped.

        Returns:
            what rules have decided; asked once a step.
        """
        if not self.running:
            return Decision()
        watch, grad_norm = self.watch, without_graph(grad_norm)
        if not (watch.shown or clipped):
            watch.show_gradients("reduced", clip_norm)
        else:
            watch.show_clipped(clip_norm, grad_norm)
        if self._asked:
            return Decision()
        self._asked = True
        decision = self.monitor.before_update()
        self._skip |= decision.skip
        return decision

    def step_end(self, step: int, *, skipped: bool = False, **facts: Any) -> Decision:
        """A step has ended; returns what rules have decided."""
        if not self.running:
            return Decision()
        self._running = False
        self._done, self._mark = step, time.perf_counter()
        facts = {name: without_graph(value) for name, value in facts.items()}
        samples = facts.setdefault("samples", self.batches.samples)
        if samples is not None and self._contexts > 1:
            facts["samples"] = samples / self._contexts  # a share of each sequence
        self.batches.step_ends()
        if not self._micro_seen:
            facts["tokens"] = self._tokens_without_micros(facts.get("tokens"))
        else:
            facts.pop("tokens", None)
        # The rate at this point is the next step's: that of this one came with the gradients.
        self.watch.step_end(skipped=skipped or self._skip, learning_rates=None, **facts)
        self.checkpoints.keep()
        self.checkpoints.step_ends(step)
        return self.monitor.decide()

    def stop(self, decision: Decision) -> None:
        """Carries out what ends a run where raising is the only way; the same on every rank.

        Raises:
            TrainingStopped: the rules say so.
        """
        if decision.stop:
            error = TrainingStopped(decision)
            self.exception(error)
            raise error

    def drop_gradients(self) -> bool:
        """Lets the coming update change nothing: an optimizer passes over parameters without gradients. False: gradients
        are summed where that does not help."""
        parameters = self.watch.parameters
        if parameters.sums_apart():
            self.monitor.say(
                "warning",
                "step_not_skipped",
                "a step was to be skipped, but gradients are in main_grad, which can't be taken from the optimizer",
                step=self.watch.step,
            )
            return False
        for parameter in parameters.updated():
            parameter.grad = None
        return True

    def left_over(self) -> None:
        """Says once that a step was left after some of its micro-batches."""
        if not (self.running and self._micro_seen) or self._left:
            return
        self._left = True
        left = any(parameter.grad is not None for parameter in self.watch.parameters.parameters)
        text = f"step {self.watch.step} was left after {self._micro_seen} micro-batches (the data ended)"
        if left:
            text += "; its gradients are still there and add to the next step's, its loss does not"
        self.monitor.say("warning" if left else "info", "step_left", text, step=self.watch.step)

    # -- what the user may call -------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Takes everything away: the callback, replaced methods, hooks; closes the files. Idempotent, on each rank for
        itself. Not from within a hook of the trainer."""
        if self._unhang is not None:
            self._unhang()
            self._unhang = None
        self.end("detached")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state instead of the one in the host's checkpoint; before ``train()``, on every rank. One that
        can't be used is said, and all starts anew."""
        self.checkpoints.given = True
        self.monitor.load_state_dict(state)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Goes on from the state in a file when the run begins, instead of the one in the host's checkpoint; rank 0 reads
        it for all: to be called on every rank. One that can't be used is said, and all starts anew."""
        self.checkpoints.given = True
        self.monitor.load_state(path)

    # -- within -----------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        self._running = False
        self.seams.undo()
        for seams in self._followed:
            seams.undo()
        while self._release:
            self._release.pop()()
        self.watch.remove_hooks()

    def _notices(self) -> Iterator[Notice]:
        yield from notices.unknown([*self._places.unknown, *self._unknown])
        yield from notices.tied(self._tied)
        yield from notices.settings(self._settings)
        if not self._done and self.checkpoints.resumed is None:
            yield from notices.not_resumed(self.trainer, self.generation)
        if self.monitor.config.moe is not None:
            layers = len(self.watch.inside.observed.experts)
            yield from notices.dropless(layers, model_of(self.trainer))

    def _find_tied(self, group: Group) -> None:
        parameters, first = self.watch.parameters, getattr(self.trainer, "pp_has_first_stage", None)
        named = list(zip(parameters.names, parameters.parameters, strict=True))
        first = first if isinstance(first, bool) else axis(self.trainer, "pp")[0] == 0
        self._tied.update(tied_names(model_of(self.trainer), named, first, group))
        parameters.refresh()  # lists anew, by these names

    def _tokens_without_micros(self, tokens: Any) -> Any:
        """A pipeline shows no micro-batches, and the host's count is of all ranks: one of those that count has it."""
        layout = self._places.layout
        if tokens is None:
            return None
        if layout.data_rank is None and self._places.unknown:
            return tokens / self._places.feeds  # each part's share
        first = layout.rank == 0 if layout.data_rank is None else layout.data_rank == 0
        return tokens if first else 0
