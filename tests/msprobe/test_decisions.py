"""What each mode does where modes differ, or must not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.msprobe.loops import FOUR, MODES, adam, backward, config, model, rows, train  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2  # noqa: E402

MSPROBES = {"v2", "default"}


class Holds(nn.Module):
    """Parameters, and nothing to call."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point()))


def weights(directory: Path, mode: str, net: nn.Module) -> dict[str, dict[str, str]]:
    """Rows of a model's parameters."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    mon = TrainerMonitorV2(config(directory, "param", mode=mode))
    mon.start(net, optimizer)
    optimizer.step()
    mon.stop()
    return {row["module_name"]: row for row in rows(directory, "param")}


def collective(directory: str, mode: str, call: str) -> None:
    import torch
    import torch.distributed as dist

    mon = TrainerMonitorV2(config(Path(directory), "cc", mode=mode))
    mon.start()
    if call == "calls":
        for values in ([2.0, 6.0], [2.0], [4.0]):
            dist.all_reduce(torch.tensor(values))
    else:
        empty: list[torch.Tensor] = []
        pieces = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(pieces, torch.tensor([1.0, 3.0]))
        with pytest.raises(Exception):  # noqa: B017 (torch's own)
            dist.all_gather(empty, torch.ones(2))
    mon.step()
    mon.stop()


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_collectives(tmp_path: Path, mode: str) -> None:
    """D1: no stage. D4: norms and means of what the calls had together, or added up and averaged. D5: lists."""
    on_ranks(1, collective, str(tmp_path / "calls"), mode, "calls")
    (row,) = rows(tmp_path / "calls", "cc")
    assert row["vpp_stage"] == ""
    assert row["module_name"] == "all_reduce/rank0/post_0"
    norms = [math.sqrt(40), 2.0, 4.0]
    want = (4.0 + 2.0 + 4.0) / 3, sum(norms)
    if mode != "v2":
        want = 14 / 4, math.sqrt(60)
    assert (float(row["mean"]), float(row["norm"])) == pytest.approx(want, rel=1e-6)
    assert (row["min"], row["max"], row["nans"]) == ("2.0", "6.0", "0.0")


@pytest.mark.parametrize("mode", MODES)
def test_lists_of_collectives(tmp_path: Path, mode: str) -> None:
    """D5: a list is one argument; one without tensors has no row, and the exception is torch's."""
    on_ranks(2, collective, str(tmp_path), mode, "list")
    found = {row["module_name"]: row for row in rows(tmp_path, "cc")}
    gathered = found["all_gather/rank0/post_0"]
    assert (gathered["min"], gathered["max"], gathered["mean"]) == ("1.0", "3.0", "2.0")
    assert float(gathered["norm"]) == pytest.approx(math.sqrt(20))


@pytest.mark.parametrize("mode", MODES)
def test_ends_of_lines(tmp_path: Path, mode: str) -> None:
    """D2."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer)
    mon.stop()
    files = list((tmp_path / "rank_0").glob("*.csv"))
    assert len(files) == 4
    for path in files:
        data = path.read_bytes()
        assert data.endswith(b"\r\n") and data.count(b"\r\n") == data.count(b"\n") == data.count(b"\r")


@pytest.mark.parametrize("mode", MODES)
def test_precision(tmp_path: Path, mode: str) -> None:
    """D3: float64 as it is, or as float32 holds it."""
    found = weights(
        tmp_path,
        mode,
        Holds(
            a=torch.tensor([0.1], dtype=torch.float64), b=torch.full((4,), 3e38), c=torch.tensor([16777217])
        ),
    )
    exact = (
        {"a": "0.1", "c": "16777217.0"} if mode != "v2" else {"a": "0.10000000149011612", "c": "16777216.0"}
    )
    for name, text in exact.items():
        assert (found[name]["min"], found[name]["mean"]) == (text, text)
    norm = float(found["b"]["norm"])
    assert norm == (math.inf if mode == "v2" else pytest.approx(6e38, rel=1e-7))


NAN = math.nan
SPECIAL: dict[str, tuple[Callable[[], torch.Tensor], dict[str, list[float]]]] = {
    "complex": (
        lambda: torch.tensor([3 + 4j, 0j]),
        {"v2": [NAN, NAN, 1.5, 3, 0], "default": [NAN, NAN, 1.5, 5, 0], "extended": [0, 5, 2.5, 5, 0]},
    ),
    "float8": (
        lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        {
            "v2": [NAN, NAN, 1.5, 5**0.5, 0],
            "default": [1, 2, 1.5, 5**0.5, 0],
            "extended": [1, 2, 1.5, 5**0.5, 0],
        },
    ),
    "sparse": (
        lambda: torch.sparse_coo_tensor([[0, 3]], [1.0, 4.0], (5,)),
        {
            "v2": [NAN, NAN, NAN, 17**0.5, 0],
            "default": [0, 4, 1, 17**0.5, 0],
            "extended": [0, 4, 1, 17**0.5, 0],
        },
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(tmp_path: Path, kind: str, mode: str) -> None:
    """D6; D7: what is missing in one row is missing in no other."""
    make, want = SPECIAL[kind]
    found = weights(tmp_path, mode, Holds(before=torch.ones(2), odd=make(), after=torch.ones(2)))
    values = [float(found["odd"][name]) for name in ("min", "max", "mean", "norm", "nans")]
    assert values == pytest.approx(want[mode], rel=1e-6, nan_ok=True)
    for name in ("before", "after"):
        assert [found[name][op] for op in ("min", "max", "mean", "nans")] == ["1.0", "1.0", "1.0", "0.0"]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_gradient(tmp_path: Path, mode: str) -> None:
    """D8."""
    net = nn.Linear(2, 1)
    net.nothing = nn.Parameter(torch.zeros(0))
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "weight_grad", mode=mode))
    mon.start(net, optimizer)
    (net(torch.ones(1, 2)).sum() + net.nothing.sum()).backward()
    optimizer.step()
    mon.stop()
    empty = [row for row in rows(tmp_path, "weight_grad") if row["module_name"] == "nothing"]
    texts = [
        [row[op] for op in ("min", "max", "mean", "norm", "nans")]
        for row in empty
        if row["scope"] == "reduced"
    ]
    assert texts == ([["nan", "nan", "nan", "0.0", "0.0"]] if mode in MSPROBES else [])


@pytest.mark.parametrize("mode", MODES)
def test_passes_of_evaluation(tmp_path: Path, mode: str) -> None:
    """D10, and D9's columns."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "module", mode=mode))
    mon.start(net, optimizer)
    with torch.no_grad():
        net(torch.ones(2, 3))
    train(net, optimizer)
    mon.stop()
    found = rows(tmp_path, "module")
    assert [row["module_name"] for row in found].count(".input.0") == (2 if mode in MSPROBES else 1)
    assert ("call" in found[0]) == ("micro_step" in found[0]) == (mode not in MSPROBES)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_no_step_has_ended(tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """D15: dropped; by default, and extended, their number is said."""
    net = model()
    mon = TrainerMonitorV2(config(tmp_path, "module", mode=mode))
    with caplog.at_level(logging.INFO):
        mon.start(net)
        backward(net)
        mon.stop()
    assert not rows(tmp_path, "module")
    assert ("rows of the step that had begun are dropped" in caplog.text) == (mode != "v2")


@pytest.mark.parametrize("mode", MODES)
def test_directories_of_ranks_that_are_not_watched(tmp_path: Path, mode: str) -> None:
    """D16."""
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode, rank=[5]))
    net = model()
    optimizer = adam(net)
    mon.start(net, optimizer)
    train(net, optimizer)
    mon.stop()
    assert [one.name for one in tmp_path.iterdir()] == ["rank_0"]
    assert not list((tmp_path / "rank_0").iterdir())
    assert mon.current_step == 0


