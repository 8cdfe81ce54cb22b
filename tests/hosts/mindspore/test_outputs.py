"""Whatever a training step returns: loss, overflow and scale are found, and nothing is made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import Tensor, nn  # noqa: E402
from mindspore.train import Model  # noqa: E402

from tests.hosts.mindspore.training import (  # noqa: E402
    Mean,
    adam,
    data,
    events_of,
    monitor,
    network,
    steps_of,
    train,
)
from trainmon.adapters.mindspore_parts.outputs import Outputs, number, read_outputs  # noqa: E402


def tensor(value: Any, kind: Any = None) -> Any:
    return Tensor(value, mindspore.float32 if kind is None else kind)


SHAPES: dict[str, tuple[Any, Outputs]] = {
    "scalar": (tensor(2.5), Outputs(2.5)),
    "one element": (tensor([2.5]), Outputs(2.5)),
    "several: their mean": (tensor([[1.0, 2.0], [3.0, 6.0]]), Outputs(3.0)),
    "half": (tensor(2.5, mindspore.bfloat16), Outputs(2.5)),
    "number": (2.5, Outputs(2.5)),
    "none": (None, Outputs()),
    "nothing": ((), Outputs()),
    "empty": (tensor(np.zeros((0,))), Outputs()),
    "text": ("2.5", Outputs()),
    "a tuple of one": ((tensor(2.5),), Outputs(2.5)),
    "loss and flag": ((tensor(2.5), Tensor(True)), Outputs(2.5, 1.0)),
    "loss and logits": ((tensor(2.5), tensor(np.ones((4, 3)))), Outputs(2.5, unread=1)),
    "loss and another loss": ((tensor(2.5), tensor(0.5)), Outputs(2.5, unread=1)),
    "three": ((tensor(2.5), Tensor(False), tensor(1024.0)), Outputs(2.5, 0.0, 1024.0)),
    "a list": ([tensor(2.5), Tensor([1], mindspore.int32), 512], Outputs(2.5, 1.0, 512.0)),
    "no scale": ((tensor(2.5), False, None), Outputs(2.5, 0.0)),
    "scale in words": ((tensor(2.5), False, "unavailable"), Outputs(2.5, 0.0)),
    "four": ((tensor([2.5]), Tensor(False), 8.0, tensor(0.5)), Outputs(2.5, 0.0, 8.0, 0.5)),
    "five": (
        (tensor([2.5]), Tensor([False]), tensor([8.0]), tensor(0.5), tensor([1.5])),
        Outputs(2.5, 0.0, 8.0, 0.5, 1.5),
    ),
    "five without clipping": ((tensor([2.5]), False, 8.0, 0.5, None), Outputs(2.5, 0.0, 8.0, 0.5)),
    "seven": (
        (tensor([2.5]), Tensor(True), 8.0, 0.5, tensor([1.5]), tensor([1.0, 4.0]), (3, 4)),
        Outputs(2.5, 1.0, 8.0, 0.5, 1.5),
    ),
    "six": ((tensor(2.5), False, 1.0, 1.0, 1.0, 1.0), Outputs(2.5, unread=5)),
    "named": (
        {"loss": tensor(2.5), "aux": tensor(0.5), "logits": tensor(np.ones((4, 3)))},
        Outputs(2.5, parts={"aux": 0.5}, unread=1),
    ),
    "named without loss": ({"aux": 0.5}, Outputs(parts={"aux": 0.5})),
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_known_shape(case: str) -> None:
    given, expected = SHAPES[case]
    assert read_outputs(given) == expected


def test_what_is_not_finite_stays_so() -> None:
    found = read_outputs((tensor(math.nan), Tensor(True), tensor(math.inf)))
    assert math.isnan(found.loss or 0.0) and found.overflow == 1 and found.loss_scale == math.inf
    assert math.isnan(number(tensor([1.0, math.nan])) or 0.0)


class Params(dict[str, Any]):
    """As MindSpore's own, whose class is private."""

    __getattr__ = dict.__getitem__


class Context:
    """A run that returns what it is told to."""

    def __init__(self) -> None:
        self.cell = nn.Dense(2, 2)
        self.params = Params(
            train_network=self.cell,
            network=self.cell,
            optimizer=None,
            epoch_num=1,
            batch_num=4,
            cur_step_num=0,
            mode="train",
            parallel_mode="stand_alone",
            device_number=1,
            dataset_sink_mode=False,
        )
        self.stops = False

    def original_args(self) -> Params:
        return self.params

    def request_stop(self) -> None:
        self.stops = True

    def get_stop_requested(self) -> bool:
        return self.stops

    def run(self, callback: Any, outputs: list[Any], stride: int = 1) -> int:
        """Returns after how many steps it ended."""
        callback.on_train_begin(self)
        self.params["cur_epoch_num"] = 1
        callback.on_train_epoch_begin(self)
        for one in outputs:
            self.params["cur_step_num"] += stride
            callback.on_train_step_begin(self)
            self.params["net_outputs"] = one
            callback.on_train_step_end(self)
            if self.stops:
                break
        callback.on_train_epoch_end(self)
        callback.on_train_end(self)
        return int(self.params.cur_step_num)


