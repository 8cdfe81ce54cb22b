"""Under FSDP, of either kind, and DDP, on two ranks: rows of this rank's part, and names that join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.msprobe.loops import FOUR, MODES, config, rows
from tests.ranks.gloo import on_ranks

KINDS = [("fsdp2", True), ("fsdp2", False), ("fsdp1", True), ("ddp", True)]
CASES = [(kind, mode, patched) for kind, patched in KINDS for mode in MODES]


def place(root: str | Path, kind: str, mode: str, patched: bool) -> str:
    return f"{root}/{kind}-{mode}-{patched}"


def all_trained(root: str) -> list[dict[str, float]]:
    """In one go: what FSDP imports takes seconds."""
    return [trained(kind, place(root, kind, mode, patched), mode, patched) for kind, mode, patched in CASES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("sharded")
    return root, on_ranks(2, all_trained, str(root))


def trained(kind: str, directory: str, mode: str, patched: bool) -> dict[str, Any]:
    """Two steps of two micro-batches; what this rank's tensors are when each step begins or ends."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from trainmon.msprobe import TrainerMonitorV2

    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif kind == "fsdp1":
        net[0] = FullyShardedDataParallel(net[0], use_orig_params=True, device_id=torch.device("cpu"))
        net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    mon = TrainerMonitorV2(
        config(Path(directory), *FOUR, mode=mode, patch_optimizer_step=patched)
        | {
            "monitors": {
                **{one: {"enabled": True} for one in FOUR},
                "weight_grad": {"enabled": True, "micro_batch_number": 2},
            }
        }
    )
    mon.start(net, optimizer)
    torch.manual_seed(dist.get_rank())
    norms: dict[str, float] = {}

    def note(step: int, scope: str, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            piece = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if piece.numel():
                norms[f"{step} {scope} {name.replace('_fsdp_wrapped_module.', '')}"] = float(
                    piece.detach().norm()
                )

    for step in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            net(torch.randn(5, 6)).square().mean().backward()
        note(
            step, "reduced", {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
        )
        optimizer.step()
        if not patched:
            mon.step()
        parameters = dict(net.named_parameters())
        note(step, "param_updated", parameters)
        states = {name: optimizer.state[one] for name, one in parameters.items()}
        moments = {f"{name}.exp_avg": state["exp_avg"] for name, state in states.items() if state}
        note(step, "exp_avg", moments)  # FSDP1: of what has no elements here there is none
    mon.stop()
    return norms


def found(directory: Path, monitor: str, rank: int, scope: str) -> dict[str, float]:
    return {
        f"{row['step']} {scope} {row['module_name'].replace('_fsdp_wrapped_module.', '')}": float(row["norm"])
        for row in rows(directory, monitor, rank)
        if row["scope"] == scope and float(row["norm"]) > 0
    }


def before_reduction(root: str) -> dict[str, dict[str, float]]:
    """By kind of FSDP, what autograd says of this rank alone."""
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.utils.checkpoint import checkpoint

    from trainmon.msprobe import TrainerMonitorV2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.inner, self.first(x), use_reentrant=False)
            return out

    found = {}
    for kind in ("fsdp2", "fsdp1"):
        torch.manual_seed(0)
        net: Any = Model()
        alone = copy.deepcopy(net)
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(net.inner, mesh=mesh)
            fully_shard(net, mesh=mesh)
        else:
            net.inner = FullyShardedDataParallel(
                net.inner, use_orig_params=True, device_id=torch.device("cpu")
            )
            net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        entry = config(Path(root) / kind, "weight_grad", mode="extended")
        entry["monitors"]["weight_grad"] |= {
            "micro_batch_number": 2,
            "monitor_mbs_grad": True,
            "grad_view": "own",
        }
        mon = TrainerMonitorV2(entry)
        mon.start(net, optimizer)
        torch.manual_seed(dist.get_rank())
        norms: dict[str, float] = {}
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                x = torch.randn(5, 6)
                own = torch.autograd.grad(alone(x).square().mean(), list(alone.parameters()))
                for (name, _), gradient in zip(alone.named_parameters(), own, strict=True):
                    norms[f"{step} {micro + 1} {name}"] = float(gradient.norm())
                net(x).square().mean().backward()
            optimizer.step()
        mon.stop()
        found[kind] = norms
    return found


@pytest.mark.filterwarnings("ignore")
def test_each_micro_batchs_gradient_before_the_reduction(tmp_path: Path) -> None:
    """D22: of the whole parameters, this rank's own, each once although its pass is repeated."""
    truth = on_ranks(2, before_reduction, str(tmp_path))
    for rank in range(2):
        for kind, norms in truth[rank].items():
            shown = [row for row in rows(tmp_path / kind, "weight_grad", rank) if row["scope"] == "unreduced"]
            got = {
                f"{row['step']} {row['micro_step']} {row['module_name']}": float(row["norm"]) for row in shown
            }
            assert len(got) == len(shown)
            assert got == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(("kind", "mode", "patched"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_rows_are_of_this_ranks_part(runs: tuple[Path, Any], kind: str, mode: str, patched: bool) -> None:
    """T-46: also of the optimizer's state, in both ways of counting, and no monitor loses its rows."""
    directory, norms = Path(place(runs[0], kind, mode, patched)), runs[1]
    for rank in range(2):
        own = norms[rank][CASES.index((kind, mode, patched))]
        for monitor, scope in (
            ("weight_grad", "reduced"),
            ("param", "param_updated"),
            ("optimizer", "exp_avg"),
        ):
            want = {key: value for key, value in own.items() if f" {scope} " in key and value > 0}
            assert found(directory, monitor, rank, scope) == pytest.approx(want, rel=1e-6)
        assert {row["step"] for row in rows(directory, "module", rank)} == {"0", "1"}
    gradients = rows(directory, "weight_grad")
    unreduced, reduced = (
        {row["module_name"] for row in gradients if row["scope"] == scope}
        for scope in ("unreduced", "reduced")
    )
    if mode == "extended" and kind != "ddp":
        assert not unreduced  # FSDP sums up reduced gradients only
    elif mode == "default":
        assert unreduced == reduced  # the scopes join
