"""Classes, hooks and keywords under the host's module paths: the fakes', and the real package's where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# Hook -> keywords that it is sent, beside state or context; "*" marks positional ones.
G1 = {
    **dict.fromkeys(("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"), ()),
    **dict.fromkeys(("on_step_begin", "on_substep_end"), ()),
    "on_pre_optimizer_step": ("grad_norm",),
    "on_step_end": ("loss", "grad_norm"),
    "on_log": ("metrics",),
    "on_save": ("checkpoint_dir",),
    "on_load": ("checkpoint_dir",),
    "on_evaluate": ("metrics",),
}
G2 = {
    "on_init_end": ("args", "model", "optimizer", "lr_scheduler", "mesh", "dp_group", "tp_group", "cp_group"),
    **dict.fromkeys(
        ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"), ()
    ),
    "on_after_grad_sync": (),
    "on_resume": ("checkpoint_path", "metadata"),
    "on_forward_end": ("outputs", "micro_batch"),
    "on_micro_batch_end": ("micro_batch_index", "loss", "tokens"),
    "on_before_optimizer_step": ("grad_norm", "grad_norm_after_clip"),
    "on_step_end": ("loss", "grad_norm", "metrics", "tokens", "lr"),
    "on_log": ("metrics",),
    "on_save": ("checkpoint_path", "checkpoint_dir", "success", "metadata"),
    "on_exception": ("exception",),
    "on_evaluate_begin": (),
    "on_evaluate_end": ("metrics",),
    "on_predict": ("results",),
    "on_prediction_step": (),
    "on_memory_snapshot": (),
    "on_communication_step": ("metrics",),
    "on_profiler_step": (),
}
G3 = {
    **dict.fromkeys(("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"), ()),
    "on_step_begin": ("micro_batches",),
    "on_micro_step_begin": ("*micro_batch",),
    "on_micro_step_end": (),
    "on_step_end": ("loss", "loss_dict", "grad_norm"),
}
CONTROL = (
    "should_training_stop",
    "should_epoch_stop",
    "should_skip_step",
    "should_skip_optimizer_step",
    "should_log",
    "should_evaluate",
    "should_save",
    "metadata",
)


def real_package() -> bool:
    """Installed, and not one of the packages beside this file."""
    spec = importlib.util.find_spec("hyper_parallel")
    return spec is not None and str(Path(__file__).parent) not in str(spec.origin)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "hyper_parallel"]:
        del sys.modules[name]


@pytest.fixture(params=["fake G1", "fake G2", "fake G3", "real"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the generation's package first on the path."""
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    if request.param == "real":
        if not real_package():
            pytest.skip("HyperParallel is not installed: its fakes alone were tested")
        yield next(
            g
            for g, name in (("G2", "callbacks.manager"), ("G3", "text_trainer"), ("G1", "base"))
            if has(name)
        )
        return
    number = request.param[-1]
    monkeypatch.syspath_prepend(str(Path(__file__).parent / f"package_g{number}"))
    forget()
    yield f"G{number}"
    forget()


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"hyper_parallel.trainer.{module}") is not None
    except ModuleNotFoundError:
        return False


def found(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"hyper_parallel.trainer.{module}"), name)


def takes(callback: Any, hooks: dict[str, tuple[str, ...]]) -> None:
    own = {name for name in dir(callback) if name.startswith("on_")}
    assert own == set(hooks)
    for hook, keywords in hooks.items():
        positional = [None for keyword in keywords if keyword.startswith("*")]
        named = {keyword: None for keyword in keywords if not keyword.startswith("*")}
        inspect.signature(getattr(callback, hook)).bind(None, None, *positional, **named)


def test_shape(generation: str) -> None:
    base = found("base", "BaseTrainer")
    if generation == "G2":
        assert found("callbacks", "BaseCallback") is found("callbacks.base", "BaseCallback")
        takes(found("callbacks", "BaseCallback"), G2)
        assert found("callbacks", "BaseCallback").priority == 0
        assert {hook.value for hook in found("callbacks", "CallbackHookNames")} == set(G2)
        assert tuple(f.name for f in fields(found("callbacks", "TrainerControl"))) == CONTROL
        manager = found("callbacks.manager", "CallbackManager")
        for name in ("register", "unregister", "has_listeners", "dispatch", "callbacks", "aggregate_control"):
            assert hasattr(manager, name)
        assert all(hasattr(base, hook) for hook in (*G2, "add_callback", "remove_callback"))
        inspect.signature(base).bind(None, callbacks=None, setup=True)
        inspect.signature(found("llm_trainer", "LLMTrainer")).bind(None, callbacks=[])
        return
    callback = found("callbacks.base", "Callback")
    assert found("callbacks", "Callback") is callback
    inspect.signature(callback).bind(None)
    if generation == "G1":
        takes(callback, G1)
        assert hasattr(base, "add_callback") and hasattr(base, "_non_pp_clip_grad_norm")
        inspect.signature(found("llm_trainer", "LLMTrainer")).bind(None)
        return
    takes(callback, G3)
    assert {f.name for f in fields(found("state", "TrainerState"))} == {"global_step", "epoch"}
    assert all(hasattr(base, hook) for hook in set(G3) - {"on_micro_step_end"})
    for module, name in (("text_trainer", "TextTrainer"), ("vlm_trainer", "VLMTrainer")):
        inspect.signature(found(module, name)).bind(None)
    for name in ("get_global_rank_safe", "get_local_rank_safe", "get_world_size_safe", "all_reduce"):
        assert callable(found("runtime.distributed", name))
