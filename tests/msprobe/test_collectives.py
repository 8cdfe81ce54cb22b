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

    compat = {name: keys.pop(name) for name in ("compat",) if name in keys}
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


def awkward(directory: str) -> None:
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
    mon = monitor(directory, cc_pre_hook=True)
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


def test_awkward_calls(tmp_path: Path) -> None:
    on_ranks(2, awkward, str(tmp_path))
    found = rows(tmp_path)
    assert float(found["all_reduce/post_0"]["norm"]) == pytest.approx(4.0)  # twice two elements of 2
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
    logging.getLogger("trainmon.msprobe").addHandler(handler)

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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_nan_wins_in_any_order(order: tuple[int, ...]) -> None:
    """T-31."""
    arrays = [np.array([1.0, np.nan]), np.array([2.0]), np.array([3.0])]
    for plainly in (True, False):
        found = merged([[arrays[at]] for at in order], plainly)
        assert all(math.isnan(found[name]) for name in ("min", "max", "mean", "norm"))
        assert found["nans"] == 1
