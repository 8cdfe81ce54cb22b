"""What a monitor does to a training run: beginnings, ends, failures, and the defects of msProbe that stay away."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.msprobe.loops import FOUR, MODES, adam, backward, clean, config, model, rows, train  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2  # noqa: E402


@pytest.mark.skipif(importlib.util.find_spec("mindspore") is not None, reason="it is there")
def test_mindspore_needs_mindspore(tmp_path: Path) -> None:
    """What it does there: tests/hosts/mindspore/test_msprobe.py."""
    monitor = TrainerMonitorV2(config(tmp_path, "module", framework="mindspore"))
    with pytest.raises(ModuleNotFoundError, match="mindspore"):
        monitor.start(model=model())


@pytest.mark.parametrize("mode", MODES)
def test_step_after_stop(tmp_path: Path, mode: str) -> None:
    """T-02."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer)
    mon.stop()
    mon.stop()
    assert clean(net, optimizer)
    train(net, optimizer)
    assert mon.current_step == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_two_monitors_end_in_any_order(tmp_path: Path, order: str, wrapped: bool, mode: str) -> None:
    """T-02."""
    net = model()
    inner = adam(net)
    optimizer: Any = Wrapper(inner) if wrapped else inner
    mons = {}
    for name in "ab":
        mons[name] = TrainerMonitorV2(config(tmp_path / name, "param", mode=mode))
        mons[name].start(net, optimizer)
    train(net, optimizer)
    for name in order:
        mons[name].stop()
        train(net, optimizer)
    assert [mons[name].current_step for name in order] == [1, 2]
    before = [one.clone() for one in net.parameters()]
    train(net, optimizer)
    assert not any(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["default", "extended"])
def test_unreduced_rows_of_a_plain_model(tmp_path: Path, mode: str) -> None:
    """T-01, D24: and none in msProbe's mode, where nothing holds the node."""
    for kind, scopes in ((mode, ["unreduced"] * 4 + ["reduced"] * 4), ("v2", ["reduced"] * 4)):
        net = model()
        optimizer = adam(net)
        mon = TrainerMonitorV2(config(tmp_path / kind, "weight_grad", mode=kind))
        mon.start(net, optimizer)
        train(net, optimizer)
        mon.stop()
        found = rows(tmp_path / kind, "weight_grad")
        assert [row["scope"] for row in found] == scopes
    assert [row["module_name"] for row in rows(tmp_path / mode, "weight_grad")[:2]] == ["2.bias", "2.weight"]


class Fails(torch.optim.SGD):
    """Raises where it is called for the second time."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the user's own")
        return super().step(closure)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_fails_and_is_tried_again(tmp_path: Path, mode: str) -> None:
    """T-16: one set of rows; msProbe's mode keeps its two."""
    net = model()
    optimizer = Fails(net.parameters(), lr=0.1)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad", "param", mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer)
    optimizer.zero_grad()
    backward(net)
    with pytest.raises(RuntimeError, match="the user's own"):
        optimizer.step()
    optimizer.step()
    mon.stop()
    again = [row for row in rows(tmp_path, "weight_grad") if row["step"] == "1" and row["scope"] == "reduced"]
    assert len(again) == (8 if mode == "v2" else 4)
    origin = [row for row in rows(tmp_path, "param") if (row["step"], row["scope"]) == ("1", "param_origin")]
    assert len(origin) == len(again)


