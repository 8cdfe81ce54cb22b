"""A small model, its data, and what a run of it with ``Model.train`` leaves on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
import mindspore.dataset
import numpy as np
from mindspore import nn, ops
from mindspore.train import Callback, Model

import trainmon
from trainmon.sinks.jsonl import read_jsonl

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}
BATCH, BATCHES = 4, 3


class Tied(nn.Cell):
    """An embedding that is used at both ends, a norm, and a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm((6,))
        self.hidden = nn.Dense(6, 6, activation="tanh")
        self.idle = mindspore.Parameter(mindspore.Tensor(np.ones(3, np.float32)), name="idle")

    def construct(self, ids: Any) -> Any:
        h = self.hidden(self.norm(self.embedding(ids)).mean(1))
        return ops.matmul(h, self.embedding.embedding_table.T)


class Mean(nn.Cell):
    """The mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.inner(logits, labels)


def rows(count: int = BATCH * BATCHES) -> Iterator[tuple[Any, Any]]:
    random = np.random.RandomState(3)
    for _ in range(count):
        yield random.randint(0, 11, (5,)).astype(np.int32), np.int32(random.randint(11))


def data(source: Any = rows, batch: int = BATCH) -> Any:
    return mindspore.dataset.GeneratorDataset(source, ["ids", "label"], shuffle=False).batch(batch)


def network() -> Tied:
    mindspore.set_seed(7)
    return Tied()


def adam(net: Any, rate: Any = 0.01, **keys: Any) -> Any:
    return nn.Adam(net.trainable_params(), learning_rate=rate, **keys)


def train(
    *callbacks: Any, epochs: int = 2, optimizer: Any = adam, net: Any = None, **keys: Any
) -> tuple[Any, Any]:
    """Returns the network and its optimizer after training."""
    net = network() if net is None else net
    opt = optimizer(net)
    Model(net, Mean(), opt).train(epochs, data(), callbacks=list(callbacks), dataset_sink_mode=False, **keys)
    return net, opt


def monitor(folder: Path, run: str = "r", **keys: Any) -> Any:
    """With everything looked at in every step."""
    settings = {
        "output_dir": str(folder),
        "run_name": run,
        "sinks": {"log": False},
        "gradients": {"per_parameter": True},
        "weights": {"every": 1},
        "moments": {"every": 1},
        "updates": {"every": 1},
        **keys,
    }
    own = {key: settings.pop(key) for key in ("resumed_step", "clips") if key in settings}
    return trainmon.MindSporeMonitor(settings, **own)


def steps_of(folder: Path, run: str = "r") -> list[dict[str, Any]]:
    return [record for record in read_jsonl(folder / run / "rank_0/scalars.jsonl") if "step" in record]


def events_of(folder: Path, run: str = "r") -> list[dict[str, Any]]:
    return [one for one in read_jsonl(folder / run / "rank_0/events.jsonl") if "kind" in one]


def ended(folder: Path, run: str = "r") -> dict[str, Any]:
    """The last life of a run."""
    found: dict[str, Any] = json.loads((folder / run / "run.json").read_text())["lives"][-1]
    return found


class Truth(Callback):
    """What NumPy makes of copies of parameters and moments after each step, and of gradients where they can be had."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[float] = []
        self.moments: list[tuple[float, float]] = []
        self.updates: list[float] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._before: list[Any] = []

    def on_train_step_begin(self, run_context: Any) -> None:
        optimizer = run_context.original_args().optimizer
        self.rates.append(float(optimizer.get_lr().asnumpy()))
        self._before = [one.asnumpy().copy() for one in optimizer.parameters]

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        optimizer = params.optimizer
        now = [one.asnumpy().copy() for one in optimizer.parameters]
        self.weights.append(norm(now))
        self.updates.append(norm([a.astype(np.float64) - b for a, b in zip(now, self._before, strict=True)]))
        moments = (norm([one.asnumpy() for one in state]) for state in (optimizer.moment1, optimizer.moment2))
        self.moments.append(tuple(moments))
        self.losses.append(float(params.net_outputs.asnumpy()))


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(one, np.float64)).sum() for one in arrays)))


def true_gradients(steps: int) -> list[dict[str, Any]]:
    """Of the training that :func:`train` does, each step's by name, from a loop of its own, in PyNative."""
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = network()
    opt, loss = adam(net), Mean()
    forward = mindspore.value_and_grad(lambda ids, label: loss(net(ids), label), None, opt.parameters)
    found = []
    while len(found) < steps:
        for ids, label in data().create_tuple_iterator():
            _, gradients = forward(ids, label)
            names = [one.name for one in opt.parameters]
            found.append({name: one.asnumpy().copy() for name, one in zip(names, gradients, strict=True)})
            opt(gradients)
    mindspore.set_context(mode=before)
    return found[:steps]
