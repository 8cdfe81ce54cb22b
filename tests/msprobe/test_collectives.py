"""The monitor cc on two ranks, and the arithmetic of merging."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.ranks.gloo import on_ranks
from trainmon.backend.statistics import finished, host_readings
from trainmon.msprobe.collectives import CollectiveRows


def monitor(directory: str, **keys: Any) -> Any:
    from trainmon.msprobe import TrainerMonitorV2

    compat = {name: keys.pop(name) for name in ("compat", "extended") if name in keys}
    return TrainerMonitorV2(
        {"output_dir": directory, "monitors": {"cc": {"enabled": True, **keys}}, **compat}
    )


def rows(directory: str | Path, rank: int = 0, step: int = 0) -> dict[str, dict[str, str]]:
    path = Path(directory) / f"rank_{rank}" / f"cc_step{step}-{step}.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as stream:
        return {row["module_name"].replace(f"/rank{rank}/", "/"): row for row in csv.DictReader(stream)}


def batched(directory: str) -> list[str]:
    """T-30: and operations made before the start, between and after the stop go on working."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    other = 1 - rank

    def operations() -> list[Any]:
        received = torch.zeros(2)
        return [dist.P2POp(dist.isend, torch.full((2,), 3.0), other), dist.P2POp(dist.irecv, received, other)]

    def run(batch: list[Any]) -> None:
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert batch[1].tensor.tolist() == [3.0, 3.0]

    early = operations()
    mon = monitor(directory, cc_pre_hook=True)
    mon.start()
    during = operations()
    kept = dist.isend
    run(early)
    run(operations())
    mon.step()
    mon.stop()
    run(during)
    run(operations())
    assert kept is not dist.isend
    return list(rows(directory, rank))


def test_a_batch_counts_once(tmp_path: Path) -> None:
    assert on_ranks(2, batched, str(tmp_path))[0] == ["batch_isend_irecv/pre_0", "batch_isend_irecv/post_0"]
    found = rows(tmp_path)
    assert float(found["batch_isend_irecv/pre_0"]["norm"]) == pytest.approx(math.sqrt(4 * 9.0))
    assert float(found["batch_isend_irecv/post_0"]["norm"]) == pytest.approx(math.sqrt(8 * 9.0))


def received(directory: str) -> None:
    import torch
    import torch.distributed as dist

    mon = monitor(directory)
    mon.start()
    for source in (0, 1):
        if dist.get_rank() == source:
            dist.send(torch.ones(4), dst=1 - source)
        else:
            assert dist.recv(torch.zeros(4), src=source) == source
    mon.step()
    mon.stop()


def test_what_is_received_has_a_row_whoever_sent_it(tmp_path: Path) -> None:
    """T-47."""
    on_ranks(2, received, str(tmp_path))
    for rank in (0, 1):
        found = rows(tmp_path, rank)
        assert set(found) == {"send/post_0", "recv/post_0"}
        assert {row["norm"] for row in found.values()} == {"2.0"}
        assert {row["vpp_stage"] for row in found.values()} == {""}


def awkward(directory: str, mode: dict[str, Any]) -> None:
    """T-09, T-10, T-40, T-41."""
    import gc
    import weakref

    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    originals = {
        name: getattr(c10d, name)
        for name in ("all_reduce", "all_gather", "gather", "isend", "batch_isend_irecv")
    }
    plain_wait = c10d.Work.wait
    mon = monitor(directory, cc_pre_hook=True, **mode)
    mon.start()
    for bad in ([], [object()], None):
        with pytest.raises(Exception):  # noqa: B017 (torch's own, whatever it is)
            dist.all_gather(bad, torch.ones(2))
    pieces = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(pieces, torch.ones(2))
    dist.all_gather_object([None, None], {"a": 1})

    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work.wait() is True
    assert work.wait() is True
    c10d.all_reduce(torch.ones(2))
    mon.step()
    kept = dist.all_reduce
    pending = torch.ones(1000)
    gone = weakref.ref(pending)
    left = dist.all_reduce(pending, async_op=True)
    mon.stop()
    left.wait()
    del pending, left
    gc.collect()
    assert gone() is None
    for name, original in originals.items():
        assert getattr(c10d, name) is original
        assert getattr(dist, name) is original
    assert c10d.Work.wait is plain_wait
    kept(torch.ones(2))
    mon.step()
    mon.step()