@pytest.mark.parametrize("mode", MODES)
def test_state_that_is_loaded_is_what_is_read(tmp_path: Path, mode: str) -> None:
    """T-18: in every mode; and what it has replaced is not kept alive."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "optimizer", mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer)
    first = next(iter(optimizer.state.values()))["exp_avg"]
    gone = weakref.ref(first)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 7.0)
    optimizer.load_state_dict(saved)
    del first, saved, state
    gc.collect()
    assert gone() is None
    for one in net.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    mon.stop()
    found = [row for row in rows(tmp_path, "optimizer") if (row["step"], row["scope"]) == ("1", "exp_avg")]
    assert len(found) == 4
    assert [float(row["max"]) for row in found] == pytest.approx([7.0 * 0.9] * 4)


class Derives(torch.optim.Adam):
    """Does something beside, as users' classes do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_within_a_step_is_one(tmp_path: Path, mode: str) -> None:
    net = model()
    adam(net)  # from here on torch runs the hooks in the base class, too
    optimizer = Derives(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode))
    mon.start(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(net, optimizer)
            scheduler.step()
    assert mon.current_step == 3
    mon.stop()
    assert len(rows(tmp_path, "param")) == 3 * 8
    train(net, optimizer)
    assert mon.current_step == 3


class Wrapper:
    """Has what wrappers have: the optimizer inside and a step of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Derived(torch.optim.Optimizer):
    """An optimizer in name alone: its base was never initialised."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("kind", [Wrapper, Derived])
@pytest.mark.parametrize("mode", MODES)
def test_wrappers(tmp_path: Path, kind: Any, mode: str) -> None:
    """T-12."""
    net = model()
    optimizer = kind(adam(net))
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer, 2)
    mon.stop()
    assert mon.current_step == 2
    assert len(rows(tmp_path, "optimizer")) == 2 * 8
    assert len(rows(tmp_path, "param")) == 2 * 8
    assert optimizer.step.__func__ is kind.step


@pytest.mark.parametrize("mode", MODES)
def test_start_twice_is_one_start(tmp_path: Path, mode: str) -> None:
    """T-03."""
    net, other = model(), model()
    a, b = adam(net), adam(other)
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode))
    mon.start(net, a)
    mon.start(other, b)
    assert clean(other, b)
    train(net, a)
    train(other, b)
    assert mon.current_step == 1
    mon.stop()
    assert clean(net, a)