LOSSES = (11.6707, 8.8465, 8712.5938, 15806.3818)
FLAGS = (True, True, True, False)
AS: dict[str, Any] = {
    "tensor": Tensor,
    "bool": bool,
    "int": int,
    "tensor of an integer": lambda flag: Tensor([int(flag)], mindspore.int32),
}
RULE = {
    "series": "optim/overflow",
    "detector": "threshold",
    "parameters": {"above": 0.5},
    "consecutive": 3,
    "action": "stop",
}


@pytest.mark.parametrize("kind", AS)
@pytest.mark.parametrize("scale", [1024, None])
def test_overflow_on_every_step(kind: str, scale: int | None, tmp_path: Path) -> None:
    outputs = [(tensor(loss), AS[kind](flag), scale) for loss, flag in zip(LOSSES, FLAGS, strict=True)]
    Context().run(monitor(tmp_path), outputs)
    records = steps_of(tmp_path)
    assert [record["optim/overflow"] for record in records] == [1, 1, 1, 0]
    assert [record.get("optim/loss_scale") for record in records] == [scale] * 4
    assert [record["loss/global"] for record in records] == pytest.approx(LOSSES, rel=1e-6)


def test_three_overflows_in_a_row_stop_the_run(tmp_path: Path) -> None:
    outputs = [(tensor(loss), flag, 1024) for loss, flag in zip(LOSSES, FLAGS, strict=True)]
    assert Context().run(monitor(tmp_path, health={"rules": [RULE]}), outputs) == 3


def test_what_a_sink_of_steps_shows_is_said(tmp_path: Path) -> None:
    """A CPU has no sink mode: the host's calls, as MindSpore's own loop makes them."""
    context = Context()
    context.params["dataset_sink_mode"] = True
    context.run(monitor(tmp_path), [tensor(2.0), tensor(1.0)], stride=10)
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == [10, 20]
    assert [record["loss/global"] for record in records] == [2.0, 1.0]
    (told,) = [event for event in events_of(tmp_path) if event["kind"] == "sink_mode"]
    assert "the device runs 10 steps" in told["text"]


@pytest.mark.parametrize("every", [1, 3])
def test_a_sink_shows_its_last_step(every: int, tmp_path: Path) -> None:
    """A real compiled step, run three times between two looks of the host as a device would, beside the same training
    looked at in every step: the last one's loss, gradients, weights and rate, and the samples of all."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)

    def rate(net: Any) -> Any:
        return adam(net, [0.01, 0.02, 0.03, 0.04, 0.05, 0.06])

    train(monitor(tmp_path, "seen"), optimizer=rate)
    net = network()
    optimizer = rate(net)
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, Mean()), optimizer).set_train()
    context = Context()
    context.params.update(
        dataset_sink_mode=True, train_network=cell, network=net, optimizer=optimizer, train_dataset=data()
    )
    own = monitor(tmp_path, "sunk", gradients={"every": every, "per_parameter": True})
    own.on_train_begin(context)
    context.params["cur_epoch_num"] = 1
    own.on_train_epoch_begin(context)
    for _ in range(2):
        context.params["cur_step_num"] += 3  # as MindSpore's own loop: before the step begins
        own.on_train_step_begin(context)
        for batch in data().create_tuple_iterator():
            context.params["net_outputs"] = cell(*batch)
        own.on_train_step_end(context)
    own.on_train_end(context)
    seen = {record["step"]: record for record in steps_of(tmp_path, "seen")}
    records = steps_of(tmp_path, "sunk")
    assert [record["step"] for record in records] == [3, 6]
    for record in records:
        for key in (
            "loss/global",
            "grad/norm",
            "grad/nonfinite",
            "weight/norm",
            "optim/lr",
            "data/consumed_samples",
        ):
            assert record[key] == seen[record["step"]][key] is not None, key
        assert record["update/norm"] != seen[record["step"]]["update/norm"]  # of three steps together


def test_named_losses_of_a_real_step(mode: str, tmp_path: Path) -> None:
    class Named(nn.TrainOneStepCell):
        def construct(self, *inputs: Any) -> Any:
            loss = self.network(*inputs)
            gradients = self.grad(self.network, self.weights)(*inputs, mindspore.ops.ones_like(loss))
            loss = mindspore.ops.depend(loss, self.optimizer(gradients))
            return {"loss": loss, "aux": loss * 2}

    net = network()
    Model(Named(nn.WithLossCell(net, Mean()), adam(net))).train(
        1, data(), callbacks=[monitor(tmp_path)], dataset_sink_mode=False
    )
    for record in steps_of(tmp_path):
        assert record["loss/part/aux"] == 2 * record["loss/global"] > 0