@pytest.mark.parametrize("mode", [{}, {"compat": "msprobe-v2"}, {"extended": True}])
def test_awkward_calls(tmp_path: Path, mode: dict[str, Any]) -> None:
    on_ranks(2, awkward, str(tmp_path), mode)
    found = rows(tmp_path)
    norm = 4.0 if "compat" not in mode else 2 * 8**0.5  # twice two elements of 2
    assert float(found["all_reduce/post_0"]["norm"]) == pytest.approx(norm)
    assert float(found["all_gather/post_0"]["max"]) >= 1.0
    assert rows(tmp_path, step=1) == {}


def late(directory: str) -> int:
    """T-34: made while nobody knows of a process group, started when it is there."""
    import os
    from unittest import mock

    import torch.distributed as dist

    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with mock.patch.dict(os.environ, environment, clear=True):
        with mock.patch.object(dist, "is_initialized", lambda: False):
            mon = monitor(directory)
    assert mon.rank == 0
    mon.start()
    mon.stop()
    return int(mon.rank)


def test_made_before_the_process_group(tmp_path: Path) -> None:
    assert on_ranks(2, late, str(tmp_path)) == {0: 0, 1: 1}
    assert {one.name for one in tmp_path.iterdir()} == {"rank_0", "rank_1"}


def chosen(directory: str) -> dict[str, Any]:
    import logging

    import torch
    import torch.distributed as dist

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainmon.msprobe")
    logger.setLevel(logging.WARNING)  # whatever an earlier test of this rank has set
    logger.addHandler(handler)

    def here() -> None:
        dist.all_reduce(torch.ones(2))

    def there() -> None:
        dist.broadcast(torch.ones(2), src=0)

    found: dict[str, Any] = {}
    for name, keys in {
        "pattern": {"cc_codeline": [r"test_collectives\.py\[\d+\]   here"]},
        "log": {"cc_log_only": True},
        "rank": {"module_ranks": [1]},
    }.items():
        mon = monitor(f"{directory}/{name}", **keys)
        mon.start()
        for _ in range(3):
            here()
            there()
            mon.step()
        mon.stop()
        found[name] = list(rows(f"{directory}/{name}", dist.get_rank()))
    found["said"] = [text for text in said if "is called from" in text]
    return found


def test_chosen_calls(tmp_path: Path) -> None:
    found = on_ranks(2, chosen, str(tmp_path))
    assert found[0]["pattern"] == ["all_reduce/post_0"]
    assert found[0]["log"] == []
    assert len(found[0]["said"]) == 2
    assert "test_collectives.py[" in found[0]["said"][0] and "]   here" in found[0]["said"][0]
    assert found[0]["rank"] == []
    assert found[1]["rank"] == ["all_reduce/post_0", "broadcast/post_0"]


def test_without_a_process_group_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mon = monitor(str(tmp_path))
    mon.start()
    assert "not initialised" in caplog.text
    mon.step()
    mon.stop()