@pytest.mark.parametrize("mode", MODES)
def test_a_start_that_fails_leaves_nothing(tmp_path: Path, mode: str) -> None:
    """T-06."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "module", "weight_grad", mode=mode))
    with pytest.raises(ValueError):
        mon.start(net)
    assert clean(net, optimizer)
    mon.start(net, optimizer)
    train(net, optimizer)
    mon.stop()
    assert rows(tmp_path, "weight_grad")
    assert clean(net, optimizer)


@pytest.mark.parametrize(
    ("monitor", "given"),
    [("module", "optimizer"), ("weight_grad", "model"), ("optimizer", "model"), ("optimizer", "optimizer"),
     ("param", "model"), ("param", "optimizer")],
)  # fmt: skip
def test_what_monitors_need(tmp_path: Path, monitor: str, given: str) -> None:
    net = model()
    things: dict[str, Any] = {"model": net, "optimizer": adam(net)}
    with pytest.raises(ValueError):
        TrainerMonitorV2(config(tmp_path, monitor)).start(**{given: things[given]})


@pytest.mark.parametrize("mode", MODES)
def test_start_after_stop(tmp_path: Path, mode: str) -> None:
    """T-07."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    for _ in range(2):
        mon.start(net, optimizer)
        train(net, optimizer)
        mon.stop()
        mon.stop()
    assert {row["step"] for row in rows(tmp_path, "module")} == {"0", "1"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("patched", [True, False])
def test_a_directory_that_goes_away(
    tmp_path: Path, mode: str, patched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """T-08."""
    net = model()
    optimizer = adam(net)
    out = tmp_path / "out"
    mon = TrainerMonitorV2(config(out, "param", mode=mode, patch_optimizer_step=patched))
    mon.start(net, optimizer)

    def step() -> None:
        train(net, optimizer)
        if not patched:
            mon.step()

    step()
    shutil.rmtree(out)
    out.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        step()
        step()
    assert caplog.text.count("can't be written") == 1
    assert mon.write_errors == 2
    out.unlink()
    step()
    mon.stop()
    assert {row["step"] for row in rows(out, "param")} == {"3"}
    assert "written again" in caplog.text


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """T-08: what did not fit is cut off again, and training goes on."""
    script = f"""
import resource, signal
from tests.msprobe.loops import *
from trainmon.msprobe import TrainerMonitorV2
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
net = model(); optimizer = adam(net)
mon = TrainerMonitorV2(config(Path({str(tmp_path)!r}), "param", step_count_per_record=100))
mon.start(net, optimizer)
train(net, optimizer)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
train(net, optimizer, 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
train(net, optimizer)
mon.stop()
assert mon.write_errors > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], timeout=120)
    steps = [row["step"] for row in rows(tmp_path, "param")]
    assert steps[:8] == ["0"] * 8 and steps[-8:] == ["4"] * 8 and len(steps) % 8 == 0


@pytest.mark.parametrize("mode", MODES)
def test_schedulers(tmp_path: Path, mode: str) -> None:
    """T-13, T-45."""
    net = model()
    optimizer = adam(net)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode))
    mon.start(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net, optimizer)
        early.step()
        late = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(net, optimizer)
        late.step()
    mon.stop()
    assert mon.current_step == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_model_is_a_model(tmp_path: Path, mode: str) -> None:
    """T-14."""
    net = nn.Sequential()
    mon = TrainerMonitorV2(config(tmp_path, "module", mode=mode))
    mon.start(net)
    net(torch.ones(2))
    mon.step()
    mon.stop()
    assert [row["module_name"] for row in rows(tmp_path, "module")] == [".input.0", ".output.0"]


def test_state_that_comes_late(tmp_path: Path) -> None:
    """T-19; msProbe's mode goes on without it."""
    for mode, count in (("default", 8), ("v2", 4)):
        net = model()
        net[2].requires_grad_(False)
        optimizer = adam(net)
        mon = TrainerMonitorV2(config(tmp_path / mode, "optimizer", mode=mode))
        mon.start(net, optimizer)
        train(net, optimizer)
        net[2].requires_grad_(True)
        train(net, optimizer)
        mon.stop()
        last = [row for row in rows(tmp_path / mode, "optimizer") if row["step"] == "1"]
        assert len(last) == count


def test_parameters_unfrozen_later_are_seen(tmp_path: Path) -> None:
    net = model()
    net[2].requires_grad_(False)
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad"))
    mon.start(net, optimizer)
    train(net, optimizer)
    net[2].requires_grad_(True)
    train(net, optimizer, 2)
    mon.stop()
    last = [row["module_name"] for row in rows(tmp_path, "weight_grad") if row["step"] == "2"]
    assert last.count("2.weight") == 2  # unreduced and reduced


def test_an_optimizer_without_moments_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T-20, T-43."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mon = TrainerMonitorV2(config(tmp_path, "optimizer", "module"))
    mon.start(net, optimizer)
    train(net, optimizer, 6)
    mon.stop()
    assert caplog.text.count("'optimizer' had no rows") == 1
    assert "'module'" not in caplog.text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("monitor", "keys", "reason"),
    [
        ("module", {"targets": ["nothing has this name"]}, "no module that targets select was called"),
        ("weight_grad", {}, "no parameter has had a gradient"),
        ("param", {}, "the optimizer has not stepped"),
        ("optimizer", {}, "keeps neither exp_avg nor exp_avg_sq"),
    ],
)
def test_a_monitor_without_rows_says_why(
    tmp_path: Path, monitor: str, keys: Any, reason: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T-43."""
    net = model()
    net.requires_grad_(monitor not in ("weight_grad", "optimizer"))
    entry = config(tmp_path, monitor, mode=mode, patch_optimizer_step=False)
    entry["monitors"][monitor] |= keys
    mon = TrainerMonitorV2(entry)
    optimizer = adam(net)
    mon.start(net, optimizer)
    for _ in range(5):
        if monitor != "param":
            net(torch.ones(2, 3))
            optimizer.step()
        mon.step()
    mon.stop()
    assert caplog.text.count(reason) == 1
    assert f"'{monitor}' had no rows in 3 written steps" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_with_other_columns(tmp_path: Path, mode: str) -> None:
    """T-21, T-22, D18, D19."""
    for ops in (["min", "max"], ["norm"], ["norm"], ["min", "max"]):
        net = model()
        optimizer = adam(net)
        mon = TrainerMonitorV2(
            config(tmp_path, mode=mode, step_count_per_record=10)
            | {"monitors": {"param": {"enabled": True, "ops": ops}}}
        )
        mon.start(net, optimizer)
        train(net, optimizer)
        mon.stop()
    for name, header, count in (("", "min,max", 16), (".part2", "norm", 16)):
        lines = (tmp_path / "rank_0" / f"param_step0-9{name}.csv").read_bytes().split(b"\r\n")
        assert lines[0] == f"vpp_stage,step,module_name,scope,{header}".encode()
        assert len(lines) == count + 2
        assert {line.count(b",") for line in lines[:-1]} == {lines[0].count(b",")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_restart_after_a_run_that_was_killed(tmp_path: Path, mode: str, asynchronous: bool) -> None:
    """The row that it was writing spoils no other."""
    for run in range(2):
        net = model()
        optimizer = adam(net)
        mon = TrainerMonitorV2(
            config(tmp_path, "param", mode=mode, step_count_per_record=10, async_write=asynchronous)
        )
        mon.start(net, optimizer)
        train(net, optimizer)
        mon.stop()
        path = tmp_path / "rank_0" / "param_step0-9.csv"
        if run == 0:
            os.truncate(path, path.stat().st_size - 9)
    lines = path.read_bytes().split(b"\r\n")
    assert lines[9:-1] == [*lines[1:8], lines[-2]] and len(lines) == 1 + 8 + 8 + 1
    assert lines[-2].startswith(lines[8]) and len(lines[8]) == len(lines[-2]) - 7


def test_a_file_of_no_bytes_gets_its_header(tmp_path: Path) -> None:
    """T-23."""
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "param_step0-0.csv").touch()
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param"))
    mon.start(net, optimizer)
    train(net, optimizer)
    mon.stop()
    assert len(rows(tmp_path, "param")) == 8


def test_evaluation_keeps_no_tensors(tmp_path: Path) -> None:
    """T-25."""
    net = model()
    mon = TrainerMonitorV2(config(tmp_path, "module"))
    mon.start(net)
    held = []
    for _ in range(5):
        output = net(torch.ones(2, 3))
        held.append(weakref.ref(output))
        del output
    gc.collect()
    assert not any(one() is not None for one in held)
    mon.stop()
    assert not rows(tmp_path, "module")


def test_micro_batches_that_were_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T-28."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad"))
    mon.start(net, optimizer)
    for _ in range(2):
        for _ in range(4):
            backward(net)
        optimizer.step()
    mon.stop()
    assert caplog.text.count("4 micro-batches") == 1


def test_a_parameter_without_gradient_has_no_row(tmp_path: Path) -> None:
    """T-32."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad"))
    mon.start(net, optimizer)
    train(net, optimizer)
    optimizer.zero_grad()
    net[2](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    mon.stop()
    last = {row["module_name"] for row in rows(tmp_path, "weight_grad") if row["step"] == "1"}
    assert last == {"2.weight", "2.bias"}


def test_names_in_chunks(tmp_path: Path) -> None:
    """T-33: weights tied in a chunk and across chunks, chunks of other ranks, names that look like a chunk's."""
    first, last = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    first[1].weight = first[0].weight
    last[0].bias = first[1].bias
    last.register_parameter("7:w", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()])
    mon = TrainerMonitorV2(config(tmp_path, "param", "module"))
    mon.start([None, first, last], optimizer)
    last(first(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    mon.stop()
    found = [(row["module_name"], row["vpp_stage"]) for row in rows(tmp_path, "param")]
    assert found[: len(found) // 2] == [
        ("1:0.weight", "1"),
        ("1:0.bias", "1"),
        ("2:0.bias", "2"),
        ("2:7:w", "2"),
        ("2:0.weight", "2"),
    ]
    assert rows(tmp_path, "module")[0]["module_name"] == "1:.input.0"

    alone = nn.Module()
    alone.register_parameter("7:w", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.Adam(alone.parameters())
    mon = TrainerMonitorV2(config(tmp_path / "alone", "param"))
    mon.start(alone, optimizer)
    optimizer.step()
    mon.stop()
    assert {row["vpp_stage"] for row in rows(tmp_path / "alone", "param")} == {"-1"}


def test_of_a_model_without_parameters_the_optimizers_are_watched(tmp_path: Path) -> None:
    held = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adam(held)
    mon = TrainerMonitorV2(config(tmp_path, "param"))
    mon.start(nn.Module(), optimizer)
    optimizer.step()
    mon.stop()
    assert [row["module_name"] for row in rows(tmp_path, "param")] == ["param_0", "param_1"] * 2


def test_two_models_do_not_disturb_each_other(tmp_path: Path) -> None:
    """T-35."""
    net, other = model(), model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad") | {"monitors": {"weight_grad": {"enabled": True,
        "monitor_mbs_grad": True, "micro_batch_number": 2}}})  # fmt: skip
    mon.start(net, optimizer)
    backward(net)
    backward(other)
    backward(net)
    optimizer.step()
    mon.stop()
    micros = [row["micro_step"] for row in rows(tmp_path, "weight_grad") if row["scope"] == "unreduced"]
    assert micros == ["1"] * 4 + ["2"] * 4


