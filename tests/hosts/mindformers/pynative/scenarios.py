"""The trainings of these tests: one process for each version of MindFormers, since importing one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["FILES", "LENGTH", "NEWEST", "SCENARIOS", "VERSIONS", "VOCABULARY", "sequences"]

NEWEST = "2.1.0"
VERSIONS = (NEWEST, "2.0.0", "1.9.0")

VOCABULARY, LENGTH = 32, 6

Keys = dict[str, Any]


def sequences(count: int) -> Iterator[tuple[Any, Any]]:
    """Ids and labels."""
    random = np.random.RandomState(11)
    for _ in range(count):
        ids = random.randint(0, VOCABULARY, LENGTH + 1).astype(np.int32)
        yield ids[:-1], ids[1:]


QUIET: Keys = {"sinks": {"log": False, "blackbox": False}}
EVERYTHING: Keys = {
    **QUIET,
    "gradients": {
        "per_parameter": True,
        "clipped": True,
        "local": True,
        "device": True,
        "micro": True,
        "increment": True,
        "micro_every": 1,
    },
    "loss": {"micro": True},
    "weights": {"every": 1},
    "moments": {"every": 1},
}


def entry(name: str, **keys: Any) -> Keys:
    """An entry of the host's YAML."""
    return {"output_dir": ".", "run_name": name, **QUIET, **keys}


def rule(series: str, action: str) -> Keys:
    return {"rules": [{"series": [series], "detector": "nonfinite", "name": "finite", "action": action}]}


def training(**keys: Any) -> Keys:
    return {"training": keys}


#: Two looks at what is usual, then whatever is a hundred times that.
SPIKE: Keys = {
    "series": ["grad/norm"],
    "name": "spike",
    "detector": "ewma",
    "parameters": {"k": 10, "log": True, "warmup": 2},
    "action": "log",
}

_COMMON: list[Keys] = [
    {"name": "everything", "api": EVERYTHING},
    {"name": "unwatched"},
    {
        "name": "entry",
        "entry": entry("entry", gradients={"per_parameter": True}),
        "model": {"result": "dict"},
    },
    {"name": "nan", "api": {**QUIET, "health": rule("loss/global", "stop")}, "model": {"nan_at": 3}},
]
for _one in _COMMON:  # 1.9.0 knows no other results of a model
    _one["model"] = {"result": "dict", **_one.get("model", {})}

_STATE: Keys = {
    "local_norm": True,
    "local_loss": True,
    "device_norm": True,
    "device_loss": True,
}

_NEWEST: list[Keys] = [
    {
        "name": "followed",
        "host": {
            "monitor": {
                "train_state": _STATE,
                "tensorboard": {"output_dir": "events"},
            }
        },
        "entry": entry("followed", gradients={"local_norm_increment": True}),
    },
    {
        "name": "substrings",
        "host": {"monitor": {"train_state": {"local_norm": ["inner", "tab.e"]}}, **training(steps=1)},
        "api": QUIET,
    },
    {
        "name": "experts",
        "model": {"experts": True},
        "host": {
            "training": {"steps": 2},
            "monitor": {"moe_monitor": {"save_tokens_per_expert_interval": 1, "target_layers": None}},
        },
        "api": {**QUIET, "moe": {"per_expert": True, "capacity_factor": 1.0}},
    },
    {
        "name": "layers",
        "model": {"experts": True},
        "host": {
            "training": {"steps": 3},
            "monitor": {"moe_monitor": {"save_tokens_per_expert_interval": 3, "target_layers": [1, 7]}},
        },
        "api": QUIET,
    },
    {
        "name": "skipped",
        "model": {"nan_at": 3},
        "host": training(use_skip_step_on_nan=True),
        "api": {**QUIET, "health": rule("grad/norm", "log")},
    },
    {"name": "raised", "raises": 2, "api": QUIET},
    {
        "name": "half",
        "model": {"dtype": "float16"},
        "host": {"monitor": {"train_state": {"local_norm": True}}},
        "api": {**EVERYTHING, "updates": {"every": 1}, "spectral": {"every": 1, "elements": 1 << 30}},
    },
    {"name": "idle", "model": {"idle": True}, "host": training(steps=1), "api": EVERYTHING},
    {
        "name": "zero",
        "host": training(max_norm=0.0, steps=1),
        "api": {**QUIET, "gradients": {"per_parameter": True}},
    },
    {
        "name": "spikes",
        "host": training(steps=4, max_norm=1e9),
        "model": {"spike_at": 5},
        "api": {**QUIET, "health": {"rules": [SPIKE]}},
    },
    {
        "name": "logits",
        "model": {"logits": True},
        "logits_monitor": 2,
        "api": {**QUIET, "attention": {"every": 1, "per_head": True}},
    },
    {"name": "tracked", "model": {"logits": True}, "host": training(steps=2), "api": QUIET},
    {"name": "resets", "model": {"logits": True}, "api": {**QUIET, "attention": {"every": 1}}},
    {
        "name": "rampup",
        "host": training(steps=4, global_batch_size=4, rampup_batch_size=[2, 2, 4]),
        "api": {**QUIET, "gradients": {"micro": True, "micro_every": 1}},
    },
    {
        "name": "first",
        "host": {"checkpoint": {"enable_save": True, "save_path": "kept", "save_interleaved_steps": 2}},
        "api": QUIET,
    },
    {
        "name": "first",
        "host": {"checkpoint": {"enable_save": False}, "training": {"steps": 5}},
        "load": "kept",
        "entry": entry("first"),
    },
    {
        "name": "top",
        "host": {"trainmon": entry("top", weights={"every": 1}), **training(steps=1)},
        "entry": {"auto_register": None},
    },
    {"name": "both", "host": {"trainmon": {"every": 2}, **training(steps=1)}, "entry": entry("both")},
    {"name": "misspelt", "host": training(steps=1), "entry": entry("misspelt", gradientz=True)},
    {
        "name": "cant",
        "host": training(steps=1),
        "entry": entry("cant", health=rule("grad/norm", "skip_step")),
    },
    {"name": "file", "host": training(steps=1), "entry": {"config": "file.yaml", "run_name": "file"}},
    {"name": "deterministic", "host": training(steps=1, deterministic=True), "api": QUIET},
    {
        "name": "broken",
        "api": EVERYTHING,
        "broken": [
            "session:number",
            "rates:Rates.take",
            "updates:UpdateHooks._shown",
            "gradients:host_view",
            "forward:_loss",
        ],
    },
    {
        "name": "comparable",
        "host": {
            **training(max_norm=1e9),
            "optimizer": {"weight_decay": 0.0},
            "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 0.01, "warmup_steps": 0},
        },
        "api": EVERYTHING,
    },
    {"name": "dies", "raises": 2, "dies": True, "api": QUIET},
]

_LINES: Keys = {
    "name": "lines",
    "host": {"monitor": {"train_state": {"local_norm": True, "local_loss": True, "device_loss": True}}},
    "api": QUIET,
    "model": {"result": "dict"},
}

#: By version.
SCENARIOS: dict[str, list[Keys]] = {version: [*_COMMON, _LINES] for version in VERSIONS}
# Before the trainer is made, which changes how gradients are recorded.
SCENARIOS[NEWEST] = [{"name": "model_train", "plain": True, "api": EVERYTHING}, *_COMMON, *_NEWEST]
#: Files that the trainings read.
FILES = {"file.yaml": "output_dir: .\nsinks: {log: false, blackbox: false}\nweights: {every: 1}\n"}
