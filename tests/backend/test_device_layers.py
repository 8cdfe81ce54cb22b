"""What flows through modules on tensors whose numbers only counted reads can get: one packed read a step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="this is about torch's tensors")

import trainmon  # noqa: E402
from tests.backend.counted import Counted, on_device  # noqa: E402
from tests.ranks import layers  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

STEPS = 4
EVERYTHING: dict[str, Any] = {
    "activations": {"every": 1, "input": True, "backward": True},
    "attention": {"every": 1, "rows": 3, "per_head": True, "qk_clip": 1.0},
    "moe": {"per_expert": True, "capacity_factor": 1.0, "bias_cap": 0.1},
}


def train(
    directory: Path, model: Any, backend: Any, held: Any
) -> tuple[list[dict[str, Any]], Any, list[int]]:
    """Scalars, tables, and the reads that each step took; `held` puts what the loop hands over where the model is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"output_dir": str(directory), "run_name": "r", "sinks": ["csv", "jsonl"], **EVERYTHING}
    reads = []
    with trainmon.attach(model, optimizer, keys, backend=backend) as mon:
        for step in range(STEPS):
            before = len(Counted.reads)
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + micro)
                x = torch.randn(2, layers.TOKENS, layers.WIDTH, generator=generator)
                model(x).square().mean().backward()
                mon.attention("own", max_logit=held(torch.tensor([0.5, 3.0])))
                mon.attention_rows("rows", held(torch.zeros(1, 2, 3)), held(torch.full((1, 2, 3), 2.0)))
                mon.attention_qk(
                    "masked", held(x[:, None]), held(x[:, None]), mask=held(x[:, None] @ x[:, None].mT > 0)
                )
                mon.experts("own", counts=held(torch.tensor([3, 1])), dropped=held(torch.tensor(1)))
                mon.experts("ids", indices=held(torch.tensor([0, 2, 2, 7])), num_experts=3)
                mon.micro_end()
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
            reads.append(len(Counted.reads) - before)
    place = directory / "r/rank_0"
    tables = {}
    for path in sorted((place / "tensors").glob("*.csv")):
        with path.open(newline="") as stream:
            tables.update({(path.name, row["step"], row["name"]): row for row in csv.DictReader(stream)})
    return [r for r in read_jsonl(place / "scalars.jsonl") if "step" in r], tables, reads


def test_one_packed_read_a_step_and_the_numbers_of_the_host(tmp_path: Path) -> None:
    found, tables, reads = train(tmp_path / "device", on_device(layers.build()), "torch", Counted)
    assert reads == [0, *[1] * (STEPS - 1)]
    expected, rows, _ = train(tmp_path / "host", layers.build(), "host", lambda tensor: tensor)
    for ours, theirs in zip(found, expected, strict=True):
        names = [name for name in theirs if name.startswith(("attention/", "moe/"))]
        assert len(names) > 40 and ours.keys() == theirs.keys()
        for name in names:
            value = theirs[name]
            assert ours[name] == (None if value is None else pytest.approx(value, rel=2e-5, abs=1e-7)), name
    assert tables.keys() == rows.keys()
    for key, row in rows.items():
        for column, text in row.items():
            if column.startswith(("attention/", "moe/", "activation/")):
                assert (tables[key][column] == "") == (text == ""), (key, column)
                if text:
                    assert float(tables[key][column]) == pytest.approx(float(text), rel=2e-5, abs=1e-7), (
                        key,
                        column,
                    )