@pytest.mark.parametrize("mode", MODES)
def test_outside_the_window_nothing_is_read(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T-36, T-37: no reduction, no row with its name, no look at the state."""
    from trainmon.adapters.torch_rows import TorchRows
    from trainmon.adapters.torch_rows.meter import Meter
    from trainmon.msprobe.tables import Rows

    read: list[int] = []
    original = Meter.read
    monkeypatch.setattr(
        Meter, "read", lambda self, tensors: read.append(len(tensors)) or original(self, tensors)
    )
    for owner, name in (
        (Rows, "add"),
        (TorchRows, "moments"),
        (TorchRows, "gradients"),
        (TorchRows, "weights"),
    ):
        done = getattr(owner, name)

        def noted(*given: Any, done: Any = done, **more: Any) -> Any:
            read.append(0)
            return done(*given, **more)

        monkeypatch.setattr(owner, name, noted)
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode, start_step=2, step_interval=2, collect_times=2))
    mon.start(net, optimizer)
    counts = []
    for _ in range(7):
        read.clear()
        train(net, optimizer)
        counts.append(len(read))
    assert [bool(one) for one in counts] == [False, False, True, False, True, False, False]
    for module in net.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(one._post_accumulate_grad_hooks for one in net.parameters())
    assert mon.current_step == 7
    mon.stop()
    assert clean(net, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failing", FOUR)
def test_one_monitor_that_fails_is_not_the_others_end(
    tmp_path: Path, failing: str, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T-51."""
    from trainmon.adapters.torch_rows import TorchRows
    from trainmon.adapters.torch_rows.calls import CallHooks

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    owner, name = {
        "module": (CallHooks, "_enter"),
        "weight_grad": (TorchRows, "gradients"),
        "optimizer": (TorchRows, "moments"),
        "param": (TorchRows, "weights"),
    }[failing]
    monkeypatch.setattr(owner, name, fail)
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer, 2)
    mon.stop()
    for monitor in set(FOUR) - {failing}:
        assert {row["step"] for row in rows(tmp_path, monitor)} == {"0", "1"}
    assert caplog.text.count("broken") == 2  # once a step


