"""Every recorded case of msProbe's Monitor V2, in both modes.

`compat: "msprobe-v2"` writes msProbe's bytes; the default its rows with exact values and those that it loses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.msprobe import golden

pytest.importorskip("torch")

REPOSITORY = Path(__file__).parents[2]
#: So that float32 results repeat on other processors, as far as they do.
PORTABLE = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}

NAMES = sorted(golden.recordings())
ALONE = [name for name in NAMES if golden.info(name)["case"].get("world", 1) == 1]
RANKS = [name for name in NAMES if name not in ALONE]
#: Cases that msProbe refuses rightly.
REFUSED = {"format_not_csv", "framework_unknown", "needs_optimizer"}
#: Cases in which msProbe failed.
CRASHED = {name for name in NAMES for one in golden.info(name)["results"] if one["events"]}
CRASHED -= REFUSED | {"step_raises"}  # the case raises itself
#: Where trainmon differs from msProbe in every mode: a restart with other columns goes to a second file; what
#: `load_state_dict` has replaced is not read.
PARTS, STALE = "restart_other_ops", "opt_state_reload"

#: Cases with rows of collectives.
COLLECTIVES = ("cc_gloo", "cc_gloo_post_only")


class Runs:
    """What came of all cases."""

    def __init__(self, root: Path, results: dict[str, dict[str, Any]]) -> None:
        self.root, self._results = root, results

    def tree(self, name: str, mode: str) -> golden.Tree:
        return golden.tree(self.root / name / mode)

    def result(self, name: str, mode: str) -> dict[str, Any]:
        return self._results[f"{name}/{mode}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    from tests.ranks.gloo import on_ranks

    root = tmp_path_factory.mktemp("golden")
    answer = root / "answer.json"
    subprocess.run(
        [sys.executable, "-m", "tests.msprobe.golden", str(root), str(answer), *ALONE],
        cwd=REPOSITORY,
        env={**os.environ, **PORTABLE},
        check=True,
        timeout=300,
    )
    results = json.loads(answer.read_text())
    results |= on_ranks(2, golden.run, RANKS, str(root))[0]
    yield Runs(root, results)


def complete(name: str, runs: Runs) -> golden.Tree:
    """The exact tables, by `Reference`; of a restart with other columns one file a run."""
    want = runs.tree(name, "reference")
    if name != PARTS:
        return want
    parts: golden.Tree = {}
    for path, data in want.items():
        head, *lines = data.decode().split("\r\n")
        second = golden.info(name)["case"]["config2"]["monitors"]["param"]["ops"]
        cut = len([line for line in lines if line.count(",") == head.count(",")])
        common = ",".join(head.split(",")[:4])
        parts[path] = "\r\n".join([head, *lines[:cut], ""]).encode()
        other = "\r\n".join([f"{common},{','.join(second)}", *lines[cut:]]).encode()
        parts[path.replace(".csv", ".part2.csv")] = other
    return parts


@pytest.mark.parametrize("name", NAMES)
def test_default_is_exact_and_complete(name: str, runs: Runs) -> None:
    if name in REFUSED:
        assert runs.result(name, "default")["events"] == golden.info(name)["results"][0]["events"]
        return
    if name in COLLECTIVES:
        return  # Reference has none: see test_collectives_are_merged_rightly
    got, want = runs.tree(name, "default"), complete(name, runs)
    assert set(got) == set(want)
    for path in want:
        ours, theirs = golden.cells(got[path]), golden.cells(want[path])
        assert set(ours) == set(theirs)
        for key, row in theirs.items():
            for op, text in row.items():
                assert golden.same_number(ours[key][op], text, op, row), (path, key, op, ours[key][op], text)


@pytest.mark.parametrize("name", NAMES)
def test_default_has_the_order_and_columns_of_msprobe(name: str, runs: Runs) -> None:
    got = runs.tree(name, "default")
    for path, data in golden.recorded(name, "expected").items():
        ours, theirs = golden.rows(got[path]), golden.rows(data)
        assert ours[0] == theirs[0]
        if name != PARTS:
            common = set(golden.identities(ours)) & set(golden.identities(theirs))
            shown = [[key for key in golden.identities(table) if key in common] for table in (ours, theirs)]
            assert shown[0] == shown[1]


@pytest.mark.parametrize("name", NAMES)
def test_v2_writes_the_bytes_of_msprobe(name: str, runs: Runs) -> None:
    got, want, live = runs.tree(name, "v2"), golden.recorded(name, "expected"), runs.tree(name, "reference")
    if name in CRASHED or name == PARTS:
        # There are no such bytes: what msProbe would have written, had it gone on.
        assert set(want) <= set(got) <= set(complete(name, runs))
        for path, data in got.items():
            exact = golden.cells(complete(name, runs)[path])
            for key, row in golden.cells(data).items():
                assert row == {op: golden.float32_text(exact[key][op]) for op in row}
        return
    assert set(got) == set(want)
    if live == golden.recorded(name, "true") and name != STALE:
        assert got == want
    for path, data in want.items():
        # On another processor the run itself differs: each cell is then what msProbe makes of this run's exact value.
        ours, theirs = golden.rows(got[path]), golden.rows(data)
        assert got[path].count(b"\r\n") == got[path].count(b"\n") == len(ours)
        assert ours[0] == theirs[0]
        assert golden.identities(ours) == golden.identities(theirs)
        if path not in live:
            continue
        now, exact, printed = (
            golden.cells(one) for one in (live[path], golden.recorded(name, "true")[path], data)
        )
        for key, row in golden.cells(got[path]).items():
            if key not in now:
                continue  # of a step that was tried twice
            for op, text in row.items():
                rounds = name == STALE or printed[key][op] == golden.float32_text(exact[key][op])
                wanted = golden.float32_text(now[key][op]) if rounds else printed[key][op]
                assert text == wanted, (path, key, op)


@pytest.mark.parametrize("mode", ["v2", "default", "extended"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_training_is_what_it_was(name: str, mode: str, runs: Runs) -> None:
    """No case fails under the monitor, and losses keep their bits."""
    result, reference = runs.result(name, mode), runs.result(name, "reference")
    assert result["events"] == reference["events"]
    assert repr(result["losses"]) == repr(reference["losses"])
    if name not in CRASHED:
        assert result["attributes"] == golden.info(name)["results"][0]["attributes"]


#: What extended reads otherwise: complex numbers, texts that mean something else than they count as, columns of its own.
OTHERWISE = {"many_types", "truthy_strings", "targets_string", "ops_unknown_all"}
#: With other numbers beside: state that msProbe does not read, gradients under FSDP before the reduction.
MORE = {"opt_sgd_momentum", "fsdp2_module_wg"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED | OTHERWISE | {PARTS}])
def test_extended_has_the_numbers_of_the_default(name: str, runs: Runs) -> None:
    """Of parameters, gradients and moments: each row, with the same text, and of modules no row with other numbers."""
    got, want = runs.tree(name, "extended"), runs.tree(name, "default")
    for path, data in want.items():
        ours, theirs = (golden.dicts(got.get(path, b"")), golden.dicts(data))
        shown = {tuple(row[op] for op in golden.OPS if op in row) for row in ours}
        numbers = {tuple(row[op] for op in golden.OPS if op in row) for row in theirs}
        if path.split("/")[-1].startswith("module"):
            assert shown <= numbers or "dict" in name
            continue
        kept = [row for row in theirs if row.get("norm") != "0.0"]
        labels = {(row["step"], row["module_name"], row["scope"], row.get("micro_step")) for row in ours}
        assert {(r["step"], r["module_name"], r["scope"], r.get("micro_step")) for r in kept} <= labels
        assert shown <= numbers or name in MORE


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_merged_rightly(name: str, runs: Runs) -> None:
    """By default calls within calls are not counted, what is received has its row, and three all_reduces give what their
    tensors give together; all else is called once, and its value is msProbe's before that rounds it."""
    got = runs.tree(name, "default")
    for path, data in golden.recorded(name, "expected").items():
        rank, step = int(path[5]), int(path.split("_step")[1][0])
        ours, theirs = golden.cells(got[path]), golden.cells(data)
        received = {key for key in ours if key[2].startswith(f"recv/rank{rank}/post")}
        assert len(received) == 1
        within = {key for key in theirs if key[2].startswith(("isend", "irecv"))}
        assert set(ours) - received == set(theirs) - within - received
        for key, row in ours.items():
            if key[2].startswith("all_reduce"):
                values = reduced(rank, step, key[2].rsplit("/", 1)[1] == "pre_0")
                want = {"min": values.min(), "max": values.max(), "mean": values.mean(), "nans": 0.0}
                want["norm"] = float((values**2).sum() ** 0.5)
                assert {op: float(text) for op, text in row.items()} == pytest.approx(
                    {op: want[op] for op in row}, rel=1e-12
                )
            elif key in theirs:
                assert {op: golden.float32_text(text) for op, text in row.items()} == theirs[key]


def reduced(rank: int, step: int, before: bool) -> Any:
    """What the case's three all_reduces have in their tensors."""
    import numpy as np

    def given(rank: int) -> Any:
        seeds = [(50 + 10 * rank + k + step, n) for k, n in ((0, 4), (1, 4), (6, 3))]
        i = np.arange(4)
        values = [
            ((i * 7919 + seed * 104729 + (i * i % 991) * 31) % 1021 - 510)[:n] / 512 for seed, n in seeds
        ]
        return np.concatenate(values)

    return given(rank) if before else given(0) + given(1)