def exchanged(directory: str) -> dict[str, str]:
    """all_to_all_single with even and uneven parts, all_to_all where gloo has it; by name of what failed, why."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    mon = monitor(directory, cc_pre_hook=True)
    mon.start()
    dist.all_to_all_single(torch.zeros(2), torch.full((2,), rank + 1.0))
    mon.step()
    sizes = [[1, 2], [1, 1]][rank], [[1, 1], [2, 1]][rank]
    work = dist.all_to_all_single(
        torch.zeros(sum(sizes[1])),
        torch.full((sum(sizes[0]),), rank + 1.0),
        sizes[1],
        sizes[0],
        async_op=True,
    )
    work.wait()
    mon.step()
    failed = {}
    try:
        dist.all_to_all([torch.zeros(1), torch.zeros(1)], [torch.ones(1), torch.full((1,), 2.0)])
    except RuntimeError as error:
        failed["all_to_all"] = str(error)
    mon.step()
    mon.stop()
    return failed


def test_all_to_all(tmp_path: Path) -> None:
    failed = on_ranks(2, exchanged, str(tmp_path))[0]
    even = rows(tmp_path)
    # The output is the first argument, the input the second.
    assert list(even) == [f"all_to_all_single/{when}_{at}" for when in ("pre", "post") for at in (0, 1)]
    assert (even["all_to_all_single/pre_0"]["max"], even["all_to_all_single/pre_1"]["max"]) == ("0.0", "1.0")
    assert float(even["all_to_all_single/post_0"]["norm"]) == pytest.approx(math.sqrt(1 + 4))
    uneven = rows(tmp_path, rank=1, step=1)
    assert float(uneven["all_to_all_single/post_0"]["norm"]) == pytest.approx(math.sqrt(2 * 1 + 4))
    listed = rows(tmp_path, step=2)
    if "all_to_all" in failed:  # what went in is there, and the user has the exception
        assert list(listed) == ["all_to_all/pre_0", "all_to_all/pre_1"]
    else:
        assert float(listed["all_to_all/post_0"]["norm"]) > 0.0
    assert float(listed["all_to_all/pre_1"]["norm"]) == pytest.approx(math.sqrt(1 + 4))


def coalesced(directory: str, compat: str) -> None:
    """Calls in a manager are issued when it ends, or waited for together."""
    import torch
    import torch.distributed as dist

    mode = {"compat": compat} if compat else {}
    mon = monitor(directory, cc_pre_hook=True, **mode)
    mon.start()
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.full((2,), 3.0))
    mon.step()
    with dist._coalescing_manager(async_ops=True) as together:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.full((2,), 3.0))
    before = len(mon._watching.running[0].calls)
    together.wait()
    assert len(mon._watching.running[0].calls) > before
    mon.step()
    dist.all_reduce_coalesced([torch.ones(1), torch.ones(3)])
    dist.all_reduce(torch.ones(1))
    mon.step()
    mon.stop()
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("compat", ["", "msprobe-v2"])
@pytest.mark.filterwarnings("ignore")
def test_coalesced_calls(tmp_path: Path, compat: str) -> None:
    on_ranks(2, coalesced, str(tmp_path), compat)
    for step in (0, 1):
        found = rows(tmp_path, step=step)
        assert list(found) == ["all_reduce/pre_0", "all_reduce/post_0"]
        norm = 2**0.5 + 18**0.5 if compat else 20**0.5
        assert float(found["all_reduce/pre_0"]["norm"]) == pytest.approx(norm)
        assert float(found["all_reduce/post_0"]["norm"]) == pytest.approx(2 * norm)
    found = rows(tmp_path, step=2)
    if compat:
        assert {name.split("/")[0] for name in found} == {"all_reduce"}
    else:
        assert float(found["all_reduce_coalesced/pre_0"]["norm"]) == pytest.approx(2.0)
        assert float(found["all_reduce_coalesced/post_0"]["norm"]) == pytest.approx(4.0)


def functionally(directory: str) -> None:
    """torch.distributed._functional_collectives, and a process group's own methods."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    originals = functional.all_reduce, functional.wait_tensor, dist.ProcessGroup.allreduce
    mon = monitor(directory, cc_pre_hook=True)
    mon.start()
    result = functional.all_reduce(torch.full((4,), rank + 1.0), "sum", group)
    before = set(mon._watching.running[0].calls._tags["functional.all_reduce"][1])
    assert not before  # not before somebody needs it
    assert float(result.sum()) == 12.0
    gathered = functional.all_gather_tensor(torch.full((2,), rank + 1.0), 0, group)
    assert gathered.view(-1).tolist() == [1.0, 1.0, 2.0, 2.0]
    scattered = functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, group)
    functional.wait_tensor(scattered)
    mon.step()
    group.allreduce([torch.ones(2)]).wait()
    group.allgather([[torch.zeros(2), torch.zeros(2)]], [torch.ones(2)]).wait()
    dist.all_reduce(torch.ones(3))
    mon.step()
    mon.stop()
    assert (functional.all_reduce, functional.wait_tensor, dist.ProcessGroup.allreduce) == originals
    group.allreduce([torch.ones(2)]).wait()
    functional.all_reduce(torch.ones(4), "sum", group).sum()