def test_a_closure_has_its_value(tmp_path: Path) -> None:
    """T-48: rows of gradients inside it; what it returns passes through."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad"))
    mon.start(net, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(net)

    loss = optimizer.step(closure)
    mon.stop()
    assert isinstance(loss, torch.Tensor)
    assert len(rows(tmp_path, "weight_grad")) >= 4


def test_what_is_watched_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T-44."""
    net = model()
    net[0].requires_grad_(False)
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, start_step=2, step_interval=3, collect_times=3))
    with caplog.at_level(logging.INFO):
        mon.start(net, optimizer)
    mon.stop()
    assert "rank 0 watches module (4 modules); weight_grad (2 parameters (2 need no gradient))" in caplog.text
    assert "steps written: 2, 5, 8;" in caplog.text


def test_the_rank_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert TrainerMonitorV2(config(tmp_path)).rank == 3
    assert (tmp_path / "rank_3").is_dir()


class Copies(TorchDispatchMode):
    """Notes operations whose result is no view of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            if result.untyped_storage().data_ptr() not in given:
                self.made.append(str(func))
        return result


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_copied(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T-38: reading gradients, weights, state and activations makes no tensor."""
    from trainmon.adapters.torch_rows.meter import Meter

    copies = Copies()
    original = Meter.read

    def read(self: Meter, tensors: Any) -> Any:
        with copies:
            return original(self, tensors)

    monkeypatch.setattr(Meter, "read", read)
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer, 2)
    mon.stop()
    assert rows(tmp_path, "module")
    assert not copies.made


