"""Attention, experts and norms, however heads, experts and tokens are spread over ranks: those of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import layers
from tests.ranks.gloo import on_ranks

# The model computes in float32, and sums in another order on each layout; second moments are small squares.
FLOAT_ERROR = 5e-6
#: A rank's own, or of its micro-batches.
OWN = ("moe/max_vio_micro", "activation/")
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
        ("pp", 2, 1, True, "auto"),
        ("ep", 2, 2, True, "auto"),
        ("ep", 4, 2, True, "torch"),
        ("ep", 4, 2, False, "auto"),
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
    assert [record["step"] for record in found["scalars"]] == [1, 2, 3]
    for record, truth in zip(found["scalars"], expected["scalars"], strict=True):
        names = [n for n in truth if n.startswith(SAME) and not n.startswith(OWN) and n != "grad/norm_device"]
        assert len(names) > 25
        for name in names:
            if truth[name] is None:
                assert record[name] is None, (kind, name)
            else:
                assert record[name] == pytest.approx(truth[name], rel=FLOAT_ERROR, abs=1e-12), (kind, name)
    rows = {key: row for key, row in expected["tables"].items() if not key[1].startswith("norm")}
    assert rows.keys() <= found["tables"].keys()
    for key, row in rows.items():
        for column, text in row.items():
            if column.startswith(SAME) and not column.startswith(OWN):
                value = found["tables"][key][column]
                assert (value == "") == (text == ""), (kind, key, column)
                if text:
                    assert float(value) == pytest.approx(float(text), rel=FLOAT_ERROR, abs=1e-12), (
                        key,
                        column,
                    )
    loads = [float(found["tables"][1, f"moe/{expert}"]["moe/load"]) for expert in range(layers.EXPERTS)]
    assert sum(loads) == layers.BATCH * layers.TOKENS * layers.CHOSEN, "every token once"
    said = [event for event in found["events"] if event.get("level") in ("warning", "error")]
    assert not said