class Counts:
    """An optimizer without hooks."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [nn.Parameter(torch.ones(1))]}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> str:
        """Says what it has done."""
        return "stepped"


@pytest.mark.parametrize("mode", MODES)
def test_how_steps_are_counted(tmp_path: Path, mode: str) -> None:
    """D17: by the optimizer's own hooks, or by a bound method that looks like the one before."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode))
    mon.start(net, optimizer)
    assert "step" not in vars(optimizer)
    mon.stop()

    plain = Counts()
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode))
    mon.start(net, plain)
    assert plain.step.__name__ == "step" and plain.step.__doc__ == "Says what it has done."
    assert plain.step.__self__ is plain
    assert plain.step() == "stepped"
    assert mon.current_step == 1
    mon.stop()
    assert "step" not in vars(plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("record", "files"), [(1, 6), (4, 2), (100, 1)])
def test_how_many_files_there_are(tmp_path: Path, mode: str, record: int, files: int) -> None:
    """D20."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode, step_count_per_record=record))
    mon.start(net, optimizer)
    train(net, optimizer, 6)
    mon.stop()
    assert len(list((tmp_path / "rank_0").glob("param_step*.csv"))) == files
    assert len(rows(tmp_path, "param")) == 6 * 8


@pytest.mark.parametrize("mode", MODES)
def test_other_targets_are_parts_of_names(tmp_path: Path, mode: str) -> None:
    """D12: what begins with `=` is a part of a name like any other, but extended."""
    net = model()
    mon = TrainerMonitorV2(config(tmp_path, mode=mode) | {"monitors": {"module": {"targets": ["=0"]}}})
    mon.start(net)
    net(torch.ones(2, 3))
    mon.step()
    mon.stop()
    assert {row["module_name"] for row in rows(tmp_path, "module")} == (
        set() if mode in MSPROBES else {"0.input.0", "0.output.0"}
    )


@pytest.mark.parametrize("mode", MODES)
def test_other_state(tmp_path: Path, mode: str) -> None:
    """D13."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mon = TrainerMonitorV2(config(tmp_path, "optimizer", mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer, 2)
    mon.stop()
    scopes = {row["scope"] for row in rows(tmp_path, "optimizer")}
    assert scopes == (set() if mode in MSPROBES else {"momentum_buffer"})


@pytest.mark.parametrize("mode", MODES)
def test_containers_of_results(tmp_path: Path, mode: str) -> None:
    """D11: one flat level, or all."""

    class Gives(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return [x, (x, {"a": x})]

    mon = TrainerMonitorV2(config(tmp_path, "module", mode=mode))
    net = Gives()
    mon.start(net)
    net(torch.ones(1))
    mon.step()
    mon.stop()
    outputs = [row["module_name"] for row in rows(tmp_path, "module") if "output" in row["module_name"]]
    assert outputs == [f".output.{index}" for index in range(1 if mode in MSPROBES else 3)]
