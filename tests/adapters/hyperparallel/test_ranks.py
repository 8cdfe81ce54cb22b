"""Two gloo ranks: the numbers of the plain loop, one decision for all, pipelines, tensors that lie in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

from tests.adapters.hyperparallel.runs import (
    TRAINERS,
    config,
    life_of,
    said,
    settings_of,
    steps_of,
)
from tests.adapters.hyperparallel.test_frames import assert_equal
from tests.hosts.hyperparallel import model as task
from tests.ranks.gloo import on_ranks
from trainmon.sinks.jsonl import read_jsonl

NEW = [name for name in TRAINERS if "older" not in name]
#: How the ranks hold the parameters: whole, as DTensors, with gradients apart; and recomputation.
WAYS = dict.fromkeys(NEW, ("hsdp",)) | {
    "g1": ("hsdp", "ddp", "fsdp2", "main_grad"),
    "g2": ("hsdp", "fsdp2"),
    "g3_text": ("hsdp", "ddp", "fsdp2", "main_grad", "recompute"),
}
SECTIONS: dict[str, Any] = {
    "comparison": {"every": 1},
    "gradients": {"clipped": True, "per_parameter": True},
    "weights": {"every": 1, "per_parameter": True},
    "moments": {"every": 1},
    "activations": {"every": 1, "target": "^(up|down|head)$"},
    "moe": {"per_expert": True},
}


def watch_all(directory: str) -> None:
    """On a rank: every trainer, and the plain loop on the same training."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, plain, train, wrapped

    task.setup()
    for name in NEW:
        settings = settings_of(name)
        plain(settings, TRAINERS[name][2], config(Path(directory) / name / "own", **SECTIONS))
        for how in WAYS[name]:
            host = Path(directory) / name / how
            trainer = build(name, settings, host, wrapped(how))
            trainmon.attach_hyperparallel(trainer, config(host, **SECTIONS))
            train(trainer)


def side_by_side(directory: Path) -> list[dict[str, dict[str, Any]]]:
    """Every step's values of the two ranks: of losses and norms, where each rank has its own."""
    records = read_jsonl(directory / "r/rank_0/ranks.jsonl")
    steps = [record["series"] for record in records if "step" in record]
    own = [
        {name: values[name] for name in ("loss/device", "data/tokens") if name in values} for values in steps
    ]
    assert [set(step) for step in own] == [{"loss/device", "data/tokens"}] * 3
    kept = ("low", "low_rank", "high", "high_rank", "median", "known")
    return [{name: {key: one[key] for key in kept} for name, one in step.items()} for step in own]


