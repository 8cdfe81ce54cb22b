"""Whatever a training step returns: loss, overflow and scale are found, and nothing is made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import Tensor, nn  # noqa: E402

from tests.hosts.mindspore.training import events_of, monitor, steps_of  # noqa: E402
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
