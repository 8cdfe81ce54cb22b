"""Random cases for the driver of the recorded ones, and runs of them under a monitor of choice, in a process of its own.

    python -m tests.msprobe.random_cases MONITOR FIRST LAST DIRECTORY

MONITOR is ``none``, ``default``, ``v2`` or ``msprobe``; tables go to ``DIRECTORY/<number>/MONITOR``, what the driver
returns to ``DIRECTORY/MONITOR.json``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
#: Where ``make bench`` installs msProbe.
PEERS = REPOSITORY / "build" / "peers"
TOKENS = ("tied", "sparse", "gpt")
MODELS = (
    *TOKENS,
    *("mlp", "mlp_inplace", "twice", "kw", "dict", "conv", "scalar", "late", "ckpt", "types", "wide"),
    *("adds_inplace", "two_in", "multi_out", "chunks"),
)
INPUTS = ("nan_input", "inf_input", "neginf_input")
ACTIONS = (
    *("stop", "start", "save_state", "load_state", "eval_forward", "poison_grad_nan", "poison_grad_inf"),
    *("make_scheduler", "rescale_weight", "skip_optimizer", "closure", "manual_step", "inf_loss"),
    *INPUTS,
)
OPS = ("min", "max", "mean", "norm", "nans", "zeros", "MAX")


def random_case(number: int) -> dict[str, Any]:
    """The case of a number; always the same one."""
    draw = random.Random(number)

    def chance(share: float) -> bool:
        return draw.random() < share

    model = draw.choice(MODELS)
    plain = model not in (*TOKENS, "types")
    case: dict[str, Any] = {
        "name": str(number),
        "model": model,
        "dtype": draw.choice(["f32"] * 4 + ["bf16", "f16", "f64"]) if plain else "f32",
        "optimizer": draw.choice(["sgd", "sgdm"] + ["adam", "adamw", "amsgrad"] * (model != "sparse")),
        "steps": draw.randint(1, 6),
        "micro": draw.choice([1, 1, 2, 3]),
        "config": {"monitors": _monitors(draw)},
    }
    config = case["config"]
    bounds = {
        "start_step": (0, 2),
        "step_interval": (1, 3),
        "step_count_per_record": (1, 4),
        "stop_step": (0, 6),
        "collect_times": (0, 4),
    }
    config |= {key: draw.randint(*ends) for key, ends in bounds.items() if chance(0.3)}
    if chance(0.4):
        case["context"] = {draw.choice(["grad_acc_steps", "micro_batch_number"]): draw.randint(1, 3)}
    rare = {
        "hold_nodes": True,
        "scaler": True,
        "scheduler": "before",
        "start_late": True,
        "step_after_stop": True,
    }
    case |= {key: value for key, value in rare.items() if chance(0.12)}
    if plain and chance(0.1):
        case["input_grad"] = True
    if chance(0.08):
        case["rows"] = draw.choice([0, 1, 7])
    if chance(0.1):
        case["data_scale"] = 2.0 ** draw.choice([-60, 40, 120])
    if chance(0.15):
        case["manual_step"] = True
        if chance(0.7):
            config["patch_optimizer_step"] = False
    if chance(0.05):
        case["start_without"] = [draw.choice(["optimizer", "model"])]
    script = _script(draw, case) if chance(0.5) else {}
    if case.get("start_late"):
        script.setdefault(str(draw.randrange(case["steps"])), []).append("start")
    if model == "late":
        script.setdefault(str(case["steps"] // 2), []).append("use_extra")
    return {**case, "script": script}


def _monitors(draw: random.Random) -> dict[str, Any]:
    monitors: list[tuple[str, dict[str, Any]]] = []
    for name in ("module", "weight_grad", "optimizer", "param"):
        if draw.random() < 0.3:
            continue
        settings: dict[str, Any] = {"enabled": True}
        if draw.random() < 0.3:
            settings["ops"] = draw.sample(OPS, draw.randint(1, 4))
        if name == "module" and draw.random() < 0.2:
            settings["targets"] = draw.choice([["fc"], ["1"], ["fc1", "fc2"], ["net"], [""]])
        if name == "weight_grad":
            settings |= {"monitor_mbs_grad": True} if draw.random() < 0.3 else {}
            settings |= {"micro_batch_number": draw.randint(0, 3)} if draw.random() < 0.3 else {}
        monitors.append((name if draw.random() < 0.9 else name.upper(), settings))
    draw.shuffle(monitors)
    return dict(monitors)


def _script(draw: random.Random, case: dict[str, Any]) -> dict[str, list[str]]:
    spoilt = {"conv", "types", "scalar", *TOKENS}  # their batches have no element to spoil, or hold no floats
    script: dict[str, list[str]] = {}
    for step in range(case["steps"]):
        action = draw.choice(ACTIONS)
        if draw.random() > 0.4 or (
            (
                action in INPUTS
                and (case["model"] in spoilt or case.get("rows", 4) < 2 or case.get("input_grad"))
            )
            or (action == "closure" and case.get("scaler"))
            or (action.startswith("poison") and case["model"] in ("scalar", "types", "wide", "sparse"))
        ):
            continue
        if action == "load_state":
            script.setdefault(str(max(0, step - 1)), []).append("save_state")
        script.setdefault(str(step), []).append(action)
    return script


class Unmonitored:
    """Has the calls of a monitor, and does nothing."""

    def __init__(self, path: str) -> None: ...

    def start(self, **context: Any) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...


def monitor(name: str) -> Callable[[str], Any]:
    """What makes a monitor from the path of its configuration."""
    if name == "none":
        return Unmonitored
    if name == "msprobe":
        sys.path.append(str(PEERS))
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2 as Theirs

        return Theirs
    from trainmon.msprobe import TrainerMonitorV2

    more = {"compat": "msprobe-v2"} if name == "v2" else {}
    return lambda path: TrainerMonitorV2({**json.loads(Path(path).read_text()), **more})


def run(name: str, first: int, last: int, root: Path) -> None:
    """Runs cases ``first`` to ``last - 1``."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(Path(__file__).parent / "goldens"))
    import models  # type: ignore[import-not-found]

    make, results = monitor(name), {}
    for number in range(first, last):
        out = root / str(number) / name
        out.mkdir(parents=True)
        results[str(number)] = models.run_case(random_case(number), make, str(out))
    (root / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.dup2(2, 1)  # msProbe prints
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
