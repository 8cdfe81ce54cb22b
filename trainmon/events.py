"""The events of a training run: the only thing that adapters and the engine share.

A host adapter turns whatever its trainer does into these; the engine and the probes know nothing else of the host.
Steps are 1-based (the step about to run, or running), micro-batches 0-based, times are ``time.perf_counter()``
seconds, so that a wall clock that is set back changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

__all__ = [
    "ENGINE_ACTIONS",
    "Action",
    "AdamStep",
    "AttentionLayer",
    "AttentionSeen",
    "BackwardEnd",
    "DataBegin",
    "DataEnd",
    "Decision",
    "EpochBegin",
    "EpochEnd",
    "EvalBegin",
    "EvalEnd",
    "Event",
    "ExceptionRaised",
    "ExpertLayer",
    "ExpertsSeen",
    "Flow",
    "ForwardEnd",
    "GradientAccumulated",
    "GradsReady",
    "Host",
    "Layout",
    "Load",
    "MaxLogits",
    "MicroEnd",
    "MicroGradient",
    "ModuleSeen",
    "Observed",
    "OptimizerBegin",
    "OptimizerEnd",
    "OptimizerView",
    "Phase",
    "QueryKey",
    "RowSums",
    "Save",
    "Scores",
    "ShardInfo",
    "StepBegin",
    "StepEnd",
    "TensorView",
    "TokenLosses",
    "TrainBegin",
    "TrainEnd",
]

Phase = Literal["unreduced", "reduced", "clipped"]
#: What passes a module: forward, and its gradients backward.
Flow = Literal["input", "output", "grad_input", "grad_output"]


class Action(StrEnum):
    """What a rule may ask for. One list for rules, decisions and adapters."""

    LOG = "log"
    NOTIFY = "notify"
    SKIP_STEP = "skip_step"
    SKIP_DATA = "skip_data"
    SAVE = "save"
    MARK_UNHEALTHY = "mark_unhealthy"
    PROFILE = "profile"
    STOP = "stop"
    RAISE = "raise"
    ROLLBACK = "rollback"


#: Actions that need nothing from a host.
ENGINE_ACTIONS = frozenset({Action.LOG, Action.NOTIFY, Action.MARK_UNHEALTHY})


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules ask of the host, the same on every rank at the same point of its program.

    Attributes:
        step: the step that was judged.
        actions: what is to be done.
        reason: why, in a sentence.
    """

    step: int = 0
    actions: frozenset[Action] = frozenset()
    reason: str = ""

    @property
    def skip(self) -> bool:
        """Whether weights must not be updated with the gradients at hand."""
        return bool(self.actions & {Action.SKIP_STEP, Action.STOP, Action.RAISE})

    @property
    def stop(self) -> bool:
        """Whether the run ends here."""
        return bool(self.actions & {Action.STOP, Action.RAISE})


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Over which mesh axes a tensor is cut and how many ranks hold the same piece, so that norms add up once.

    Attributes:
        sharded: names of the axes along which ranks hold disjoint pieces.
        replicas: number of ranks that hold this very piece; 0: not told yet.
        owner: whether this rank is the one that contributes it (coordinate 0 on every replica axis).
        start: where the piece begins in the whole tensor, along each dimension; None: unknown, or this is the whole.
        whole: shape of the whole tensor; None with ``start``.
        apart: of an optimizer's state: the piece is not where the rank's piece of the parameter is.
        placed: False: a piece of a larger tensor, and nobody said where in it.
    """

    sharded: tuple[str, ...] = ()
    replicas: int = 1
    owner: bool = True
    start: tuple[int, ...] | None = None
    whole: tuple[int, ...] | None = None
    apart: bool = False
    placed: bool = True


WHOLE = ShardInfo()


@dataclass(frozen=True, slots=True)
class TensorView:
    """Named tensors, borrowed: nothing is copied, and the view is good until the event has been handled.

    ``names``, ``tensors`` and ``shards`` run in parallel; iterating yields ``(name, tensor, shard)``.
    """

    names: Sequence[str]
    tensors: Sequence[Any]
    shards: Sequence[ShardInfo] = ()

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, Any, ShardInfo]]:
        shards = self.shards or [WHOLE] * len(self.names)
        return iter(zip(self.names, self.tensors, shards, strict=True))


@dataclass(frozen=True, slots=True)
class AdamStep:
    """What Adam has just done to one parameter: ``w -= lr * (mhat / (sqrt(vhat) + eps) + decay * w)``.

    Attributes:
        name: of the parameter.
        mean, square: first and second moment (the largest one with amsgrad), this rank's pieces.
        step: updates so far, for the bias correction: a number or anything with one element.
        lr, betas, eps, decay: of the parameter's group; ``decay`` is 0 where it is part of the gradient.
        owner: whether this rank contributes the parameter.
    """

    name: str
    mean: Any
    square: Any
    step: Any
    lr: Any
    betas: tuple[float, float]
    eps: float
    decay: float
    owner: bool = True


class OptimizerView(Protocol):
    """What the engine may ask of an optimizer, read when asked (an optimizer may be reloaded at any time)."""

    def learning_rates(self) -> Mapping[str, float]:
        """Learning rate per parameter group, in group order."""
        ...

    def moment_names(self) -> Sequence[str]:
        """Keys of :meth:`moments` that are known to come with the first update."""
        ...

    def moments(self) -> Mapping[str, TensorView]:
        """The optimizer's state by its key: one name for what optimizers call differently (``exp_avg``,
        ``exp_avg_sq``, ``momentum_buffer``), this rank's pieces for each trainable parameter that has some. State of
        which a rank holds a piece that others hold too says so in its shards."""
        ...

    def adam_steps(self) -> Sequence[AdamStep]:
        """The updates that Adam and AdamW have just made; of other optimizers nothing."""
        ...

    def masters(self) -> TensorView:
        """The copies of trainable parameters, usually in higher precision, that the optimizer updates in their stead."""
        ...


class ModelView(Protocol):
    """What the engine may ask of a model: the names of its trainable parameters, as the model gives them, and what
    this rank holds of each."""

    def parameter_names(self) -> Sequence[str]:
        """Names of the trainable parameters without wrapper prefixes, in model order."""
        ...

    def pieces(self) -> Sequence[str]:
        """For each name, which piece of the tensor this rank holds: equal texts on two ranks, equal numbers."""
        ...

    def take_owners(self, owned: Collection[str], holders: Mapping[str, int]) -> None:
        """The names whose piece this rank contributes to sums over ranks: one of those that hold a piece does; and how
        many hold this rank's piece of each name. Gradients of later events say so in their :class:`ShardInfo`."""
        ...

    def weights(self) -> TensorView:
        """This rank's pieces of all trainable parameters, dense, live."""
        ...

    def version(self) -> int:
        """Another number once somebody has written to a weight: for telling that nobody has, as far as the framework
        keeps count."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """This process's place among the ranks.

    Attributes:
        counts_tokens: whether this rank's loss and tokens count. Ranks that see the same tokens (tensor parallel, the
            stages of a pipeline) count once: one of them says yes.
        data_rank: which part of the global batch this rank is fed: ranks with equal numbers see the same tokens. None:
            not told; then ranks that count tokens have different ones.
        stage: of the pipeline, from 0: the order in which ranks are causes of each other.
    """

    rank: int = 0
    world: int = 1
    counts_tokens: bool = True
    data_rank: int | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer whose logits will be seen, and how many heads it seems to have (None: not known before they are seen)."""

    name: str
    heads: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A mixture of experts whose load will be seen, and its number of experts on all ranks (None: not known before)."""

    name: str
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What the adapter will show of the model's inside, as far as it is known before the first step.

    Attributes:
        modules: names of the modules of :class:`ModuleSeen`.
        attention: layers of :class:`AttentionSeen`.
        experts: layers of :class:`ExpertsSeen`.
    """

    modules: Sequence[str] = ()
    attention: Sequence[AttentionLayer] = ()
    experts: Sequence[ExpertLayer] = ()


