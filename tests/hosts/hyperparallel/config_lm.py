"""The three-tier configuration of G1 and G2 (contract 9.1: `config.py` @427916e6): model, data, train.

Sections sit under `train.`; what the trainers of G1 then look for is `args.<section>` (contract 9.1, section mismatch).
`train.monitor` is in no `config.py` that was read: its fields are those of the tests @050de391.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

SECTIONS = (
    "checkpoint",
    "logging",
    "tensorboard",
    "wandb",
    "profile",
    "memory_monitor",
    "moe_monitor",
    "debug",
)


@dataclass
class CheckpointConfig:
    output_dir: str = "outputs"
    save_steps: int = 500
    save_hf_weights: bool = True
    load_path: str | None = None
    save_async: bool = False


@dataclass
class LoggingConfig:
    report_to: str = "none"
    report_global_loss: bool = False
    log_steps: int = 10
    report_throughput: bool = True
    model_flops_per_token: int | None = None
    peak_tflops: float | None = None


@dataclass
class TensorBoardConfig:
    enabled: bool = False
    log_steps: int = 1
    output_dir: str = "tensorboard"


@dataclass
class WandbConfig:
    enabled: bool = False
    log_steps: int = 1
    project: str = "hyper_parallel"


@dataclass
class ProfileConfig:
    enabled: bool = False
    output_dir: str = "profiler_traces"
    wait_steps: int = 1
    warmup_steps: int = 1
    active_steps: int = 3


@dataclass
class MemoryMonitorConfig:
    enabled: bool = False
    log_steps: int = 50
    reset_peak_each_step: bool = False


@dataclass
class MoEMonitorConfig:
    enabled: bool = False
    lr: float = 1e-3
    num_recomputations: int = 1


@dataclass
class DebugConfig:
    deterministic: bool = False
    deterministic_warn_only: bool = False
    check_nan_inf: bool = False
    gc_steps: int = 0


@dataclass
class OptimizerConfig:
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 1
    loss_aggregation: str = "token_weighted"
    max_grad_norm: float = 1.0


@dataclass
class MonitorConfig:
    monitor_on: bool = False
    dump_path: str | None = None
    step_interval: int = 1
    target: list[str] | None = None
    invert: bool = False
    local_loss_format: list[str] | None = None
    device_local_loss_format: list[str] | None = None
    local_norm_format: list[str] | None = None
    device_local_norm_format: list[str] | None = None


@dataclass
class ParallelConfig:
    """`pp`: pipeline stages, one a rank; `pp_chunks`: model chunks a rank; `wrap`: one of parallel.WRAPS.

    `recompute`: the expert layer's forward pass runs again in the backward pass.
    """

    pp: int = 1
    pp_chunks: int = 1
    wrap: str = "hsdp"
    recompute: bool = False


@dataclass
class ModelConfig:
    """`moe`: "later", or "earlier" for the layer that has neither `enable_expert_bias` nor `last_aux_loss`."""

    name: str = "tiny_moe"
    moe: str = "later"


@dataclass
class DataConfig:
    """The formulas' data (model.py): `micro_batches` an epoch and rank, of `micro_batch_size` rows."""

    max_seq_len: int = 6
    micro_batch_size: int = 2
    micro_batches: int = 4
    sized: Any = "len"
    seed: int = 0
    nan_loss: list[int] | None = None


