"""The case that msProbe's contract spells out byte by byte: two calls a step, every other step, all monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.msprobe.loops import MODES, config  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2  # noqa: E402

CALL = """\
-1,1,.input.0,forward,1.0,2.0,1.5,2.2360680103302,0.0
-1,1,.input.1,forward,2.0,2.0,2.0,2.0,0.0
-1,1,fc.input.0,forward,1.0,2.0,1.5,2.2360680103302,0.0
-1,1,fc.output.0,forward,-4.5,2.5,-1.0,5.147815227508545,0.0
-1,1,.output.0,forward,-9.0,5.0,-2.0,10.29563045501709,0.0
-1,1,.grad_output.0,backward,1.0,1.0,1.0,1.4142135381698608,0.0
-1,1,fc.grad_output.0,backward,2.0,2.0,2.0,2.8284270763397217,0.0
"""
FILES = {
    "weight_grad": """\
vpp_stage,step,module_name,scope,micro_step,norm,min,nans
-1,1,fc.weight,unreduced,1,6.324555397033691,2.0,0.0
-1,1,fc.weight,unreduced,2,12.649110794067383,4.0,0.0
-1,1,fc.weight,reduced,2,12.649110794067383,4.0,0.0
""",
    "module": "vpp_stage,step,module_name,scope,min,max,mean,norm,nans\n" + 2 * CALL,
    "optimizer": """\
vpp_stage,step,module_name,scope,min,max,mean,norm,nans
-1,1,fc.weight.exp_avg,exp_avg,0.7599999904632568,1.5199999809265137,1.1399999856948853,2.4033310413360596,0.0
-1,1,fc.weight.exp_avg_sq,exp_avg_sq,0.03198400139808655,0.1279360055923462,0.07996000349521637,0.18649716675281525,0.0
""",
    "param": """\
vpp_stage,step,module_name,scope,min,max,mean,norm,nans
-1,1,fc.weight,param_origin,-2.5,2.5,0.1250000298023224,3.570714235305786,0.0
-1,1,fc.weight,param_updated,-3.0,2.0,-0.3749999701976776,3.640054941177368,0.0
""",
}
#: Passed through Adam: the last digit may differ on other builds.
TRAINED = ("optimizer", "param")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x) * scale
        return out


def run(directory: Path, mode: str) -> None:
    net = Net()
    weight = net.fc.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # held, as msProbe needs it
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    monitors = {
        "module": {},
        "weight_grad": {"enabled": True, "ops": ["norm", "min", "nans"], "monitor_mbs_grad": True},
        "optimizer": {"enabled": True},
        "param": {"enabled": True},
    }
    window = {"start_step": 1, "step_interval": 2, "step_count_per_record": 4, "collect_times": 2}
    mon = TrainerMonitorV2(config(directory, mode=mode, **window) | {"monitors": monitors})
    mon.start(net, optimizer, grad_acc_steps=2)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            net(torch.tensor([[1.0, 2.0]]), scale=torch.tensor(2.0)).sum().backward()
        optimizer.step()
    mon.stop()
    assert node is not None


@pytest.mark.parametrize("name", FILES)
def test_bytes(tmp_path: Path, name: str) -> None:
    """G1."""
    run(tmp_path, "v2")
    assert sorted(path.name for path in (tmp_path / "rank_0").iterdir()) == sorted(
        f"{one}_step1-4.csv" for one in FILES
    )
    data = (tmp_path / "rank_0" / f"{name}_step1-4.csv").read_bytes()
    lines = data.decode().split("\r\n")
    want = FILES[name].splitlines()
    shown = lines[: len(want)]
    assert {line.split(",")[1] for line in lines[len(want) : -1]} == {"3"} and lines[-1] == ""
    if name not in TRAINED:
        assert shown == want
        return
    assert [line.split(",")[:4] for line in shown] == [line.split(",")[:4] for line in want]
    for ours, theirs in zip(shown[1:], want[1:], strict=True):
        numbers = [[float(cell) for cell in line.split(",")[4:]] for line in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


@pytest.mark.parametrize("mode", [one for one in MODES if one != "v2"])
def test_other_modes_have_these_rows(tmp_path: Path, mode: str) -> None:
    """Names and order alike; extended says which micro-batch a call belongs to."""
    run(tmp_path, mode)
    for name, text in FILES.items():
        lines = (tmp_path / "rank_0" / f"{name}_step1-4.csv").read_bytes().decode().split("\r\n")
        want = [line.split(",")[:4] for line in text.splitlines()]
        assert [line.split(",")[:4] for line in lines[: len(want)]] == want
    module = (tmp_path / "rank_0" / "module_step1-4.csv").read_text().splitlines()
    if mode == "extended":
        assert [line.split(",")[4:6] for line in module[1:15]] == [["1", "0"]] * 7 + [["2", "0"]] * 7


def collective(directory: str) -> None:
    import torch
    import torch.distributed as dist

    mon: Any = TrainerMonitorV2(
        config(Path(directory), mode="v2") | {"monitors": {"cc": {"enabled": True, "cc_pre_hook": True}}}
    )
    mon.start()
    for value in (2.0, 6.0, 2.0):
        dist.all_reduce(torch.tensor([value]))
    dist.all_reduce(torch.tensor([4.0]), async_op=True).wait()
    mon.step()
    mon.stop()


def test_bytes_of_collectives(tmp_path: Path) -> None:
    on_ranks(1, collective, str(tmp_path))
    assert (tmp_path / "rank_0" / "cc_step0-0.csv").read_bytes() == (
        b"vpp_stage,step,module_name,scope,min,max,mean,norm,nans\r\n"
        b",0,all_reduce/rank0/pre_0,comm,2.0,6.0,3.5,14.0,0.0\r\n"
        b",0,all_reduce/rank0/post_0,comm,2.0,6.0,3.5,14.0,0.0\r\n"
    )
