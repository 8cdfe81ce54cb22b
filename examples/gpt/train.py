"""Trains a small GPT on the English text that ships with Python, watched by trainmon.

    python examples/gpt/train.py [CONFIG] [--steps N] [--set section.key=value ...]

`Training.step` is the part to read: an ordinary loop body with five calls to the monitor in it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import yaml
from data import ByteText, DataConfig
from model import GPT, ModelConfig

import trainmon

Section = TypeVar("Section", ModelConfig, DataConfig, "TrainConfig")

PROMPT = b"The "
SAMPLE_BYTES = 240


class SettingsError(ValueError):
    """The YAML can't be used by this program. Names key and reason; `place` is `:line:column` or empty."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


@dataclass(frozen=True)
class TrainConfig:
    """How to train. A step is `accumulation` micro-batches of `batch` windows.

    The learning rate rises linearly to `lr` over `warmup` steps, then follows a cosine down to `min_lr`.
    `clip` is the bound of the global gradient norm. `dtype` is that of the matrix products: float32 or
    bfloat16 (weights stay float32). `threads` is the number of torch threads; null leaves torch's own
    choice.
    """

    steps: int = 150
    batch: int = 8
    accumulation: int = 4
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 15
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1234
    dtype: str = "float32"
    threads: int | None = None


