"""What two ranks of msrun do: the group's collectives, a data parallel training in each mode, watched, and calls between
ranks; with the drop-in for msProbe's Monitor V2, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init
from mindspore.mint import distributed
from mindspore.train import Model

from tests.hosts.mindspore.training import MODES, Mean, adam, data, monitor, network, norm, rows
from trainmon.dist.mindspore_group import MindSporeGroup
from trainmon.msprobe import TrainerMonitorV2

EXACT = [0.1, 1e300, -1e-300, float(2**53 - 1), np.pi]


def collectives() -> dict[str, object]:
    group = MindSporeGroup()
    mine = np.array(EXACT) * (group.rank + 1)
    sums, maxima = group.merge(
        mine, np.array([np.nan if group.rank else 1.0, -np.inf, 5.0 - group.rank])
    ).wait()
    gathered = group.gather(np.array([0.1 + group.rank])).wait()
    texts = group.exchange(b"x" * (group.rank * 5) + "größer".encode())
    nothing = group.merge(np.zeros(0), np.zeros(0)).wait()
    return {
        "sums": sums.tolist(),
        "maxima": maxima.tolist(),
        "gathered": gathered.tolist(),
        "texts": [text.decode() for text in texts],
        "nothing": [len(one) for one in nothing],
    }


def rows_of(folder: Path, name: str) -> Any:
    """Of the drop-in for msProbe's Monitor V2."""
    return TrainerMonitorV2(
        {
            "framework": "mindspore",
            "output_dir": str(folder / "rows"),
            "step_count_per_record": 100,
            "monitors": {name: {"enabled": True}},
        }
    )


def calls(folder: Path) -> None:
    mon = rows_of(folder, "cc")
    mon.start()
    mine = Tensor(np.array([1.0, 3.0], np.float32)) * (get_rank() + 1)
    # What runs on a CPU.
    distributed.all_reduce(mine)
    distributed.all_reduce(mine, async_op=True).wait()
    ops.communication.all_reduce(mine)
    distributed.all_gather([Tensor(np.zeros(2, np.float32)) for _ in range(2)], mine)
    distributed.broadcast(mine, 1)
    mon.step()
    mon.stop()


class Own(nn.TrainOneStepCell):
    """Reduces by itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.together = self.grad_reducer

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        gradients = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer(self.together(gradients)))


def own_cell(folder: Path, half: Any) -> None:
    """In a graph, until a rule stops it."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = network()
    rule = {
        "series": "data/consumed_samples",
        "detector": "threshold",
        "parameters": {"above": 7.0},
        "action": "stop",
    }
    callbacks = [monitor(folder, "own", health={"rules": [rule]})]
    Model(Own(nn.WithLossCell(net, Mean()), adam(net))).train(
        2, half, callbacks=callbacks, dataset_sink_mode=False
    )


def main(folder: Path) -> None:
    init()
    rank = get_rank()
    found = collectives()
    for name, mode in MODES.items():
        mindspore.set_context(mode=mode)
        mindspore.set_auto_parallel_context(
            parallel_mode="data_parallel", gradients_mean=True, device_num=2, global_rank=rank
        )
        net = network()
        # Each rank has its half of every batch.
        half = data(lambda: [row for index, row in enumerate(rows(16)) if index % 2 == rank])
        optimizer = adam(net)
        gradients = rows_of(folder, "weight_grad")
        if name == "pynative":
            gradients.start(net, optimizer)
        Model(net, Mean(), optimizer).train(
            1, half, callbacks=[monitor(folder, name, comparison={"every": 1})], dataset_sink_mode=False
        )
        gradients.stop()
        found[f"{name} weights"] = norm([one.asnumpy() for one in net.trainable_params()])
    own_cell(folder, data(lambda: [row for index, row in enumerate(rows(16)) if index % 2 == rank]))
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    calls(folder)
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