@dataclass
class TrainConfig:
    max_steps: int = 100
    num_train_epochs: int = 1
    gradient_accumulation_steps: int = 1
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    memory_monitor: MemoryMonitorConfig = field(default_factory=MemoryMonitorConfig)
    moe_monitor: MoEMonitorConfig = field(default_factory=MoEMonitorConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    monitor: MonitorConfig | None = None


@dataclass
class HyperTrainerConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_aliases(self) -> HyperTrainerConfig:
        """The sections of `train` also as `args.<section>`, where the trainer's callbacks look for them."""
        for name in SECTIONS:
            setattr(self, name, getattr(self.train, name))
        return self


def from_settings(s: dict[str, Any], output_dir: str = "outputs") -> HyperTrainerConfig:
    """The configuration of a case of model.py's `settings`."""
    args = HyperTrainerConfig(
        data=DataConfig(
            max_seq_len=s["length"],
            micro_batch_size=s["rows"],
            micro_batches=s["loader_len"],
            sized=s["loader_says"],
            seed=s["data_seed"],
            nan_loss=s["nan_loss"],
        ),
        train=TrainConfig(
            max_steps=s["max_steps"],
            num_train_epochs=s["epochs"],
            gradient_accumulation_steps=s["micro_batches"],
            checkpoint=CheckpointConfig(
                output_dir=output_dir,
                save_steps=s["save_steps"],
                save_hf_weights=False,
                load_path=s["resume"],
                save_async=s["save_async"],
            ),
            logging=LoggingConfig(log_steps=s["log_steps"]),
            moe_monitor=MoEMonitorConfig(enabled=s["moe_monitor"], lr=s["moe_lr"]),
            debug=DebugConfig(check_nan_inf=s["check_nan_inf"]),
            optimizer=OptimizerConfig(
                lr=s["lr"],
                betas=list(s["betas"]),
                eps=s["eps"],
                weight_decay=s["weight_decay"],
                warmup_steps=s["warmup"],
                loss_aggregation=s["loss_aggregation"],
                max_grad_norm=s["max_grad_norm"],
            ),
        ),
    )
    return args if s["sections"] == "nested" else args.with_aliases()


def to_settings(args: Any) -> dict[str, Any]:
    """What model.py's data, optimizer and schedule need of a configuration."""
    data, optimizer = args.data, args.train.optimizer
    return {
        "micro_batches": args.train.gradient_accumulation_steps,
        "rows": data.micro_batch_size,
        "length": data.max_seq_len,
        "loader_len": data.micro_batches,
        "loader_says": data.sized,
        "data_seed": data.seed,
        "nan_loss": data.nan_loss,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "warmup": optimizer.warmup_steps,
        "fp32_main_params": False,
    }


def parse_args(arguments: list[str]) -> HyperTrainerConfig:
    """`file.yaml --a.b=c …`. Other top-level keys are refused; unknown nested ones are dropped with a warning.

    Values aren't checked; only words for booleans are converted, so YAML's `1e-4` stays a string.
    """
    import yaml

    files = [a for a in arguments if not a.startswith("--")]
    tree: dict[str, Any] = (yaml.safe_load(Path(files[0]).read_text("utf-8")) or {}) if files else {}
    for override in (a[2:] for a in arguments if a.startswith("--")):
        path, _, text = override.partition("=")
        branch, *rest = path.split(".")
        node = tree.setdefault(branch, {})
        for key in rest[:-1]:
            node = node.setdefault(key, {})
        node[rest[-1]] = yaml.safe_load(text)
    unknown = set(tree) - {f.name for f in fields(HyperTrainerConfig)}
    if unknown:
        raise ValueError(f"unknown top-level keys: {sorted(unknown)}; expected model, data, train")
    return _filled(HyperTrainerConfig, tree, "")


def _filled(cls: Any, tree: dict[str, Any], path: str) -> Any:
    hints, values = get_type_hints(cls), {}
    for name, value in tree.items():
        if name not in hints:
            warnings.warn(f"dropped unknown key {path}{name}", stacklevel=2)
            continue
        section = next((t for t in (hints[name], *get_args(hints[name])) if is_dataclass(t)), None)
        if section is not None and isinstance(value, dict):
            value = _filled(section, value, f"{path}{name}.")
        elif hints[name] is bool and isinstance(value, str):
            value = value.lower() in ("true", "yes", "on", "1")
        values[name] = value
    return cls(**values)
