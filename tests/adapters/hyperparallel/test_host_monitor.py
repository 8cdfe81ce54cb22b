"""The host's own monitor of losses and norms (``train.monitor``): each of its keys does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon
from tests.adapters.hyperparallel.runs import (
    build,
    inner_of,
    said,
    settings_of,
    steps_of,
    tables_of,
    train,
)
from tests.hosts.hyperparallel import model as task
from tests.hosts.hyperparallel.config_lm import MonitorConfig
from tests.ranks.gloo import on_ranks
from trainmon.adapters.hyperparallel.settings import settings_of as host_settings
from trainmon.sinks.jsonl import read_jsonl

KEYS = ("local_loss_format", "device_local_loss_format", "local_norm_format", "device_local_norm_format")
#: What the host's monitor calls a quantity: its series here, and how a tag of it begins.
SHOWN = {
    "local_loss_format": "loss/micro",
    "device_local_loss_format": "loss/device",
    "local_norm_format": "grad/norm_local",
    "device_local_norm_format": "grad/norm_device",
}


BOTH: dict[str, Any] = {key: ["log", "tensorboard"] for key in KEYS}


def monitored(name: str, place: Path, steps: int = 6, **keys: Any) -> Any:
    """A trained trainer whose host has its monitor on; the run is in ``place``."""

    def configure(configuration: Any) -> None:
        configuration.train.monitor = MonitorConfig(monitor_on=True, dump_path=str(place), **keys)

    trainer = build(name, settings_of(name, max_steps=steps, epochs=3), place, configure)
    trainmon.attach_hyperparallel(trainer, run_name="r")
    train(trainer)
    return trainer


def lines_of(place: Path) -> list[str]:
    lines = (place / "r/rank_0/log.txt").read_text().splitlines()
    return [line for line in lines if "grad norm" in line]


def tags_of(place: Path) -> set[str]:
    """Of scalars in the event files, as TensorBoard's own reader has them."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads event files"
    )
    files = list((place / "r").rglob("events.out.tfevents*"))
    if not files:
        return set()
    return set(accumulator.EventAccumulator(str(files[0].parent)).Reload().Tags()["scalars"])


FORMATS: tuple[Any, ...] = (None, ["log"], ["tensorboard"], ["log", "tensorboard"])


@pytest.mark.parametrize("turn", range(4))
def test_a_format_says_where_a_quantity_is_shown(tmp_path: Path, turn: int) -> None:
    """Each run gives every quantity another format; a single one may stand without a list."""
    formats = {key: FORMATS[(number + turn) % 4] for number, key in enumerate(KEYS)}
    if turn % 2:
        formats = {key: value[0] if value == ["log"] else value for key, value in formats.items()}
    monitored("g1", tmp_path, 3, **formats)
    lines, tags = lines_of(tmp_path), tags_of(tmp_path)
    assert len(lines) == 3 and {"loss/global", "grad/norm"} <= tags
    names = {series for record in steps_of(tmp_path) for series in record}
    names |= {series for series, _, _ in tables_of(tmp_path)}
    for key, value in formats.items():
        series = SHOWN[key]
        assert all((f"  {series} " in line) is ("log" in (value or ())) for line in lines), key
        shown = any(tag == series or tag.startswith(f"{series}/") for tag in tags)
        assert shown is ("tensorboard" in (value or ())), key
        assert (series in names) is bool(value), key


def test_without_formats_nothing_is_shown_and_the_monitor_off_is_nothing(tmp_path: Path) -> None:
    monitored("g1", tmp_path / "on")
    assert not tags_of(tmp_path / "on") and all(
        f"  {series} " not in line for series in SHOWN.values() for line in lines_of(tmp_path / "on")
    )

    def configure(configuration: Any) -> None:
        configuration.train.monitor = MonitorConfig(monitor_on=False, dump_path=str(tmp_path / "no"), **BOTH)

    trainer = build("g1", settings_of("g1"), tmp_path, configure)
    config_used = trainmon.attach_hyperparallel(trainer, output_dir=str(tmp_path / "off")).monitor.config
    assert config_used.sinks.tensorboard is None and not config_used.loss.micro  # type: ignore[union-attr]
    assert not (tmp_path / "no").exists()


def test_what_is_hidden_stays_out_of_event_files_that_another_section_asks_for() -> None:
    pytest.importorskip("tensorboard", reason="there are no event files without it")
    monitor = {"monitor_on": True, "step_interval": 6, "device_local_loss_format": ["tensorboard"]}
    sections = {"monitor": monitor, "tensorboard": {"enabled": True, "log_steps": 4}}
    sink = host_settings(SimpleNamespace(args={}, config=sections)).config["sinks"]["tensorboard"]
    assert sink["every"] == 2 and not any("loss/device" in pattern for pattern in sink["exclude"])
    assert len(sink["exclude"]) == 3
    del monitor["device_local_loss_format"]
    sink = host_settings(SimpleNamespace(args={}, config=sections)).config["sinks"]["tensorboard"]
    assert sink["every"] == 4 and len(sink["exclude"]) == 4


