"""Frames in the form of the host's own monitor: lines, tags, which steps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainmon.adapters.mindformers.graph.host_config import HostConfig
from trainmon.adapters.mindformers.graph.lines import StateLines
from trainmon.adapters.mindformers.graph.settings import settings_of
from trainmon.frame import Snapshot, Table

EVERYWHERE = ["log", "tensorboard"]


class Board:
    """A writer of event files."""

    def __init__(self) -> None:
        self.written: list[tuple[int, str, Any]] = []

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.written.append((global_step, tag, value))

    add_scalars = add_scalar


def table(series: str, **values: float | None) -> Table:
    numbers = np.array([0.0 if value is None else value for value in values.values()])
    valid = np.array([value is not None for value in values.values()])
    return Table(series, series.split("/", maxsplit=1)[0], "", tuple(values), numbers, valid)


def snapshot(step: int, *tables: Table, **scalars: float | None) -> Snapshot:
    return Snapshot(
        step, 0.0, 0.0, {name.replace("__", "/"): value for name, value in scalars.items()}, tables
    )


def lines(section: dict[str, Any], writer: Any = None, **more: Any) -> StateLines:
    settings = settings_of(HostConfig({}), section)
    keys = {"logits": {}, "local_losses": {}, "samples": 8.0, "first_head": lambda heads: 0, **more}
    return StateLines(settings, 2, 10, writer, logging.getLogger("host"), **keys)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "host")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "host"]


def test_the_form_of_a_line(told: Any) -> None:
    show = lines(
        {"local_norm_format": "log", "device_local_norm_format": "log", "weight_state_format": "log"}
    )
    frame = table("grad/norm_local/<p>", **{"a.weight": 0.5, "b.weight": None})
    show(snapshot(13, frame, grad__norm_device=0.5, weight__norm=2.0, loss__global=1.0))
    assert told() == [
        "Epoch:[  2/  2], step:[    3/   10] local_norm/a.weight: 0.5",
        "Epoch:[  2/  2], step:[    3/   10] device_local_norm: 0.5",
        "Epoch:[  2/  2], step:[    3/   10] weight_norm: 2.0",
    ]


def test_every_so_many_steps_and_again_when_the_step_goes_back(told: Any) -> None:
    show = lines({"weight_state_format": "log", "step_interval": 3})
    for step in (1, 2, 3, 4, 6, 2, 3, 5):
        show(snapshot(step, weight__norm=float(step)))
    assert [float(line.rpartition(" ")[2]) for line in told()] == [3.0, 6.0, 2.0, 5.0]


def test_moments_are_named_after_the_parameter(told: Any) -> None:
    """G-16: the host's targets see its prefix ``adam_m.``."""
    settings = settings_of(HostConfig({}), {"optimizer_state_format": "log", "target": ["^layers"]})
    assert settings.config["moments"]["target"] == ["^layers"]
    show = lines({"optimizer_state_format": "log"})
    names = ("moment/norm/exp_avg/<p>", "moment/norm/exp_avg_sq/<p>")
    show(snapshot(1, *(table(name, **{"layers.0.w": 1.0}) for name in names)))
    assert [line.split("] ")[-1] for line in told()] == [
        "adam_m_norm/layers.0.w: 1.0",
        "adam_v_norm/layers.0.w: 1.0",
    ]


@pytest.mark.parametrize("mode", ["all", "full", "statistics", None])
def test_stable_ranks_of_experts(mode: str | None, told: Any) -> None:
    """G-1: without a mode all are shown; of one expert the same."""
    show = lines({"stable_rank_config": {"format": "log", "step_interval": 1, "moe_show_mode": mode}})
    ranks = table(
        "spectral/stable_rank/<p>", **{"w": 3.0, "e[0]": 1.0, "e[1]": 2.0, "e[2]": None, "one[0]": 4.0}
    )
    show(snapshot(1, ranks))
    tags = {line.split("] ")[-1] for line in told()}
    head = "weight_stable_rank/"
    single = {f"{head}w: 3.0"}
    each = {f"{head}e/expert_0: 1.0", f"{head}e/expert_1: 2.0", f"{head}one/expert_0: 4.0"}
    statistics = {f"{head}e/expert_{name}" for name in ("max: 2.0", "min: 1.0", "mean: 1.5")}
    statistics |= {f"{head}one/expert_{name}: 4.0" for name in ("max", "min", "mean")}
    expected = single | (each if mode != "statistics" else set()) | (statistics if mode != "full" else set())
    assert tags == expected


def test_heads_are_numbered_over_the_ranks_that_share_a_layer(told: Any) -> None:
    """G-3: rank 5 of tensor parallel 4 has the second quarter of the heads, not the second group of them."""
    board, layer = Board(), "decoder.layers.0.self_attention.core_attention.max_logits_val"
    show = lines(
        {"max_attention_logit_format": EVERYWHERE},
        board,
        logits={1: {layer: np.array([2.0, 0.0])}},
        first_head=lambda heads: 5 % 4 * heads,
    )
    show(snapshot(1, attention__max_logit=2.0, attention__max_logit_mean=2.0))
    assert (
        1,
        f"max_attention_logit/{layer}",
        {"head_2": 2.0},
    ) in board.written  # G-4: no number for what is unknown
    assert (1, "max_attention_logit/max", 2.0) in board.written
    assert (1, "max_attention_logit/mean", 2.0) in board.written
    assert f"max_attention_logit/{layer}: [2.0, nan]" in told()[2]


def test_local_losses(told: Any) -> None:
    board, losses = Board(), {1: {"lm": [1.0, 2.0]}, 2: {"lm": [3.0]}}
    show = lines(
        {"local_loss_format": EVERYWHERE, "device_local_loss_format": EVERYWHERE}, board, local_losses=losses
    )
    show(snapshot(1, loss__part__device_accum_local_lm=3.0))
    assert [line.split("] ")[-1] for line in told()] == [
        "device_accum_local_lm_loss: 3.0",
        "micro_local_lm_loss: 1.0",
        "micro_local_lm_loss: 2.0",
    ]
    assert (1, "local_lm_loss", 1.5) in board.written and (
        1,
        "device_accum_local_lm_loss",
        3.0,
    ) in board.written
    show(snapshot(2))
    assert told()[-1].endswith("micro_local_lm_loss: 3.0")  # of this step, whenever its frame comes


def test_throughput_over_the_baseline(told: Any) -> None:
    board = Board()
    show = lines({"throughput_baseline": 4.0}, board)
    show(snapshot(1, time__step=0.5))
    assert board.written == [(1, "throughput_linearity", 4.0)] and "throughput_linearity: 4.0" in told()[0]


def test_without_event_files_all_goes_to_the_log(told: Any) -> None:
    show = lines({"weight_state_format": "tensorboard"})
    show(snapshot(1, weight__norm=1.0))
    assert len(told()) == 1
    board = Board()
    lines({"weight_state_format": "tensorboard"}, board)(snapshot(1, weight__norm=1.0))
    assert len(told()) == 1 and board.written == [(1, "weight_norm", 1.0)]


def test_the_lines_of_the_host_itself_have_this_form() -> None:
    import re

    text = Path(__file__).with_name("state_monitor_lines.txt").read_text().splitlines()
    form = re.compile(r"Epoch:\[ *\d+/ *\d+\], step:\[ *\d+/ *\d+\] \S+: \S+")
    assert len(text) == 108 and all(form.fullmatch(line) for line in text)