def test_manual_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param"))
    mon.start(net, optimizer)
    for _ in range(3):
        train(net, optimizer)
        mon.step()
    assert mon.current_step == 3
    assert caplog.text.count("step() is ignored") == 1
    mon.stop()
    mon.step()
    assert mon.current_step == 3  # ignored while stopped, too

    mon = TrainerMonitorV2(config(tmp_path / "manual", "param", patch_optimizer_step=False))
    mon.start(net, optimizer)
    train(net, optimizer)
    assert mon.current_step == 0
    mon.step()
    mon.stop()
    mon.step()  # counts while stopped too
    assert mon.current_step == 2


@pytest.mark.parametrize("mode", MODES)
def test_state_that_came_late_is_lost_to_msprobe_alone(tmp_path: Path, mode: str) -> None:
    """Where a window begins has no say in it."""
    net = model()
    for parameter in net[2].parameters():
        parameter.requires_grad_(False)
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "optimizer", start_step=1, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer)
    for parameter in net[2].parameters():
        parameter.requires_grad_(True)
    train(net, optimizer)
    mon.stop()
    shown = {row["module_name"].split(".")[0] for row in rows(tmp_path, "optimizer")}
    assert shown == ({"0"} if mode == "v2" else {"0", "2"})


def test_several_optimizers_step_together(tmp_path: Path) -> None:
    net = model()
    pair = [adam(net[0]), adam(net[2])]
    mon = TrainerMonitorV2(config(tmp_path, "param", "optimizer"))
    mon.start(net, pair)
    for _ in range(2):
        backward(net)
        for one in pair:
            one.step()
    mon.stop()
    assert mon.current_step == 2
    assert len(rows(tmp_path, "optimizer")) == 2 * 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["compile", "start"])
def test_a_compiled_model(tmp_path: Path, first: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """T-15, T-52: rows of what hooks are called for, and a word on the others."""
    net = model()
    optimizer = adam(net)
    compiled = torch.compile(net, backend="eager") if first == "compile" else net
    mon = TrainerMonitorV2(config(tmp_path, "module", "weight_grad", mode=mode))
    mon.start(compiled, optimizer)
    watched = torch.compile(net, backend="eager") if first == "start" else compiled
    for _ in range(2):
        optimizer.zero_grad()
        watched(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    mon.stop()
    # msProbe's mode keeps its hooks on nodes, which a compiled graph does not have.
    assert len(rows(tmp_path, "weight_grad")) == 16 or mode == "v2"
    if first == "compile":
        assert "torch.compile" in caplog.text
        names = [row["module_name"] for row in rows(tmp_path, "module")]
        assert len(names) == 2 * len(set(names)) > 0


def test_the_old_import(tmp_path: Path) -> None:
    script = """
import sys
import trainmon.msprobe as ours
assert not {"torch", "mindspore", "pandas", "matplotlib", "tensorboard"} & set(sys.modules)
assert ours.install() and ours.install()
from msprobe.core.monitor_v2.trainer import TrainerMonitorV2
from msprobe.core.monitor_v2 import TrainerMonitorV2 as again
assert TrainerMonitorV2 is again is ours.TrainerMonitorV2
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ, cwd=Path(__file__).parents[2])


def test_an_installed_msprobe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "msprobe").mkdir()
    (tmp_path / "msprobe" / "__init__.py").write_text("real = True\n")
    script = """
import trainmon.msprobe as ours
assert not ours.install()
import msprobe
assert msprobe.real
assert ours.install(force=True)
from msprobe.core.monitor_v2.trainer import TrainerMonitorV2
assert TrainerMonitorV2 is ours.TrainerMonitorV2
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("name", ["a,b", 'c"d', "new\nline"])
def test_awkward_names(tmp_path: Path, name: str) -> None:
    """Python's csv reader gives every name back."""
    net = nn.ModuleDict({name: nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(net.parameters())
    mon = TrainerMonitorV2(config(tmp_path, "param"))
    mon.start(net, optimizer)
    net[name](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mon.stop()
    assert {row["module_name"] for row in rows(tmp_path, "param")} == {f"{name}.weight", f"{name}.bias"}
    data = (tmp_path / "rank_0" / "param_step0-0.csv").read_bytes()
    assert data.count(b"\r\n") == 5