class NoMonitor:
    """Stands where the monitor would: what a run without a TrainMonitor entry calls."""

    def data_wait(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def micro_end(self, **_facts: Any) -> None: ...

    def grads_ready(self) -> SimpleNamespace:
        return SimpleNamespace(skip=False)

    def step_end(self, **_facts: Any) -> None: ...


class Training:
    """Model, data, optimizer and schedule of one run, built from the three sections.

    Raises:
        SettingsError: the sections contradict each other.
    """

    def __init__(self, model: ModelConfig, data: DataConfig, train: TrainConfig) -> None:
        if train.dtype not in ("float32", "bfloat16"):
            raise SettingsError(f"train.dtype: expected float32 or bfloat16, not {train.dtype!r}")
        if not train.lr > 0:
            raise SettingsError(f"train.lr: expected a positive number, not {train.lr}")
        _require_positive("model", model, "width", "layers", "heads", "context")
        _require_positive("train", train, "steps", "batch", "accumulation")
        if train.threads is not None:
            _require_positive("train", train, "threads")
            torch.set_num_threads(train.threads)
        torch.manual_seed(train.seed)
        self.config = train
        try:
            self.model = GPT(model)
            self.data = ByteText(data, model.context, train.batch)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": train.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=(0.9, 0.95),
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=train.dtype == "bfloat16")

    def _rate(self, steps_done: int) -> float:
        """Learning rate of the next step as a share of `lr`."""
        config = self.config
        if steps_done < config.warmup:
            return (steps_done + 1) / config.warmup
        progress = (steps_done - config.warmup) / max(1, config.steps - config.warmup)
        low = config.min_lr / config.lr
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def step(self, mon: Any) -> None:
        """One optimizer step over `accumulation` micro-batches, every counted byte with the same weight."""
        with mon.data_wait():
            micros = [self.data.next_batch() for _ in range(self.config.accumulation)]
        tokens = sum(micro.tokens for micro in micros)
        for micro in micros:
            with self.autocast:
                loss = self.model.loss(micro.inputs, micro.targets)
            (loss * (micro.tokens / tokens)).backward()  # type: ignore[no-untyped-call]
            mon.micro_end(loss=loss.detach(), tokens=micro.tokens)
        if not mon.grads_ready().skip:  # a health rule may say so
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        mon.step_end(samples=len(micros) * self.config.batch)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean cross-entropy over the held-out bytes, in nat per byte."""
        total, count = 0.0, 0
        for batch in self.data.held_out_batches():
            total += self.model.loss(batch.inputs, batch.targets).item() * batch.tokens
            count += batch.tokens
        return total / count


def read_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The YAML's top-level mapping with `section.key=value` overrides applied.

    Raises:
        SettingsError: the file can't be read, or isn't a mapping of sections.
    """
    try:
        config = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise SettingsError(error.strerror or str(error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SettingsError(error.problem or error.context or "no YAML", place) from error
    except yaml.YAMLError as error:
        raise SettingsError(str(error)) from error
    if not isinstance(config, dict):
        raise SettingsError("expected the sections model, data, train and callbacks")
    for override in overrides:
        key, equals, value = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot or section not in ("model", "data", "train"):
            raise SettingsError(f"--set {override}: expected model|data|train.key=value")
        config[section] = {**(config.get(section) or {}), name: yaml.safe_load(value)}
    return config


def section_of(config: Mapping[str, Any], name: str, kind: type[Section]) -> Section:
    """One section as its dataclass: keys known, values numbers where numbers belong (`1e-3` included).

    Raises:
        SettingsError: naming the key.
    """
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise SettingsError(f"{name}: expected a mapping, not {given!r}")
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            raise SettingsError(f"{name}.{key}: unknown key; known are {', '.join(fields)}")
        values[key] = _value(f"{name}.{key}", value, fields[key])
    return kind(**values)


def _require_positive(name: str, section: object, *keys: str) -> None:
    for key in keys:
        if getattr(section, key) < 1:
            raise SettingsError(f"{name}.{key}: expected at least 1, not {getattr(section, key)}")


def _value(key: str, value: Any, kind: str) -> Any:
    if value is None and kind.endswith("None"):
        return None
    if kind == "float" and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    if (kind.startswith("int") and type(value) is int) or (kind == "str" and isinstance(value, str)):
        return value
    raise SettingsError(f"{key}: expected {kind}, not {value!r}")


def wants_monitor(config: Mapping[str, Any]) -> bool:
    """Whether `callbacks:` holds a TrainMonitor entry, the only type of callback that this program knows.

    Raises:
        SettingsError: another type, or no list of mappings.
    """
    callbacks = config.get("callbacks") or []
    if not isinstance(callbacks, list):
        raise SettingsError("callbacks: expected a list")
    for index, entry in enumerate(callbacks):
        kind = entry.get("type") if isinstance(entry, dict) else entry
        if kind != "TrainMonitor":
            raise SettingsError(f"callbacks[{index}]: unknown type {kind!r}; this program knows TrainMonitor")
    return bool(callbacks)


def train(training: Training, monitor: str | None) -> int:
    """All steps, then the results; `monitor` is the YAML that configures it. Returns the exit status."""
    steps = training.config.steps
    if monitor is None:
        for _ in range(steps):
            training.step(NoMonitor())
    else:
        mon = trainmon.attach(training.model, training.optimizer, config=monitor, total_steps=steps)
        try:
            with mon:
                for _ in range(steps):
                    training.step(mon)
                    if mon.should_stop:
                        break
        finally:  # after Ctrl-C, too
            mon.print_summary()
    show_results(training)
    return 0


def show_results(training: Training) -> None:
    """Prints the loss on the text that was held out, and what the model writes."""
    loss = training.held_out_loss()
    bits, untrained = loss / math.log(2), math.log(256)
    print(f"held-out loss: {loss:.3f} nat/byte, {bits:.2f} bit/byte (untrained: {untrained:.3f} nat)")
    sample = training.model.generate(PROMPT, SAMPLE_BYTES, seed=training.config.seed).decode(errors="replace")
    print("sample:")
    for line in sample.splitlines():
        print("  " + "".join(character if character.isprintable() else "?" for character in line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit status: 0, 2 for a configuration that can't be used, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's own documentation, watched by trainmon."
    )
    parser.add_argument("config", nargs="?", type=Path, default=Path(__file__).with_name("train.yaml"))
    parser.add_argument("--steps", type=int, help="train so many steps instead of train.steps")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    if options.steps is not None:
        options.overrides.append(f"train.steps={options.steps}")
    try:
        config = read_config(options.config, options.overrides)
        monitor = str(options.config) if wants_monitor(config) else None
        training = Training(
            section_of(config, "model", ModelConfig),
            section_of(config, "data", DataConfig),
            section_of(config, "train", TrainConfig),
        )
        return train(training, monitor)
    except SettingsError as error:
        print(f"{options.config}{error.place}: {error}", file=sys.stderr)
        return 2
    except trainmon.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
