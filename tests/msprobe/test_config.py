"""The configuration of msProbe's Monitor V2: every value that is wrong, and the arithmetic of windows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trainmon.msprobe import TrainerMonitorV2
from trainmon.msprobe.config import OPS, Mode, Settings, read_settings, slug

TIMES = 100_000_000


def settings(mode: Mode = Mode.DEFAULT, **config: Any) -> Settings:
    if mode is Mode.V2:
        config["compat"] = "msprobe-v2"
    elif mode is Mode.EXTENDED:
        config["extended"] = True
    return read_settings(config)


def monitor(kind: str, mode: Mode = Mode.DEFAULT, **keys: Any) -> Any:
    (one,) = settings(mode, monitors={kind: {"enabled": True, **keys}}).monitors
    return one


@pytest.mark.parametrize("content", ["", "{", "not json"])
def test_a_file_that_is_no_json(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(RuntimeError) as failure:
        TrainerMonitorV2(str(path))
    assert failure.value.__cause__ is not None
    with pytest.raises(RuntimeError):
        TrainerMonitorV2(str(tmp_path / "missing.json"))


@pytest.mark.parametrize("content", ["[]", "1", "null", '"text"'])
def test_a_file_that_is_no_object(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(TypeError):
        TrainerMonitorV2(str(path))


@pytest.mark.parametrize("name", ["pytorch", "pt", " Torch ", "PYTORCH"])
def test_frameworks(name: str) -> None:
    assert settings(framework=name).framework == "pytorch"
    assert read_settings({"framework": "jax"}, name).framework == "pytorch"
    assert settings(framework="ms").framework == settings(framework="MindSpore").framework == "mindspore"


@pytest.mark.parametrize("key", ["framework", "format"])
@pytest.mark.parametrize("value", ["jax", 1, "tensorboard", ""])
def test_what_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError):
        settings(**{key: value})


def test_null() -> None:
    with pytest.raises(ValueError):
        settings(framework=None)
    assert settings(format=None).window.start == 0
    assert settings(format=" CSV ").window.start == 0


@pytest.mark.parametrize(
    ("key", "value", "field", "default"),
    [
        (key, value, field, default)
        for key, field, default, least in (
            ("start_step", "start", 0, 0),
            ("step_interval", "interval", 1, 1),
            ("collect_times", "times", TIMES, 1),
            ("stop_step", "stop", TIMES, 0),
            ("step_count_per_record", "record", 1, 1),
        )
        for value in ("3", True, 2.0, None, least - 1)
    ]
    + [("step_count_per_record", 1_000_001, "record", 1)],
)
def test_numbers(key: str, value: Any, field: str, default: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert getattr(settings(**{key: value}).window, field) == default
    assert key in caplog.text


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        (0, {0}),
        ([1, 3], {1, 3}),
        ([], None),
        ("1", None),
        (None, None),
        ([True], None),
        ([1.0], None),
        (True, {1}),
    ],
)
def test_ranks(value: Any, ranks: set[int] | None) -> None:
    assert settings(rank=value).ranks == ranks


def test_a_bare_bool_as_rank() -> None:
    assert settings(Mode.V2, rank=True).ranks == {1}
    assert settings(Mode.EXTENDED, rank=True).ranks is None


@pytest.mark.parametrize("value", [None, [], "module", 3])
def test_monitors_that_are_no_object(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert settings(monitors=value).monitors == ()
    assert "monitors" in caplog.text


def test_entries_of_monitors(caplog: pytest.LogCaptureFixture) -> None:
    found = settings(
        monitors={
            "module": {},
            "MODULE": {},
            "Weight_Grad": {"enabled": 1},
            "param": 7,
            "loss": {"enabled": True},
            "optimizer": {},
        }
    )
    assert [(one.key, one.kind) for one in found.monitors] == [
        ("module", "module"),
        ("Weight_Grad", "weight_grad"),
    ]
    assert "monitors.param must be an object" in caplog.text
    assert "'loss'" in caplog.text


def test_unknown_keys_are_said_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    settings(Mode.V2, start_stepp=1)
    assert not caplog.text
    settings(start_stepp=1, monitors={"module": {"target": ["fc"]}})
    assert "did you mean 'start_step'" in caplog.text
    assert "did you mean 'targets'" in caplog.text


@pytest.mark.parametrize(
    ("mode", "text", "meant"),
    [
        (Mode.V2, "false", True),
        (Mode.DEFAULT, "false", True),
        (Mode.DEFAULT, "", False),
        (Mode.EXTENDED, "false", False),
        (Mode.EXTENDED, "Yes", True),
        (Mode.EXTENDED, "0", False),
        (Mode.EXTENDED, "perhaps", False),
    ],
)
def test_text_for_a_bool(mode: Mode, text: str, meant: bool) -> None:
    found = settings(mode, monitors={"param": {"enabled": text}}).monitors
    assert bool(found) == meant


def test_text_for_other_bools() -> None:
    assert settings(patch_optimizer_step="false").patch is True
    assert settings(Mode.EXTENDED, patch_optimizer_step="false").patch is False
    assert settings().patch is None
    assert monitor("optimizer", mv_distribution="false").distribution
    assert not monitor("param", Mode.EXTENDED, param_distribution="off").distribution
    assert monitor("cc", cc_pre_hook="no", cc_log_only=0).before


@pytest.mark.parametrize("value", ["true", 1, None, []])
def test_monitor_mbs_grad_is_a_bool(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert not monitor("weight_grad", monitor_mbs_grad=value).each_micro
    assert "monitor_mbs_grad" in caplog.text
    assert monitor("weight_grad", monitor_mbs_grad=True).each_micro


@pytest.mark.parametrize(
    ("value", "ops", "said"),
    [
        ("norm", ("norm",), False),
        (["nans", "min"], ("nans", "min"), False),
        (["std", "mean"], ("mean",), True),
        (["std"], OPS, True),
        ([], OPS, True),
        (None, OPS, False),
        (3, OPS, False),
        (["min", "min"], ("min",), False),
        ([1, None, "max"], ("max",), True),
    ],
)
def test_ops(value: Any, ops: tuple[str, ...], said: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert monitor("param", ops=value).ops == ops
    assert ("ops" in caplog.text) == said


@pytest.mark.parametrize("kind", ["module", "weight_grad", "optimizer", "param"])
@pytest.mark.parametrize("value", ["small", None, [], {}])
def test_eps_that_is_no_number(kind: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    monitor(kind, eps=value)
    assert "eps" in caplog.text


def test_targets(caplog: pytest.LogCaptureFixture) -> None:
    assert monitor("module", targets=["a", "b"]).targets == ("a", "b")
    assert monitor("module", targets=None).targets == ()
    assert not caplog.text
    assert monitor("module", targets="fc").targets == ("f", "c")
    assert "targets" in caplog.text
    assert monitor("module", Mode.EXTENDED, targets="fc").targets == ("fc",)


def test_patterns_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    assert monitor("cc", cc_codeline=["a(", "b"]).codelines == ("b",)
    assert "'a(' is no regular expression" in caplog.text
    assert monitor("param", Mode.EXTENDED, targets=["re:(", "!re:[", "w"]).targets == ("w",)


@pytest.mark.parametrize("value", ["own ", 1, None])
def test_views_of_gradients(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert monitor("weight_grad", Mode.EXTENDED, grad_view="own").own
    assert not monitor("weight_grad", grad_view="own").own
    assert "grad_view needs extended" in caplog.text
    assert not monitor("weight_grad", Mode.EXTENDED, grad_view=value).own
    assert "must be one of ['accumulated', 'own']" in caplog.text


def test_passes_that_are_left_out() -> None:
    for mode in (Mode.V2, Mode.DEFAULT):
        one = monitor("module", mode, include_eval=False)
        assert one.evaluation and one.repeated
    one = monitor("module", Mode.EXTENDED)
    assert not one.evaluation and not one.repeated
    one = monitor("module", Mode.EXTENDED, include_eval="yes", include_recompute=True)
    assert one.evaluation and one.repeated


@pytest.mark.parametrize("value", ["3", True, -1, None, 2.0])
def test_the_first_step_is_a_number(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert settings(start_iteration=value).first == 0
    assert "start_iteration" in caplog.text
    assert settings(start_iteration=7).first == 7
    assert settings(Mode.V2, start_iteration=7).first == 0


def test_the_older_form_of_cc(caplog: pytest.LogCaptureFixture) -> None:
    one = monitor(
        "cc", cc_distribution={"cc_pre_hook": True, "cc_codeline": ["a"]}, cc_log_only=True, module_ranks=[2]
    )
    assert (one.before, one.codelines, one.log_only, one.ranks) == (True, ("a",), False, None)
    assert monitor("cc", module_ranks=[2]).ranks == {2}
    monitor("cc", cc_distribution={"cc_log": True})
    assert "monitors.cc.cc_distribution.cc_log is no key" in caplog.text
    assert "did you mean 'cc_log_only'" in caplog.text


def test_modes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert settings().mode is Mode.DEFAULT
    assert settings(extended=True).mode is Mode.EXTENDED
    assert settings(extended=True, compat="msprobe-v2").mode is Mode.V2
    assert "extended is ignored" in caplog.text
    assert settings(compat="msprobe-v3").mode is Mode.DEFAULT
    assert "msprobe-v3" in caplog.text
    monkeypatch.setenv("TRAINMON_COMPAT", "msprobe-v2")
    assert settings().mode is Mode.V2


@pytest.mark.parametrize(
    ("config", "steps", "files"),
    [
        (
            {"start_step": 2, "step_interval": 3, "step_count_per_record": 4, "collect_times": 3},
            [2, 5, 8],
            [(2, 5), (2, 5), (6, 9)],
        ),
        (
            {"start_step": 1, "step_interval": 2, "step_count_per_record": 4, "collect_times": 2},
            [1, 3],
            [(1, 4), (1, 4)],
        ),
        ({"start_step": 5, "stop_step": 5}, [], []),
        ({"collect_times": 2}, [0, 1], [(0, 0), (1, 1)]),
        ({"start_step": 1, "stop_step": 4, "step_interval": 2}, [1, 3], [(1, 1), (3, 3)]),
    ],
)
def test_windows(config: dict[str, int], steps: list[int], files: list[tuple[int, int]]) -> None:
    window = settings(**config).window
    written = []
    for step in range(20):
        assert window.over(step) == (not [one for one in steps if one >= step])
        if window.due(step):
            window.collected += 1
            written.append(step)
    assert written == steps
    assert [window.span(step) for step in steps] == files


def test_the_file_of_a_step_before_the_start() -> None:
    assert settings(start_step=5, step_count_per_record=4).window.span(3) == (3, 6)


@pytest.mark.parametrize(
    ("key", "name"),
    [("a/b", "a_b"), ("__x__", "x"), ("..", "monitor"), ("a..b", "a_b"), ("ä b", "b"), ("", "monitor")],
)
def test_names_of_files(key: str, name: str) -> None:
    assert slug(key) == name


@pytest.mark.parametrize("name", ["a b", "a+b", "äöü", "数据", "deep/er/path"])
def test_any_directory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"output_dir": str(tmp_path / name), "monitors": {}}))
    TrainerMonitorV2(str(path))
    assert (tmp_path / name / "rank_0").is_dir()


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    TrainerMonitorV2({"output_dir": "~/out"})
    assert (tmp_path / "out" / "rank_0").is_dir()


def test_other_ranks_have_a_directory_and_do_nothing(tmp_path: Path) -> None:
    mon = TrainerMonitorV2(
        {"output_dir": str(tmp_path), "rank": [1], "monitors": {"param": {"enabled": True}}}
    )
    mon.start()
    mon.step()
    mon.stop()
    assert mon.current_step == 0
    assert (tmp_path / "rank_0").is_dir()
