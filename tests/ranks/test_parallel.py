"""One global batch, one model: whatever cuts them, the numbers are those of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import train
from tests.ranks.gloo import on_ranks

# The model computes in float32, and sums in another order on each layout.
FLOAT_ERROR = 2e-6
SAME = (
    *("loss/global", "grad/norm", "grad/clip_coef", "grad/nonfinite", "optim/lr"),
    *("weight/norm", "weight/nonfinite"),
    *("moment/norm/exp_avg", "moment/norm/exp_avg_sq", "moment/v_negative"),
    *("update/norm", "update/ratio", "update/zero_share", "update/norm_adam"),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train.run("single", str(tmp_path_factory.mktemp("single")))


@pytest.mark.parametrize(
    ("kind", "ranks", "backend"),
    [
        ("ddp", 2, "auto"),
        ("ddp", 2, "torch"),  # numbers arrive a step late, the last ones after the loop
        ("ddp", 4, "auto"),
        ("zero", 2, "auto"),  # each rank has the state of some parameters
        ("fsdp1", 2, "auto"),
        ("fsdp2", 2, "auto"),
        ("tp", 2, "auto"),
        ("tp+fsdp2", 4, "auto"),
        ("pp", 2, "auto"),
        ("pp+ddp", 4, "auto"),
    ],
)
def test_the_numbers_of_a_single_process(
    kind: str, ranks: int, backend: str, tmp_path: Path, alone: dict[str, Any]
) -> None:
    found = on_ranks(ranks, train.run, kind, str(tmp_path), None, None, backend)[0]
    assert [record["step"] for record in found["scalars"]] == [1, 2, 3]
    for record, expected in zip(found["scalars"], alone["scalars"], strict=True):
        for name in SAME:
            # Where state lies elsewhere than the copies, the estimate takes the decay from the weights after the step.
            error = 1e-4 if kind == "zero" and name == "update/norm_adam" else FLOAT_ERROR
            assert record[name] == pytest.approx(expected[name], rel=error), (kind, name)
        # Counted once where ranks share their tokens, and what came before once at all.
        assert record["data/tokens"] == 1000 + record["step"] * train.BATCH * train.TOKENS
        assert record["data/consumed_samples"] == record["step"] * train.BATCH
    moments = {"moment/norm/exp_avg", "moment/norm/exp_avg_sq"}
    rows, expected = (
        {key: row for key, row in one["rows"].items() if "spectral" not in key[0]} for one in (found, alone)
    )
    assert {series for series, _, _ in expected} == {"grad/norm", "weight/norm", "update/ratio"} | moments
    assert rows == pytest.approx(expected, rel=FLOAT_ERROR)
    _check_spectra(found["rows"], alone["rows"], cut="fsdp" in kind or "tp" in kind, flat=kind == "fsdp1")
    assert not [event for event in found["events"] if event.get("level") in ("warning", "error")]


def _check_spectra(found: dict[Any, Any], alone: dict[Any, Any], *, cut: bool, flat: bool) -> None:
    """Of whole matrices the same; of pieces an interval that holds the truth; of flat pieces none."""
    keys = [key for key in alone if key[0] == "spectral/stable_rank"]
    assert len(keys) == 9
    for key in keys:
        low, sigma = ((f"spectral/{what}", *key[1:]) for what in ("stable_rank_low", "sigma"))
        if flat:
            assert key not in found
            continue
        rank, value = alone[key], found[key]
        assert value >= rank * (1 - 1e-4)
        assert found[sigma] <= alone[sigma] * (1 + 1e-4)
        if found.get(low) is not None:
            assert found[low] <= rank * (1 + 1e-4)
        if cut:
            assert value <= 4 * rank and found[low] >= rank / 4, "as wide as there are pieces, at most"
        else:
            assert value == pytest.approx(rank, rel=1e-3)
            assert found[sigma] == pytest.approx(alone[sigma], rel=1e-3)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_one_rank_is_named_with_its_rank_and_index(bad: int, tmp_path: Path) -> None:
    found = on_ranks(2, train.run, "ddp", str(tmp_path), (bad, 2))[0]
    assert [record["grad/nonfinite"] for record in found["scalars"]][:2] == [0, 1]
    said = [event for event in found["events"] if event.get("kind") == "nonfinite_gradient"]
    (event,) = said
    assert event["step"] == 2
    assert event["data"]["ranks"] == [bad]
    assert event["data"]["first"]["index"] == 1
    assert event["data"]["first"]["name"] == "4.bias"
    assert event["text"].startswith(f"rank {bad}: gradient of 4.bias is not finite at step 2")


def test_a_rank_that_dies_leaves_nulls_and_training_goes_on(tmp_path: Path) -> None:
    found = on_ranks(3, train.run, "plain", str(tmp_path), None, (1, 1), silent=(1,))[0]
    first, *rest = found["scalars"]
    assert first["step"] == 1
    assert [record["step"] for record in rest] == [2, 3]
    for record in rest:
        assert record["loss/global"] is None, "one rank's value is no global one"
        assert record["grad/norm"] is None
    (event,) = [event for event in found["events"] if event.get("kind") == "ranks_lost"]
    assert "can't reach the others" in event["text"]


def test_ranks_that_are_configured_differently_are_told_at_the_start(tmp_path: Path) -> None:
    for rank, text in on_ranks(2, train.run_with_other_sections, str(tmp_path)).items():
        assert text.startswith(f"rank {1 - rank} measures something else than this one")
        assert "loss/" in text
        assert "the same configuration" in text