@pytest.mark.filterwarnings("ignore")
def test_functional_calls_and_methods_of_groups(tmp_path: Path) -> None:
    on_ranks(2, functionally, str(tmp_path))
    found = rows(tmp_path, rank=1)
    names = ["functional.all_reduce", "functional.all_gather_tensor", "functional.reduce_scatter_tensor"]
    assert list(found) == [f"{name}/{when}_0" for name in names for when in ("pre", "post")]
    norms = {name: float(row["norm"]) for name, row in found.items()}
    assert norms == pytest.approx(
        {
            "functional.all_reduce/pre_0": 4.0,
            "functional.all_reduce/post_0": 6.0,
            "functional.all_gather_tensor/pre_0": 8**0.5,
            "functional.all_gather_tensor/post_0": 10**0.5,
            "functional.reduce_scatter_tensor/pre_0": 2.0,
            "functional.reduce_scatter_tensor/post_0": 8**0.5,
        }
    )
    methods = rows(tmp_path, step=1)
    # A call of torch.distributed that goes through such a method counts once.
    assert float(methods["all_reduce/post_0"]["norm"]) == pytest.approx((5 * 4) ** 0.5)
    assert float(methods["all_gather/pre_1"]["norm"]) == pytest.approx(2**0.5)
    assert float(methods["all_gather/post_0"]["norm"]) == pytest.approx(2.0)


def merged(calls: list[list[np.ndarray[Any, Any]]], plainly: bool = False) -> dict[str, float]:
    store = CollectiveRows()
    for arrays in calls:
        store.add("x", "x/post_0", False, host_readings(arrays))
    _, table = store.merged(lambda readings: finished(readings, None), plainly=plainly)
    return dict(zip(("n", "min", "max", "mean", "norm", "nans"), table[0].tolist(), strict=True))


def test_merging() -> None:
    """D4, D5; the example of msProbe's way: 2, 6, 2, 4 have the norm 14."""
    ones = [[np.array([value])] for value in (2.0, 6.0, 2.0, 4.0)]
    assert merged(ones, plainly=True) == {"n": 4, "min": 2, "max": 6, "mean": 3.5, "norm": 14, "nans": 0}
    assert merged(ones)["norm"] == pytest.approx(math.sqrt(60))
    calls = [[np.arange(3.0), np.arange(8.0).reshape(2, 4)], [np.array([-5.0])], [np.zeros(0)]]
    everything = np.concatenate([one.reshape(-1) for call in calls for one in call])
    found = merged(calls)
    assert found["mean"] == pytest.approx(everything.mean())
    assert found["norm"] == pytest.approx(math.sqrt((everything**2).sum()))
    assert (found["n"], found["min"], found["max"]) == (12, -5, 7)
    huge = merged([[np.array([1e300])], [np.array([1e300])]])
    assert huge["norm"] == pytest.approx(math.sqrt(2) * 1e300)


def test_more_columns_of_what_is_merged() -> None:
    """As of the tensors one after the other."""
    from trainmon.backend.statistics import COLUMNS, Fetched

    arrays = [np.array([1.0, 0.0]), np.zeros(0), np.array([-3.0, np.inf, 2.0]), np.array([-np.inf, 0.0])]
    whole = np.concatenate(arrays)
    for calls in ([arrays], [[one] for one in arrays]):
        store = CollectiveRows()
        for call in calls:
            store.add("x", "x/post_0", False, host_readings(call))

        def finish(readings: Any) -> Any:
            return Fetched(readings, None).table(readings, wide=True)

        _, table = store.merged(finish, plainly=False)
        want = finish(host_readings([whole]))[0]
        assert dict(zip(COLUMNS, table[0].tolist(), strict=True)) == pytest.approx(
            dict(zip(COLUMNS, want.tolist(), strict=True)), nan_ok=True
        )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_nan_wins_in_any_order(order: tuple[int, ...]) -> None:
    """T-31."""
    arrays = [np.array([1.0, np.nan]), np.array([2.0]), np.array([3.0])]
    for plainly in (True, False):
        found = merged([[arrays[at]] for at in order], plainly)
        assert all(math.isnan(found[name]) for name in ("min", "max", "mean", "norm"))
        assert found["nans"] == 1