class Host(Protocol):
    """What the engine may ask of an adapter when the configuration changes under way."""

    def observe(self) -> Observed:
        """Takes its hooks away and finds anew what the configuration wants to look at."""
        ...

    def install(self, step: int) -> None:
        """Installs hooks for what probes listen to now."""
        ...


@dataclass(frozen=True, slots=True)
class TrainBegin:
    """The run starts or resumes. ``resumed_step`` is the last step that was finished before, 0 for a new run;
    ``consumed_tokens`` and ``consumed_samples`` are what earlier lives consumed, None if the host doesn't know;
    ``reproduction`` are the seeds, flags and versions that must be alike for a run to come out alike."""

    model: ModelView | None = None
    optimizer: OptimizerView | None = None
    layout: Layout = field(default_factory=Layout)
    resumed_step: int = 0
    total_steps: int | None = None
    consumed_tokens: int | None = None
    consumed_samples: int | None = None
    host: str = "none"
    actions: Collection[Action] = ENGINE_ACTIONS
    host_config: Mapping[str, Any] = field(default_factory=dict)
    reproduction: Mapping[str, Any] = field(default_factory=dict)
    time: float | None = None
    observed: Observed = field(default_factory=Observed)


@dataclass(frozen=True, slots=True)
class EpochBegin:
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochEnd:
    epoch: int


