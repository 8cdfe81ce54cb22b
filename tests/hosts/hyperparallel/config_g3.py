"""The configuration of G3, strict at every level (config/trainer.py @0c221dea, sections @0e8cc3df, @86034775)."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints


class ConfigResolutionError(ValueError):
    """An unknown key, a wrong type, a missing section, or a target that doesn't resolve."""


class Target:
    """`_target_: dotted.path` and arguments: imported and checked at parse time, built later."""

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        module, _, name = path.rpartition(".")
        try:
            self.callable = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigResolutionError(f"_target_ {path}: {error}") from error
        self._parameters = inspect.signature(self.callable).parameters
        unknown = set(arguments) - set(self._parameters)
        if unknown and not self._takes_all():
            raise ConfigResolutionError(f"_target_ {path}: unknown arguments {sorted(unknown)}")
        self.arguments = arguments

    def _takes_all(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def build(self, **runtime: Any) -> Any:
        """With those runtime arguments that the signature names, or all if it takes any."""
        named = runtime if self._takes_all() else {k: v for k, v in runtime.items() if k in self._parameters}
        return self.callable(**{**self.arguments, **named})


@dataclass
class OptimizerConfig:
    """`two`: a leaf for "embed", one for the rest, as a Muon + AdamW set-up makes two; `listed`: not chained, a list."""

    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    fp32_main_params: bool = False
    two: bool = False
    listed: bool = False


@dataclass
class LRSchedulerConfig:
    warmup_steps: int = 1


@dataclass
class TrainingConfig:
    train_iters: int | None = None
    train_samples: int | None = None
    global_batch_size: int = 8
    micro_batch_size: int = 1
    backend: str = "nccl"
    max_grad_norm: float = 1.0
    loss_aggregation: str = "token_weighted"
    seed: int | None = None
    enable_full_determinism: bool = False
    gc_steps: int = 0
    empty_cache_steps: int = 0
    eval_steps: int = 0
    eval_epochs: int = 0
    logging_steps: int = 1


@dataclass
class DatasetConfig:
    """The formulas' data (model.py): `micro_batches` an epoch and rank, each of `micro_batch_size` rows.

    With a `source`, TextTrainer reads all of a step's data before on_step_begin.
    """

    seq_len: int = 6
    micro_batches: int = 4
    sized: Any = "len"
    seed: int = 0
    nan_loss: list[int] | None = None
    source: str | None = None


@dataclass
class DebugConfig:
    check_dataset: str | None = None
    check_nan_inf: bool = False
    check_fsdp_runtime: bool = False


@dataclass
class MemoryConfig:
    enable: bool = False
    start_step: int = 1
    end_step: int = 2
    save_path: str = "./memory_snapshot"
    dump_ranks: list[int] = field(default_factory=lambda: [0])
    stacks: str = "all"
    mem_info: bool = False


@dataclass
class ProfilingConfig:
    enabled: bool = False
    start_step: int = 1
    stop_step: int = 10
    memory: bool = True
    rank_ids: list[int] | None = None
    output_path: str | None = None
    level: int = 1


@dataclass
class WandbConfig:
    enable: bool = False
    project: str = "hyper_parallel"


@dataclass
class CheckpointingConfig:
    save_ckpt: bool = True
    checkpoint_dir: str = "./checkpoints"
    save_steps: int = 0
    save_epochs: int = 1
    is_async: bool = False
    save_optimizer: bool = True
    save_train_state: bool = True
    save_extra_state_per_rank: bool = True
    restore_from: str | None = None
    restore_optimizer: bool = True
    restore_train_state: bool = True
    restore_dataloader_state: bool = True


@dataclass
class FSDPConfig:
    """`wrap`: one of parallel.WRAPS; `recompute`: the expert layer's forward runs again in the backward pass."""

    wrap: str = "hsdp"
    recompute: bool = False


@dataclass
class TrainerConfig:
    model: Target
    optimizer: OptimizerConfig
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    loss_fn: Target | None = None
    flops_estimator: Target | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    checkpoint: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    profiler: ProfilingConfig = field(default_factory=ProfilingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)


MODEL = "tests.hosts.hyperparallel.model.TinyMoeLM"


def from_settings(s: dict[str, Any], output_dir: str = "./checkpoints") -> TrainerConfig:
    """The configuration of a case of model.py's `settings`; saves by epoch are off."""
    return TrainerConfig(
        model=Target(MODEL, {}),
        optimizer=OptimizerConfig(
            lr=s["lr"],
            betas=list(s["betas"]),
            eps=s["eps"],
            weight_decay=s["weight_decay"],
            fp32_main_params=s["fp32_main_params"],
            two=s["two_optimizers"],
        ),
        lr_scheduler=LRSchedulerConfig(warmup_steps=s["warmup"]),
        training=TrainingConfig(
            train_iters=s["max_steps"],
            global_batch_size=s["rows"] * s["micro_batches"] * s["world"],
            micro_batch_size=s["rows"],
            backend="gloo",
            max_grad_norm=s["max_grad_norm"],
            loss_aggregation=s["loss_aggregation"],
            logging_steps=s["log_steps"],
        ),
        dataset=DatasetConfig(
            seq_len=s["length"],
            micro_batches=s["loader_len"],
            sized=s["loader_says"],
            seed=s["data_seed"],
            nan_loss=s["nan_loss"],
        ),
        checkpoint=CheckpointingConfig(
            save_ckpt=s["save_steps"] > 0,
            checkpoint_dir=output_dir,
            save_steps=s["save_steps"],
            save_epochs=0,
            is_async=s["save_async"],
            restore_from=s["resume"],
        ),
        debug=DebugConfig(check_nan_inf=s["check_nan_inf"]),
    )


def to_settings(config: TrainerConfig, num_micro_batches: int) -> dict[str, Any]:
    """What model.py's data, optimizer and schedule need of a configuration."""
    optimizer, dataset = config.optimizer, config.dataset
    return {
        "micro_batches": num_micro_batches,
        "rows": config.training.micro_batch_size,
        "length": dataset.seq_len,
        "loader_len": dataset.micro_batches,
        "loader_says": dataset.sized,
        "data_seed": dataset.seed,
        "nan_loss": dataset.nan_loss,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "warmup": config.lr_scheduler.warmup_steps,
    }


def parse_args(arguments: list[str]) -> TrainerConfig:
    """`file.yaml --a.b=value …`. An override can't name a `_target_`, nor a component that the YAML lacks."""
    import yaml

    files = [a for a in arguments if not a.startswith("--")]
    tree: dict[str, Any] = (yaml.safe_load(Path(files[0]).read_text("utf-8")) or {}) if files else {}
    for override in (a[2:] for a in arguments if a.startswith("--")):
        path, _, text = override.partition("=")
        *branches, leaf = path.split(".")
        node = tree
        for branch in branches:
            if branch not in node:
                raise ConfigResolutionError(f"--{path}: the YAML has no {branch}")
            node = node[branch]
        if leaf == "_target_":
            raise ConfigResolutionError(f"--{path}: a target can't be overridden")
        node[leaf] = _number(yaml.safe_load(text))
    return _resolved(TrainerConfig, tree, "config")


def _number(value: Any) -> Any:
    """An override's `1e-4` is a number, the YAML's is not."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _resolved(cls: Any, tree: Any, path: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigResolutionError(f"{path}: expected a mapping, not {tree!r}")
    hints, values = get_type_hints(cls), {}
    unknown = set(tree) - set(hints)
    if unknown:
        raise ConfigResolutionError(f"{path}: unknown keys {sorted(unknown)}")
    for f in fields(cls):
        if f.name not in tree and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigResolutionError(f"{path}: {f.name} is required")
    for name, value in tree.items():
        here, kinds = f"{path}.{name}", get_args(hints[name]) or (hints[name],)
        if Target in kinds and isinstance(value, dict) and "_target_" in value:
            values[name] = Target(value["_target_"], {k: v for k, v in value.items() if k != "_target_"})
        elif is_dataclass(hints[name]):
            values[name] = _resolved(hints[name], value, here)
        elif hints[name] is Any or _fits(value, hints[name]):
            values[name] = value
        else:
            raise ConfigResolutionError(f"{here}: {value!r} is no {hints[name]}")
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, list)
    if get_args(hint):
        return any(_fits(value, one) for one in get_args(hint))
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if hint is float else hint)
