"""Attention, experts and norms, however heads, experts and tokens are spread over ranks: those of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainmon
from tests.ranks import layers
from tests.ranks.gloo import on_ranks

# The model computes in float32, and sums in another order on each layout; second moments are small squares.
FLOAT_ERROR = 5e-6
#: A rank's own.
OWN = ("activation/",)
#: Layouts whose micro-batches are not those of a single process: each rank has other tokens.
OTHER_MICROS = ("ddp", "fsdp2", "tp+fsdp2", "ep", "ep+fsdp2")
SAME = ("loss/global", "grad/", "weight/", "moment/", "attention/", "moe/", "perf/none")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    return {
        stacked: layers.run("single", str(tmp_path_factory.mktemp("single")), stacked=stacked)
        for stacked in (True, False)
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "ep_size", "stacked", "backend"),
    [
        ("ddp", 2, 1, True, "auto"),
        ("fsdp2", 2, 1, True, "auto"),
        ("tp", 2, 1, True, "auto"),
        ("tp+fsdp2", 4, 1, True, "auto"),
        ("sp", 2, 1, True, "auto"),
        ("cp", 2, 1, True, "auto"),
        ("pp", 2, 1, True, "auto"),
        ("ep", 2, 2, True, "auto"),
        ("ep", 4, 2, True, "torch"),
        ("ep", 4, 2, False, "auto"),
        ("ep+fsdp2", 4, 2, True, "auto"),
    ],
)
def test_layers_show_the_numbers_of_a_single_process(
    kind: str,
    ranks: int,
    ep_size: int,
    stacked: bool,
    backend: str,
    tmp_path: Path,
    alone: dict[bool, dict[str, Any]],
) -> None:
    found = on_ranks(ranks, layers.run, kind, str(tmp_path), ep_size, stacked, backend)[0]
    expected = alone[stacked]
    own = (*OWN, "moe/max_vio_micro") if kind in OTHER_MICROS else OWN
    assert [record["step"] for record in found["scalars"]] == [1, 2, 3]
    for record, truth in zip(found["scalars"], expected["scalars"], strict=True):
        names = [n for n in truth if n.startswith(SAME) and not n.startswith(own) and n != "grad/norm_device"]
        if (
            record["step"] == 1
        ):  # a layer that is first heard of in a step has its place from the next report on
            names = [name for name in names if not name.endswith("/handed")]
        assert len(names) > 25
        for name in names:
            if truth[name] is None:
                assert record[name] is None, (kind, name)
            else:
                assert record[name] == pytest.approx(truth[name], rel=FLOAT_ERROR, abs=1e-12), (kind, name)
    rows = expected["tables"]
    late = {key for key in rows if key[0] == 1 and key[1].startswith("handed")}
    assert rows.keys() - late <= found["tables"].keys()
    for key, row in rows.items():
        if key in late:
            continue
        for column, text in row.items():
            if column.startswith(SAME) and not column.startswith(own):
                value = found["tables"][key][column]
                assert (value == "") == (text == ""), (kind, key, column)
                if text:
                    assert float(value) == pytest.approx(float(text), rel=FLOAT_ERROR, abs=1e-12), (
                        key,
                        column,
                    )
    loads = [float(found["tables"][1, f"moe/{expert}"]["moe/load"]) for expert in range(layers.EXPERTS)]
    assert sum(loads) == layers.BATCH * layers.TOKENS * layers.CHOSEN, "every token once"
    _check_activations(kind, ranks, found["tables"], expected)
    _check_spectra(kind, backend, found["tables"], rows)
    assert found["scalars"][-1]["data/consumed_samples"] == layers.STEPS * layers.BATCH
    said = [event for event in found["events"] if event.get("level") in ("warning", "error")]
    assert not said


def _check_activations(kind: str, ranks: int, tables: dict[Any, Any], expected: dict[str, Any]) -> None:
    """Each rank its own part of the activations; the largest over the ranks."""
    batch = {"ddp": ranks, "fsdp2": ranks, "ep": ranks, "ep+fsdp2": ranks, "tp+fsdp2": 2}.get(kind, 1)
    tokens = ranks if kind == "cp" else 1
    for step in range(layers.STEPS):
        for name, seen in expected["flows"].items():
            whole = np.concatenate(seen[2 * step : 2 * step + 2])
            # Attention sees all of the sequences, and has its heads' features.
            row_parts = ranks if (kind == "sp" and name == "norm") else tokens
            features = 2 if kind in ("tp", "tp+fsdp2", "sp") and name != "norm" else 1
            norms = [
                float(np.linalg.norm(piece.astype(np.float64)))
                for some in np.split(whole, batch)
                for part in np.split(some, row_parts, axis=1)
                for piece in np.split(part, features, axis=2)
            ]
            row = tables[step + 1, name]
            assert float(row["activation/norm"]) == pytest.approx(max(norms), rel=FLOAT_ERROR)
            assert float(row["activation/absmax"]) == pytest.approx(float(abs(whole).max()), rel=FLOAT_ERROR)
            assert float(row["activation/nonfinite"]) == 0


def _check_spectra(kind: str, backend: str, tables: dict[Any, Any], expected: dict[Any, Any]) -> None:
    """Of matrices that lie on one rank, each expert's among them, those of a single process; of pieces an interval."""
    names = {name for _, name in expected if "spectral/sigma" in expected[1, name]}
    experts = {name for name in names if ".experts." in name}
    assert len(names) == 14 if "moe.experts.w1[3]" in names else 10
    assert len(experts) in (4, 8), "each expert has rows of its own"
    for step, name in ((step, name) for step in (1, 2, 3) for name in names):
        rank, sigma, low = (
            [float(table[step, name].get(f"spectral/{what}") or "nan") for table in (expected, tables)]
            for what in ("stable_rank", "sigma", "stable_rank_low")
        )
        cut = kind in ("fsdp2", "tp+fsdp2") or (kind in ("tp", "sp") and "attn" in name)
        if cut:
            assert low[1] <= rank[0] * (1 + FLOAT_ERROR) and rank[1] >= rank[0] * (1 - FLOAT_ERROR)
            assert rank[1] <= 4 * rank[0] and low[1] >= rank[0] / 4
        else:
            error = 2e-2 if backend == "torch" else FLOAT_ERROR  # on a device a bound from below
            assert rank[1] == pytest.approx(rank[0], rel=error), (name, step)
            assert sigma[1] == pytest.approx(sigma[0], rel=error), (name, step)


def test_what_piece_of_says_has_to_be_possible() -> None:
    model = layers.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for told in ((3, 4), (-1, 4), (0, 2), 4, (0, 4, 1)):
        with pytest.raises(ValueError, match=r"w1.*needs \(first, whole\), where its 4 rows begin"):
            trainmon.attach(
                model, optimizer, sinks=[], piece_of=lambda name, _, told=told: told if "w1" in name else None
            )


def test_matrices_of_a_stack_that_nobody_placed_have_no_spectrum(tmp_path: Path) -> None:
    """Numbered from 0 on every rank, they would pass for pieces of each other."""
    model = layers.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"output_dir": str(tmp_path), "run_name": "r", "spectral": {"every": 1}}
    with trainmon.attach(
        model, optimizer, keys, piece_of=lambda name, _: "mine" if "w1" in name else None
    ) as monitor:
        monitor.step_end()
    found = layers.read(tmp_path / "r/rank_0")
    names = {name for _, name in found["tables"]}
    assert "moe.experts.w2[3]" in names and not any("w1" in name for name in names)
    (said,) = [event for event in found["events"] if event.get("kind") == "spectral_unplaced"]
    assert "moe.experts.w1 is a piece of a stack" in said["text"] and "(first, whole)" in said["text"]