@dataclass(frozen=True, slots=True)
class StepBegin:
    step: int
    time: float


@dataclass(frozen=True, slots=True)
class DataBegin:
    time: float


@dataclass(frozen=True, slots=True)
class DataEnd:
    time: float


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    micro: int
    time: float


@dataclass(frozen=True, slots=True)
class BackwardEnd:
    micro: int
    time: float


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses of single tokens, borrowed until the event has been handled.

    Attributes:
        losses: floats; the last axis is the position in the sequence.
        weights: integers or bool of the same shape, 0 for tokens that don't count; None: all count.
        sources: integer ids of the data's sources, of a shape that broadcasts to that of ``losses``.
    """

    losses: Any
    weights: Any = None
    sources: Any = None


@dataclass(frozen=True, slots=True)
class MicroEnd:
    """A micro-batch is through. ``loss`` is its mean over ``tokens`` counted tokens (``reduction="mean"``) or
    their sum (``"sum"``): a number or anything with one element, on any device. ``tokens`` None: the host
    does not count them, and every micro-batch weighs the same. ``parts`` are named losses over the same tokens."""

    step: int
    micro: int
    loss: Any = None
    tokens: Any = None
    reduction: Literal["mean", "sum"] = "mean"
    gradients: TensorView | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    token_losses: TokenLosses | None = None
    loss_scale: Any = None


@dataclass(frozen=True, slots=True)
class MicroGradient:
    """One micro-batch's gradient of one parameter, before it is added to what is there and before any reduction.
    ``before`` is what it will be added to; None: nothing is there."""

    micro: int
    name: str
    gradient: Any
    before: Any = None


@dataclass(frozen=True, slots=True)
class GradientAccumulated:
    """The gradient of one parameter on this rank, a micro-batch just added, not reduced with it."""

    micro: int
    name: str
    gradient: Any


@dataclass(frozen=True, slots=True)
class ModuleSeen:
    """Tensors on their way through a module in training, borrowed: good until the event has been handled. Once a call
    and flow: what a recomputation repeats is left out."""

    module: str
    flow: Flow
    tensors: Sequence[Any]
    micro: int = 0


@dataclass(frozen=True, slots=True)
class MaxLogits:
    """Largest logits that the model keeps itself: one a head, or one for the layer."""

    values: Any


@dataclass(frozen=True, slots=True)
class RowSums:
    """Row maxima and softmax denominators [..., heads, rows] that a fused kernel returns."""

    maxima: Any
    sums: Any


@dataclass(frozen=True, slots=True)
class QueryKey:
    """What the logits are made of: q [..., Hq, Sq, D] and k [..., Hk, Sk, D].

    Attributes:
        causal: row i sees the keys up to i + ``q_start``.
        mask: what a row may see, [..., Hq, Sq, Sk] or what broadcasts to it: bool (True: may) or added to the scores.
    """

    q: Any
    k: Any
    scale: float
    causal: bool = True
    q_start: int = 0
    mask: Any = None


@dataclass(frozen=True, slots=True)
class Scores:
    """The input of softmax, [..., heads, Sq, Sk], masked places very low."""

    values: Any


@dataclass(frozen=True, slots=True)
class AttentionSeen:
    """Logits of one call of an attention layer in training, borrowed: good until the event has been handled.

    Attributes:
        first_head: place of the first head given among the layer's heads on all ranks.
    """

    layer: str
    logits: MaxLogits | RowSums | QueryKey | Scores
    micro: int = 0
    first_head: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsSeen:
    """What a mixture of experts did with tokens in training, borrowed: good until the event has been handled.

    Attributes:
        experts: number of experts of the layer on all ranks; None: as many as ``counts``.
        indices: the experts that this rank's tokens were assigned to, integers of any shape.
        counts: or assignments of each expert, from ``first_expert`` on.
        first_expert: above 0 for counts of a rank's own experts after dispatch (expert parallel).
        dropped: how many of the assignments were dropped, one number.
        bias: of the router, one number an expert.
        placement: the rank of each expert.
        previous: what an earlier routing of the same tokens chose, as ``indices`` [..., k].
    """

    layer: str
    micro: int = 0
    experts: int | None = None
    indices: Any = None
    counts: Any = None
    first_expert: int = 0
    dropped: Any = None
    bias: Any = None
    placement: Any = None
    previous: Any = None


@dataclass(frozen=True, slots=True)
class GradsReady:
    """Gradients are alive in ``phase``; they still carry ``loss_scale``. ``grad_norm``: their norm before clipping, if
    the host has read it already."""

    step: int
    gradients: TensorView
    phase: Phase
    clip_norm: float | None = None
    learning_rates: Mapping[str, float] | None = None
    loss_scale: float | None = None
    grad_norm: Any = None


@dataclass(frozen=True, slots=True)
class OptimizerBegin:
    time: float


@dataclass(frozen=True, slots=True)
class OptimizerEnd:
    time: float


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step is over. None means that the host does not know, never zero.

    Attributes:
        steps: how many have ended since the last such event; of those before this one nothing was seen. They are taken to
            have had as many samples and tokens.
    """

    step: int
    time: float
    loss: Any = None
    loss_parts: Mapping[str, Any] = field(default_factory=dict)
    tokens: Any = None
    samples: Any = None
    grad_norm: Any = None
    learning_rates: Mapping[str, Any] | None = None
    overflow: Any = None
    loss_scale: Any = None
    steps: int = 1


@dataclass(frozen=True, slots=True)
class EvalBegin:
    time: float


@dataclass(frozen=True, slots=True)
class EvalEnd:
    time: float


@dataclass(frozen=True, slots=True)
class Save:
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Load:
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class ExceptionRaised:
    """The training loop was left by an exception, Ctrl-C included."""

    step: int
    phase: str
    exception: BaseException


@dataclass(frozen=True, slots=True)
class TrainEnd:
    step: int
    reason: str


Event = (
    TrainBegin
    | EpochBegin
    | EpochEnd
    | StepBegin
    | DataBegin
    | DataEnd
    | ForwardEnd
    | BackwardEnd
    | MicroEnd
    | MicroGradient
    | GradientAccumulated
    | ModuleSeen
    | AttentionSeen
    | ExpertsSeen
    | GradsReady
    | OptimizerBegin
    | OptimizerEnd
    | StepEnd
    | EvalBegin
    | EvalEnd
    | Save
    | Load
    | ExceptionRaised
    | TrainEnd
)