def test_the_numbers_of_the_plain_loop(tmp_path: Path) -> None:
    on_ranks(2, watch_all, str(tmp_path))
    for name in NEW:
        for how in WAYS[name]:
            own, host = tmp_path / name / "own", tmp_path / name / how
            assert_equal(own, host, 3)
            assert life_of(host)["status"] == "completed" and not said(host, "internal_error")
            assert side_by_side(host) == [
                {series: pytest.approx(values, rel=2e-6) for series, values in step.items()}
                for step in side_by_side(own)
            ]
        steps, done = task.plain_run(task.settings(world=2), TRAINERS[name][2]), 0
        for record, step in zip(steps_of(host), steps, strict=True):
            assert record["grad/norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
            losses = [
                n * loss
                for row in zip(step["tokens"], step["local"], strict=True)
                for n, loss in zip(*row, strict=True)
            ]
            tokens = sum(map(sum, step["tokens"]))
            assert record["loss/global"] == pytest.approx(sum(losses) / tokens, rel=1e-5)
            done += tokens
            assert record["data/tokens"] == done
            if name in ("g3_text", "g3_vlm") and record["step"] > 1:  # a new name has its place from then on
                assert record["loss/part/foundation_loss"] == pytest.approx(step["loss"], rel=1e-5)


def unreduced(directory: str) -> None:
    """On a rank: local norms, however the gradients are held."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, train, wrapped

    task.setup()
    for name in ("g1", "g3_text"):
        for how in ("hsdp", "ddp", "main_grad"):
            place = Path(directory) / f"{name}_{how}"
            trainer = build(name, settings_of(name), place, wrapped(how))
            keys = config(place, gradients={"device": True, "local": True}, ranks="all")
            trainmon.attach_hyperparallel(trainer, keys)
            train(trainer)


def local_gradients(weighting: str, rank: int) -> Any:
    """Of the first step, as a rank has them before they are reduced: the fakes' reduction is a mean."""
    settings = task.settings(world=2)
    model, _, _ = task.build(settings)
    cells = [[task.micro_batch(settings, 0, i, r) for i in range(2)] for r in range(2)]
    counts = [[task.valid_labels(batch)[weighting != "token"] for batch in row] for row in cells]
    for i, batch in enumerate(cells[rank]):
        total = sum(row[i] for row in counts) * 2 if weighting == "micro" else sum(map(sum, counts))
        (model(**batch).loss * counts[rank][i] / total * 2).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_before_reduction(tmp_path: Path) -> None:
    """Whoever reduces them or takes them away in a hook of its own."""
    on_ranks(2, unreduced, str(tmp_path))
    for name in ("g1", "g3_text"):
        for rank in (0, 1):
            norm = task.norm(local_gradients(TRAINERS[name][2], rank))
            for how in ("hsdp", "ddp", "main_grad"):
                first = steps_of(tmp_path / f"{name}_{how}", rank)[0]
                assert first["grad/norm_device"] == pytest.approx(norm, rel=1e-5), (name, how, rank)


def end_all(directory: str) -> dict[str, tuple[str, int, int]]:
    """On a rank: the gradient of rank 1 goes bad in step 2; how each trainer ended, and how far it came."""
    import torch.distributed as distributed

    import trainmon
    from tests.adapters.hyperparallel.runs import build, inner_of, spoil, train

    task.setup()
    ended = {}
    for name in NEW:
        for gate in ("late", "before_update"):
            for action in ("raise", "stop"):
                place = Path(directory) / f"{name}_{gate}_{action}"
                trainer = build(name, {**settings_of(name), "max_steps": 6, "epochs": 3}, place)
                rule = {
                    "series": ["loss/global", "grad/*"],
                    "detector": "nonfinite",
                    "name": "no NaN",
                    "action": ["log", action],
                }
                health = {"gate": gate, "timeout": 20, "rules": [rule]}
                session = trainmon.attach_hyperparallel(trainer, config(place, health=health))
                if distributed.get_rank() == 1:
                    spoil(trainer, 2)
                how = "returned"
                try:
                    train(trainer)
                except trainmon.TrainingStopped:
                    how = "stopped"
                step = inner_of(trainer).state.global_step
                ended[place.name] = how, step, session.watch.step
    return ended


def test_all_ranks_leave_together_when_one_goes_bad(tmp_path: Path) -> None:
    by_rank = on_ranks(2, end_all, str(tmp_path))
    assert by_rank[0] == by_rank[1]
    for place, (how, _, step) in by_rank[0].items():
        assert how == ("returned" if place.startswith("g2") and place.endswith("stop") else "stopped")
        assert step == 2 if "before_update" in place else 2 <= step <= 3
        life = life_of(tmp_path / place)
        assert life["status"] == "stopped" and "no NaN" in life["reason"]
        if "late" in place:
            assert steps_of(tmp_path / place)[1]["grad/nonfinite"] >= 1
        assert any(
            "head.weight" in event["text"] and "rank 1" in event["text"] for event in said(tmp_path / place)
        )


def pipeline(directory: str, name: str, chunks: int) -> tuple[list[str], Any]:
    """On a rank: its stage, or stages; names of its parameters, the step's norms as the host has them."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, inner_of, train

    task.setup()

    def two_stages(configuration: Any) -> None:
        configuration.train.parallel.pp = 2
        configuration.train.parallel.pp_chunks = chunks

    trainer = build(name, {**settings_of(name), "world": 1}, Path(directory), two_stages)
    session = trainmon.attach_hyperparallel(trainer, config(Path(directory), weights={"every": 1}))
    norms = []
    end = inner_of(trainer).on_step_end

    def on_step_end(**told: Any) -> None:
        norms.append((told["loss"], told["grad_norm"]))
        end(**told)

    inner_of(trainer).on_step_end = on_step_end
    train(trainer)
    return list(session.watch.parameters.parameter_names()), norms


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", ["g1", "g2"])
def test_stages_of_a_pipeline(tmp_path: Path, name: str, chunks: int) -> None:
    by_rank = on_ranks(2, pipeline, str(tmp_path), name, chunks)
    names = {name for name, _ in task.TinyMoeLM().named_parameters()}
    assert set(by_rank[0][0]) | set(by_rank[1][0]) == names
    assert not set(by_rank[0][0]) & set(by_rank[1][0])
    records = steps_of(tmp_path)
    assert [(record["loss/global"], record["grad/norm"]) for record in records] == [
        (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5)) for loss, norm in by_rank[0][1]
    ]
    assert [record["data/tokens"] for record in records] == [12, 25, 37]
    assert [record["optim/lr"] for record in records] == [0.001953125, 0.00390625, 0.005859375]
    assert not said(tmp_path, "internal_error") and life_of(tmp_path)["status"] == "completed"
