"""The schema: one frozen dataclass a section, mirroring the YAML key by key. docs/config.md is generated from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trainmon.events import Flow

from .fields import key, plain, section
from .health import HealthConfig

__all__ = [
    "ActivationsConfig",
    "AttentionConfig",
    "BlackBox",
    "BridgeSink",
    "Cadence",
    "ComparisonConfig",
    "CsvSink",
    "GradientsConfig",
    "JsonlSink",
    "LogSink",
    "LossConfig",
    "MoeConfig",
    "MomentsConfig",
    "ParquetSink",
    "PrometheusSink",
    "OverheadConfig",
    "ReplicasConfig",
    "Selection",
    "SinksConfig",
    "TensorBoardSink",
    "ThroughputConfig",
    "TimingConfig",
    "SpectralConfig",
    "TrainMonitorConfig",
    "UpdatesConfig",
    "WeightsConfig",
    "Window",
]

Patterns = tuple[re.Pattern[str], ...]


_INHERIT = "; without it the top-level value holds"
_SOURCE = (
    "The optimizer's `master` copies, the `model`'s own weights; auto: master copies where there are some."
)
_STEP_ALIASES = ("step_interval",)  # MindFormers' monitor_config and msProbe, with the same meaning


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that are looked at. Steps count from 1; both ends belong to the window."""

    start: int = key(1, "First step of the window.", minimum=1)
    stop: int | None = key(None, "Last step of the window, itself included; null: no end.", minimum=1)
    interval: int = key(1, "Every how many steps, counted from `start`.", minimum=1)
    count: int | None = key(None, "At most so many steps are looked at; null: no limit.", minimum=1)

    def check(self) -> Iterator[tuple[str, str]]:
        if self.stop is not None and self.stop < self.start:
            yield "stop", f"expected an integer of at least start ({self.start}), found {self.stop}"


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a section fires: at the first step and at multiples of `every`, inside the window."""

    every: int
    window: Window


@dataclass(frozen=True, slots=True)
class Selection:
    """Which names a section looks at."""

    target: Patterns | None
    exclude: Patterns
    invert: bool

    def __contains__(self, name: str) -> bool:
        """Whether a name is selected: `target` is searched in it, `invert` turns that round, `exclude` wins."""
        hit = self.target is None or any(pattern.search(name) for pattern in self.target) != self.invert
        return hit and not any(pattern.search(name) for pattern in self.exclude)


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    global_: bool = key(True, "The token-weighted loss over all ranks and micro-batches.", name="global")
    micro: bool = key(False, "The local loss of every micro-batch.")
    device: bool | None = key(None, "This rank's own loss; null: with several ranks.")
    own_every: int = key(1, "Every how many steps `micro` and `device` are looked at.", minimum=1)
    perplexity: bool = key(False, "exp of the global loss.")
    parts: bool = key(True, "The named losses that the loop hands over (auxiliary, multi-token prediction).")
    positions: int = key(
        0, "The loss by position in the sequence, in so many groups; needs the losses of tokens.", minimum=0
    )
    sources: tuple[str, ...] = key(
        (), "Names of the data's sources by id: the loss of each; needs the losses of tokens.", single=True
    )


@dataclass(frozen=True, slots=True)
class GradientsConfig:
    """Gradients: norms, and a scan for values that are not finite."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    norm: bool = key(True, "The norm of all gradients together, before clipping.")
    per_parameter: bool = key(False, "The norm of each selected parameter's gradient.")
    nonfinite: bool = key(True, "Count NaN and infinite values, and name the first.")
    clipped: bool = key(False, "The norm after clipping, too.")
    local: bool = key(False, "The norm of each selected parameter's gradient on this rank, before reduction.")
    device: bool = key(False, "The norm of all gradients of this rank, before reduction.")
    own_every: int = key(1, "Every how many steps `local` and `device` are looked at.", minimum=1)
    micro: bool = key(False, "The norm of each micro-batch's own gradient, of each selected parameter.")
    increment: bool = key(
        False,
        "By how much each micro-batch changes the norm of the accumulated gradient, of each selected parameter.",
        aliases=("local_norm_increment",),  # as MindFormers' lines name it
    )
    micro_every: int = key(
        10, "Every how many steps `micro` and `increment` look: each micro-batch is a read.", minimum=1
    )
    align: bool = key(
        False, "How well the data-parallel ranks' gradients agree: before reduction against after it."
    )
    reduction: Literal["mean", "sum"] = key(
        "mean", "What the loop makes of the ranks' gradients, for `align`: their average or their sum."
    )
    signs: bool = key(
        False,
        "The share of gradient elements that have the sign of the optimizer's momentum; a read of both.",
    )
    underflow: tuple[Literal["bf16", "fp16", "e4m3fn", "e5m2"], ...] = key(
        (), "Formats: the share of gradient elements that a cast to each would round to zero.", single=True
    )
    target: Patterns | None = key(
        None, f"Parameters to look at, by name{_INHERIT}.", single=True, nonempty=True
    )
    exclude: Patterns | None = key(None, f"Parameters to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class ActivationsConfig:
    """What flows through modules in training: norm, largest value, NaN and infinities of each selected module."""

    every: int | None = key(20, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    forward: bool = key(True, "Activations.")
    backward: bool = key(False, "Gradients of activations.")
    input: bool = key(False, "Of the inputs.")
    output: bool = key(True, "Of the outputs.")
    norm: bool = key(True, "The norm over the step.")
    absmax: bool = key(True, "The largest absolute value.")
    nonfinite: bool = key(True, "Count NaN and infinite values, and name the first module that has one.")
    target: Patterns | None = key(None, f"Modules to look at, by name{_INHERIT}.", single=True, nonempty=True)
    exclude: Patterns | None = key(None, f"Modules to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")

    @property
    def flows(self) -> tuple[Flow, ...]:
        """What of each module is looked at."""
        flows: dict[Flow, bool] = {
            "input": self.forward and self.input,
            "output": self.forward and self.output,
            "grad_output": self.backward and self.output,
            "grad_input": self.backward and self.input,
        }
        return tuple(flow for flow, wanted in flows.items() if wanted)

    def check(self) -> Iterator[tuple[str, str]]:
        if not (self.forward or self.backward):
            yield (
                "forward",
                "expected forward or backward to be on; `activations: false` switches the section off",
            )
        if not (self.input or self.output):
            yield "output", "expected input or output to be on; `activations: false` switches the section off"


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Weights: norms, and a scan for values that are not finite. Looked at after the update."""

    every: int | None = key(10, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    norm: bool = key(True, "The norm of all weights together.")
    per_parameter: bool = key(False, "The norm of each selected parameter.")
    nonfinite: bool = key(True, "Count NaN and infinite values, and name the first.")
    source: Literal["auto", "master", "model"] = key("auto", _SOURCE)
    target: Patterns | None = key(
        None, f"Parameters to look at, by name{_INHERIT}.", single=True, nonempty=True
    )
    exclude: Patterns | None = key(None, f"Parameters to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class MomentsConfig:
    """The optimizer's moments (`exp_avg`, `exp_avg_sq`, `momentum_buffer` ...). Looked at after the update."""

    every: int | None = key(10, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    norm: bool = key(True, "The norm of each state over all parameters.")
    per_parameter: bool = key(False, "The norm of each state of each selected parameter.")
    negative: bool = key(True, "Count elements of second moments below zero.")
    target: Patterns | None = key(
        None, f"Parameters to look at, by name{_INHERIT}.", single=True, nonempty=True
    )
    exclude: Patterns | None = key(None, f"Parameters to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention logits: how large they get, and how much softmax spreads them, by layer and head."""

    every: int | None = key(20, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    hooks: bool = key(True, "Look at what the attention layers that are found give to their kernels.")
    layers: Patterns | None = key(
        None, "Modules that are attention layers besides those that are recognised, by name.", single=True
    )
    rows: int = key(
        16,
        "Query rows that are read of each head, sequence and call, other ones each time; 0: all.",
        minimum=0,
    )
    tracked: Patterns = key(
        (re.compile(r"^_?max_(attention_|attn_)?logits?(_buffer)?$"),),
        "Buffers and attributes in which the model keeps largest logits itself, read at the end of the step.",
        single=True,
    )
    per_head: bool = key(False, "The largest logit of each head.")
    qk_clip: float | None = key(
        None,
        "The largest logit that QK-clip lets be: shows its factors; null: they are not shown.",
        minimum=1e-300,
    )
    target: Patterns | None = key(None, f"Layers to look at, by name{_INHERIT}.", single=True, nonempty=True)
    exclude: Patterns | None = key(None, f"Layers to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class UpdatesConfig:
    """What a step does to the weights. Keeps a copy of the selected weights."""

    every: int | None = key(10, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    norm: bool = key(True, "The norm of the update of all selected weights together.")
    ratio: bool = key(True, "The same over the norm of the weights before.")
    zero_share: bool = key(True, "The share of elements that did not move.")
    per_parameter: bool = key(False, "The ratio of each selected parameter.")
    adam: bool = key(
        False, "The norm that Adam's state says the update has, an estimate; slow in host memory."
    )
    source: Literal["auto", "master", "model"] = key("auto", _SOURCE)
    target: Patterns | None = key(
        None, f"Parameters to look at, by name{_INHERIT}. Only these are copied.", single=True, nonempty=True
    )
    exclude: Patterns | None = key(None, f"Parameters to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixtures of experts: how evenly tokens are spread, what is dropped, which experts are dead."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    hooks: bool = key(True, "Look at what the routers that are found decide.")
    routers: Patterns | None = key(
        None, "Modules that are routers besides those that are recognised, by name.", single=True
    )
    counters: Patterns = key(
        (re.compile(r"^tokens_per_expert$"),),
        "Buffers in which layers count tokens themselves; looked at where no router is understood.",
        single=True,
    )
    biases: Patterns = key(
        (re.compile(r"^(expert_bias|e_score_correction_bias|router_bias|routing_bias)$"),),
        "Buffers and parameters with a router's bias of each expert.",
        single=True,
    )
    bias_cap: float | None = key(None, "The bias counts as saturated from this size on.", minimum=1e-300)
    per_expert: bool = key(False, "The load of each expert, and for how many steps it has been dead.")
    capacity_factor: float | None = key(
        None, "Capacity of an expert over its even share, for forecasts of drops.", minimum=0.0
    )
    ep_size: int | None = key(None, "Ranks of expert parallelism, for their loads.", minimum=1)
    placement: bool = key(False, "Follow which rank has which expert, where the loop tells it.")
    span: int = key(
        100, "Steps of `max_vio_window`, and steps without tokens until an expert is dead.", minimum=1
    )
    hold: int = key(10, "Steps until an expert is hot or cold.", minimum=1)
    micros: int = key(
        8,
        "Micro-batches of a step whose loads all ranks add up, one by one, for `max_vio_micro`; 0: it is not shown.",
        minimum=0,
    )
    target: Patterns | None = key(None, f"Layers to look at, by name{_INHERIT}.", single=True, nonempty=True)
    exclude: Patterns | None = key(None, f"Layers to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class SpectralConfig:
    """Stable rank and largest singular value of weight matrices, which take turns. Keeps two vectors a matrix."""

    every: int | None = key(10, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")
    stable_rank: bool = key(True, "Sum of squares over the largest eigenvalue of W'W, and its lower bound.")
    sigma: bool = key(True, "The largest singular value.")
    eigenvalue: bool = key(False, "The largest eigenvalue of W'W.")
    elements: int = key(
        1 << 20, "Elements of the matrices that are looked at in one step; at least one matrix is.", minimum=1
    )
    tolerance: float = key(0.01, "Half width of the interval over the value.", minimum=1e-6, maximum=0.5)
    epsilon: float = key(
        1e-6,
        "Allowed probability that the lower bound is wrong, a matrix and visit.",
        minimum=1e-15,
        maximum=0.5,
    )
    target: Patterns | None = key(
        None, f"Parameters to look at, by name{_INHERIT}.", single=True, nonempty=True
    )
    exclude: Patterns | None = key(None, f"Parameters to leave out, by name{_INHERIT}.", single=True)
    invert: bool | None = key(None, f"Look at what `target` does not match{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class ThroughputConfig:
    """Tokens and samples a second."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class TimingConfig:
    """The time of a step."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    window: Window | None = key(None, f"The steps that are looked at{_INHERIT}.")


@dataclass(frozen=True, slots=True)
class ComparisonConfig:
    """The ranks' own values side by side: who has the least and the most, who stands out."""

    every: int = key(10, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    outlier: float = key(6.0, "A rank beyond this robust z, three times in a row, is reported.", minimum=0)


@dataclass(frozen=True, slots=True)
class OverheadConfig:
    """What trainmon may cost: above it, what can be looked at less often is."""

    budget: float = key(0.005, "Share of the step's time.", minimum=1e-6, maximum=1.0)


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    """Parameters that several ranks hold, compared bit by bit through fingerprints."""

    every: int = key(100, "Every how many steps.", minimum=1, aliases=_STEP_ALIASES)
    megabytes: int = key(64, "A check reads so many MiB of a rank; the parameters take turns.", minimum=1)


@dataclass(frozen=True, slots=True)
class LogSink:
    """One line a step for people, and the progress bar."""

    every: int | None = key(None, f"A line every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    progress: Literal["auto"] | bool = key("auto", "A progress bar; auto: if the output is a terminal.")
    file: bool = key(True, "Write the lines to `log.txt`, too.")
    series: Patterns = key((), "Further series on the line, by name.", single=True)


@dataclass(frozen=True, slots=True)
class JsonlSink:
    """`scalars.jsonl`: one JSON object a step."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)


@dataclass(frozen=True, slots=True)
class CsvSink:
    """`tensors/<probe>_step<A>-<B>.csv`: values of single tensors. No file unless a section asks for them."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    steps_per_file: int = key(1000, "A new file after so many steps.", minimum=1)
    rows_per_file: int = key(1_000_000, "A new file at the next step after so many rows.", minimum=1)


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """`tensors/<probe>_step<A>-<B>.parquet`: values of single tensors. Needs the extra `trainmon[parquet]`."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    steps_per_file: int = key(100, "A file is written once so many steps wait for it;", minimum=1)
    rows_per_file: int = key(100_000, "or so many rows.", minimum=1)
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = key("zstd", "How pages are compressed.")


@dataclass(frozen=True, slots=True)
class TensorBoardSink:
    """TensorBoard event files. Needs the extra `trainmon[tensorboard]`."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    worst: int = key(5, "Of per-parameter values, so many of the largest get a tag of their own.", minimum=0)
    exclude: Patterns = key((), "Series to leave out, by name.", single=True)


@dataclass(frozen=True, slots=True)
class PrometheusSink:
    """A file for Prometheus' textfile collector, and an endpoint. Needs the extra `trainmon[prometheus]`."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    textfile: bool = key(True, "Write the file.")
    directory: str | None = key(
        None, "The textfile collector's directory; null: `metrics.prom` in the rank's own."
    )
    interval: float = key(5.0, "The file is written anew after so many seconds at the earliest.", minimum=0)
    port: int | None = key(
        None, "Rank r answers scrapes on this port + r; null: no endpoint.", minimum=1, maximum=65535
    )
    address: str = key("127.0.0.1", "The interface of the endpoint; `0.0.0.0`: all of them.")
    per_tensor: bool = key(
        False,
        "Each value of a single tensor is a time series of its own (there may be many), not quantiles only.",
    )


@dataclass(frozen=True, slots=True)
class BlackBox:
    """`blackbox.bin` of every rank: its last steps and phases, readable after any death by `trainmon blackbox`."""

    frames: int = key(64, "So many of the last steps' values are kept.", minimum=1, maximum=1 << 16)
    events: int = key(4096, "So many of the last phase marks are kept.", minimum=16, maximum=1 << 20)
    host_every: float = key(1.0, "Seconds between two looks at memory, threads and load.", minimum=0)
    faults: bool = key(
        False,
        "Let Python's fault handler write the stacks of a fatal signal (segmentation fault, abort) beside the box.",
    )
    directory: str | None = key(
        None, "Where the boxes are, e.g. on the node's own disk; null: the directory of the run."
    )


@dataclass(frozen=True, slots=True)
class BridgeSink:
    """Any object with `log(dict, step)`, such as the run of an experiment tracker."""

    every: int | None = key(None, f"Every how many steps{_INHERIT}.", minimum=1, aliases=_STEP_ALIASES)
    to: str | None = key(
        None,
        "`wandb`, `swanlab`, `trackio`, or `package.module:name`; null: the object given in code as `bridge=`.",
    )
    project: str = key("trainmon", "Project of a tracker's run, where none is active and one is begun here.")
    online: bool = key(False, "Whether such a run may talk to the tracker's server.")


@dataclass(frozen=True, slots=True)
class SinksConfig:
    """Where the values go. A list such as `[log, jsonl]` switches on exactly these, with their defaults."""

    log: LogSink | None = section(LogSink(), "Lines and progress bar.")
    jsonl: JsonlSink | None = section(JsonlSink(), "`scalars.jsonl`.")
    csv: CsvSink | None = section(CsvSink(), "CSV files of values of single tensors.")
    parquet: ParquetSink | None = section(None, "Parquet files of values of single tensors.")
    tensorboard: TensorBoardSink | None = section(None, "TensorBoard event files.")
    prometheus: PrometheusSink | None = section(None, "Prometheus.")
    bridge: BridgeSink | None = section(None, "An experiment tracker, or any object with `log`.")
    blackbox: BlackBox | None = section(BlackBox(), "What each rank did last, readable after any death.")
    queue: int = key(1024, "Records that may wait for the writer thread.", minimum=1, maximum=1 << 20)
    on_full: Literal["drop", "block"] = key(
        "drop", "When the queue is full: drop records and count them, or make training wait."
    )

    list_form: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class TrainMonitorConfig:
    """What a TrainMonitor does. Nothing is required: the defaults watch loss, gradients, weights, throughput and time."""

    output_dir: str = key("runs", "Directory of all runs; the run gets a directory of its own in it.")
    run_name: str | None = key(None, "Name of the run; null: made from date and time.")
    ranks: Literal["all"] | tuple[int, ...] | None = key(
        None, "Ranks that write files besides rank 0: `all`, or a list.", minimum=0, single=True
    )
    every: int = key(1, "Look at every how many steps (and at the first).", minimum=1, aliases=_STEP_ALIASES)
    window: Window = key(Window(), "The steps that are looked at.")
    target: Patterns | None = key(
        None, "Regular expressions searched in names; null: all names.", single=True, nonempty=True
    )
    exclude: Patterns = key((), "Regular expressions of names to leave out.", single=True)
    invert: bool = key(False, "Look at what `target` does not match.")
    loss: LossConfig | None = section(LossConfig(), "The loss.")
    gradients: GradientsConfig | None = section(GradientsConfig(), "Gradients.")
    weights: WeightsConfig | None = section(WeightsConfig(), "Weights.")
    moments: MomentsConfig | None = section(None, "The optimizer's moments.")
    updates: UpdatesConfig | None = section(None, "What a step does to the weights.")
    spectral: SpectralConfig | None = section(None, "Spectra of weight matrices.")
    activations: ActivationsConfig | None = section(None, "Activations.")
    attention: AttentionConfig | None = section(None, "Attention logits.")
    moe: MoeConfig | None = section(MoeConfig(), "Mixtures of experts.")
    throughput: ThroughputConfig | None = section(ThroughputConfig(), "Throughput.")
    timing: TimingConfig | None = section(TimingConfig(), "Times.")
    health: HealthConfig | None = section(HealthConfig(), "Whether the run is healthy.")
    comparison: ComparisonConfig | None = section(ComparisonConfig(), "Ranks compared with each other.")
    replicas: ReplicasConfig | None = section(ReplicasConfig(), "Replicas compared bit by bit.")
    overhead: OverheadConfig | None = section(OverheadConfig(), "The budget of trainmon's own time.")
    sinks: SinksConfig = key(SinksConfig(), "Where the values go.")
    tag_style: Literal["slash", "megatron", "mindformers"] = key(
        "slash", "How series are named in TensorBoard: by group, or as another tool names them."
    )

    not_built: ClassVar[tuple[str, ...]] = (*("memory", "collectives", "profiler", "checkpoint", "recovery"),)

    def check(self) -> Iterator[tuple[str, str]]:
        for name in (
            "gradients",
            "weights",
            "moments",
            "updates",
            "spectral",
            "activations",
            "attention",
            "moe",
        ):
            part = getattr(self, name)
            if part is None:
                continue
            selection = self.selection(name)
            if selection.invert and selection.target is None:
                where = f"{name}.invert" if part.invert else "invert"
                yield where, "expected a target to invert: without one, nothing is left to look at"
                if not part.invert:
                    return

    def cadence(self, name: str) -> Cadence:
        """When a section (`"gradients"`) or sink (`"sinks.log"`) fires: its own keys, else the top-level ones.

        Raises KeyError for a section that has no such keys or is off.
        """
        part = self._part(name)
        return Cadence(
            self.every if part.every is None else part.every,
            getattr(part, "window", None) or self.window,
        )

    def selection(self, name: str) -> Selection:
        """Which names a section looks at: each of its own keys, else the top-level one. Raises as `cadence`."""
        part = self._part(name)
        target = getattr(part, "target", None)
        exclude = getattr(part, "exclude", None)
        invert = getattr(part, "invert", None)
        return Selection(
            self.target if target is None else target,
            self.exclude if exclude is None else exclude,
            self.invert if invert is None else invert,
        )

    def _part(self, name: str) -> Any:
        part: Any = self
        for step in name.split("."):
            part = getattr(part, step, None)
        if part is None or not hasattr(part, "every"):
            raise KeyError(f"{name} is off, or has no cadence")
        return part

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as plain data, defaults included: `load_config` of it gives an equal one."""
        result: dict[str, Any] = plain(self)
        return result

    def digest(self) -> str:
        """SHA-256 (hex) of the configuration; equal for equal configurations, whatever door they came through."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()
