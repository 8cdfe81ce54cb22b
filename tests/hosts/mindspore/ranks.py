"""What two ranks of msrun do: the group's collectives, then a data parallel training in each mode, watched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore.communication import get_rank, init
from mindspore.train import Model

from tests.hosts.mindspore.training import MODES, Mean, adam, data, monitor, network, norm, rows
from trainmon.dist.mindspore_group import MindSporeGroup

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
        Model(net, Mean(), adam(net)).train(
            1, half, callbacks=[monitor(folder, name)], dataset_sink_mode=False
        )
        found[f"{name} weights"] = norm([one.asnumpy() for one in net.trainable_params()])
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