def test_a_format_that_is_none_is_said() -> None:
    monitor = {"monitor_on": True, "local_loss_format": ["log", "csv"]}
    found = host_settings(SimpleNamespace(args={}, config={"monitor": monitor}))
    assert found.config["loss"]["micro"] and "'csv' is neither log nor tensorboard" in found.problems[0]


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_the_interval_is_that_of_the_ranks_own_values(tmp_path: Path, name: str) -> None:
    monitored(name, tmp_path, step_interval=2, **BOTH)
    records, rows = steps_of(tmp_path), tables_of(tmp_path)
    assert [record["step"] for record in records if "loss/global" in record] == [1, 2, 3, 4, 5, 6]
    for scalar in ("loss/device", "grad/norm_device"):
        assert [record["step"] for record in records if scalar in record] == [1, 2, 4, 6]
    for table in ("loss/micro", "grad/norm_local"):
        assert sorted({int(step) for series, step, _ in rows if series == table}) == [1, 2, 4, 6]
    for number, line in enumerate(lines_of(tmp_path), start=1):
        assert "loss  " in line and all(
            (f"  {series} " in line) is (number in (1, 2, 4, 6)) for series in SHOWN.values()
        )
    (told,) = said(tmp_path, "host_settings")
    assert "train.monitor" in told["text"]


@pytest.mark.parametrize(
    ("target", "invert", "chosen"),
    [
        (None, False, ""),
        (["moe", "head"], False, r"moe|head"),
        (["moe", "head"], True, r"embed|up|down"),
        ("bias", False, "bias"),
        ([".*"], True, None),
    ],
)
def test_target_and_invert_choose_the_parameters(
    tmp_path: Path, target: Any, invert: bool, chosen: Any
) -> None:
    """Of single norms and of total ones, which have a name of their own; 0 of none, as the host has it."""
    norms: list[float] = []

    def keep(trainer: Any) -> None:
        parameters = [
            parameter
            for parameter_name, parameter in trainer.base.model.named_parameters()
            if chosen is not None and re.search(chosen, parameter_name)
        ]
        clip = trainer.base._non_pp_clip_grad_norm

        def around(limit: float) -> Any:
            norms.append(task.norm([parameter.grad for parameter in parameters]))
            return clip(limit)

        trainer.base._non_pp_clip_grad_norm = around

    def configure(configuration: Any) -> None:
        configuration.train.monitor = MonitorConfig(
            monitor_on=True,
            dump_path=str(tmp_path),
            target=target,
            invert=invert,
            local_norm_format=["log"],
            device_local_norm_format=["log"],
        )

    trainer = build("g1", settings_of("g1"), tmp_path, configure)
    keep(trainer)
    trainmon.attach_hyperparallel(trainer, run_name="r")
    train(trainer)
    records = steps_of(tmp_path)
    names = {parameter for parameter, _ in inner_of(trainer).model.named_parameters()}
    wanted = {one for one in names if chosen is not None and re.search(chosen, one)}
    rows = tables_of(tmp_path)
    assert {row for series, _, row in rows if series == "grad/norm_local"} == wanted
    whole = [step["grad_norm"] for step in task.plain_run(settings_of("g1"), "token")]
    assert [record["grad/norm"] for record in records] == pytest.approx(whole, rel=1e-4)
    assert [record["grad/norm_device"] for record in records] == pytest.approx(whole, rel=1e-4)
    for series in ("grad/norm_selected", "grad/norm_device_selected"):
        if target is None:
            assert all(series not in record for record in records)
        else:
            assert [record[series] for record in records] == pytest.approx(norms, rel=1e-5)
    if chosen is None:
        assert norms == [0.0] * 3 and said(tmp_path, "nothing_selected")


def own_values(directory: str) -> None:
    """On a rank: the host's monitor is on."""
    place = Path(directory)

    def configure(configuration: Any) -> None:
        configuration.train.monitor = MonitorConfig(
            monitor_on=True, dump_path=directory, step_interval=2, target=["head"], **BOTH
        )

    trainer = build("g1", settings_of("g1"), place, configure)
    trainmon.attach_hyperparallel(trainer, run_name="r", ranks="all")
    train(trainer)


def test_the_ranks_own_values_stand_side_by_side(tmp_path: Path) -> None:
    """What the host's monitor keeps on each rank alone."""
    on_ranks(2, own_values, str(tmp_path))
    own = [
        {record["step"]: record for record in steps_of(tmp_path, rank) if record["step"] == 2}[2]
        for rank in (0, 1)
    ]
    records = read_jsonl(tmp_path / "r/rank_0/ranks.jsonl")
    (step,) = [record["series"] for record in records if record.get("step") == 2]
    for series in ("loss/device", "grad/norm_device", "grad/norm_device_selected"):
        values = [record[series] for record in own]
        assert len(set(values)) == 2
        assert (step[series]["low"], step[series]["high"]) == (min(values), max(values))
        assert step[series]["high_rank"] == values.index(max(values))
