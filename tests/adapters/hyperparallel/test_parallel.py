"""Tensor and expert parallel ranks, stages of a pipeline: every token, norm and expert counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

from tests.adapters.hyperparallel.runs import (  # noqa: E402
    TRAINERS,
    config,
    life_of,
    said,
    settings_of,
    steps_of,
    tables_of,
)
from tests.adapters.hyperparallel.test_frames import assert_equal  # noqa: E402
from tests.hosts.hyperparallel import model as task  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402

NAMES = ("g1", "g2", "g3_text")
SECTIONS: dict[str, Any] = {
    "gradients": {"clipped": True, "per_parameter": True},
    "weights": {"every": 1, "per_parameter": True},
    "moments": {"every": 1},
    "moe": {"per_expert": True},
}


def watch_each(directory: str, how: str) -> None:
    """On a rank: a trainer of each generation, its parameters held so."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, plain, train, wrapped

    task.setup()
    for name in NAMES:
        settings = settings_of(name)
        if how != "tp":
            plain(settings, TRAINERS[name][2], config(Path(directory) / name / "own", **SECTIONS))
        else:
            settings["world"] = 1  # all ranks are fed the same
        host = Path(directory) / name / how
        trainer = build(name, settings, host, wrapped(how))
        trainmon.attach_hyperparallel(trainer, config(host, **SECTIONS))
        train(trainer)


def alone(directory: Path) -> None:
    """The plain loop of one process."""
    from tests.adapters.hyperparallel.runs import plain
    from tests.hosts.hyperparallel.replay import one_thread

    with one_thread():
        for name in NAMES:
            plain(settings_of(name), TRAINERS[name][2], config(directory / name / "own", **SECTIONS))


@pytest.mark.parametrize("how", ["tp", "ep", "ep_plain"])
def test_two_ranks_give_the_numbers_of_the_plain_loop(tmp_path: Path, how: str) -> None:
    on_ranks(2, watch_each, str(tmp_path), how)
    if how == "tp":
        alone(tmp_path)
    for name in NAMES:
        own, host = tmp_path / name / "own", tmp_path / name / how
        assert_equal(own, host, 3, ("loss/device",) if how == "tp" else ())
        assert life_of(host)["status"] == "completed"
        assert not said(host, "internal_error") and not said(host, "place_unknown")
        world = 1 if how == "tp" else 2
        steps = task.plain_run(
            task.settings(world=world, moe_monitor=not name.startswith("g3")), TRAINERS[name][2]
        )
        rows, before, done = tables_of(host), [0.0] * 4, 0
        for number, (record, step) in enumerate(zip(steps_of(host), steps, strict=True), start=1):
            done += sum(map(sum, step["tokens"]))
            assert record["data/tokens"] == done
            assert record["grad/norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
            counted = step["tokens_per_expert"]
            loads = [rows["moe/load", str(number), f"moe/{expert}"] for expert in range(4)]
            assert loads == [after - earlier for after, earlier in zip(counted, before, strict=True)]
            before = counted if name.startswith("g3") else before


def tied_stages(directory: str) -> tuple[list[str], list[str]]:
    """On a rank: the head of the last stage holds what the embedding of the first does; names with and without."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, inner_of, train

    task.setup()

    def two_stages(configuration: Any) -> None:
        configuration.train.parallel.pp = 2

    names = []
    for tied in (True, False):
        place = Path(directory) / str(tied)
        settings = {**settings_of("g1", lr=0.0, weight_decay=0.0), "world": 1}
        trainer = build("g1", settings, place, two_stages)
        head = getattr(inner_of(trainer).model, "head", None)
        if tied and head is not None:
            head.weight.data.copy_(task.TinyMoeLM().embed.weight)
        session = trainmon.attach_hyperparallel(
            trainer, config(place, weights={"every": 1, "per_parameter": True}, replicas={"every": 1})
        )
        train(trainer)
        names.append(list(session.watch.parameters.parameter_names()))
    return names[0], names[1]


def test_a_tied_embedding_on_two_stages_counts_once(tmp_path: Path) -> None:
    by_rank = on_ranks(2, tied_stages, str(tmp_path))
    (first, _), (last, untied) = by_rank[0], by_rank[1]
    assert "embed.weight" in first and "embed.weight" in last and "head.weight" not in last
    assert "embed.weight" not in untied and "head.weight" in untied
    whole = dict(task.TinyMoeLM().named_parameters())
    for tied in (True, False):
        once = [parameter for name, parameter in whole.items() if not (tied and name == "head.weight")]
        place = tmp_path / str(tied)
        assert [record["weight/norm"] for record in steps_of(place)] == [
            pytest.approx(task.norm(once), rel=1e-6)
        ] * 3
        rows = tables_of(place)
        assert rows["weight/norm", "1", "embed.weight"] == pytest.approx(
            task.norm([whole["embed.weight"]]), rel=1e-6
        )
        assert (("weight/norm", "1", "head.weight") in rows) is not tied
        told = [event for event in said(place) if event["kind"] == "tied_parameters"]
        assert not said(place, "internal_error") and not told  # the last stage's, to itself


# -- without processes ----------------------------------------------------------------------------------------------


def in_chunks(configuration: Any) -> None:
    configuration.train.parallel.pp_chunks = 2


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_virtual_chunks_of_one_rank(tmp_path: Path, name: str) -> None:
    """No micro-batches are shown: losses, tokens and the norm are the host's, names those of the whole model."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, train

    settings = settings_of(name)
    trainer = build(name, settings, tmp_path, in_chunks)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path, **SECTIONS))
    train(trainer)
    names = [name for name, _ in task.TinyMoeLM().named_parameters()]
    assert sorted(session.watch.parameters.parameter_names()) == sorted(names)
    rows, records = tables_of(tmp_path), steps_of(tmp_path)
    assert {row for series, _, row in rows if series == "weight/norm"} == set(names)
    tokens = 0
    for record, step in zip(records, task.plain_run(settings, "token"), strict=True):
        tokens += sum(step["tokens"][0])
        assert record["loss/global"] == pytest.approx(step["loss"], rel=1e-6)
        assert record["grad/norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
        assert record["grad/norm_clipped"] == pytest.approx(step["live_norm"], rel=1e-5)
        assert (record["data/tokens"], record["optim/lr"]) == (tokens, step["lr"])
    assert not said(tmp_path, "internal_error") and life_of(tmp_path)["status"] == "completed"


@pytest.mark.parametrize("clip", [0.25, 0.0])
@pytest.mark.parametrize("name", ["g1", "g2"])
def test_a_stage_that_knows_neither_loss_nor_norm(tmp_path: Path, name: str, clip: float) -> None:
    import trainmon
    from tests.adapters.hyperparallel.runs import build, inner_of, train

    trainer = build(name, settings_of(name, max_grad_norm=clip), tmp_path, in_chunks)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    inner = inner_of(trainer)
    if name == "g2":
        trainer.base.callback_handler._callbacks[:] = [
            one for one in inner.callback_handler.callbacks if type(one).__name__ != "LoggingCallback"
        ]
    end = inner.on_step_end
    inner.on_step_end = lambda **told: end(**{**told, "loss": None, "grad_norm": None})
    train(trainer)
    records = steps_of(tmp_path)
    assert len(records) == 3 and all(record["loss/global"] is None for record in records)
    norms = [
        step["grad_norm"] or step["live_norm"]
        for step in task.plain_run(settings_of(name, max_grad_norm=clip), "token")
    ]
    assert [record["grad/norm"] for record in records] == pytest.approx(norms, rel=1e-5)
    assert not said(tmp_path, "internal_error") and life_of(tmp_path)["status"] == "completed"


def test_parts_of_the_third_generation(tmp_path: Path) -> None:
    """Two stages of one rank, kept in ``model_parts`` beside the first one."""
    import trainmon
    from tests.adapters.hyperparallel.runs import build, train
    from tests.hosts.hyperparallel.pipeline import stages

    settings = settings_of("g3_text")
    trainer = build("g3_text", settings, tmp_path)
    base = trainer.base
    base.model_parts = stages(base.model, 1, 2, 0)

    class First(torch.nn.Module):
        """The model that the trainer calls: its first part, from which the others are reached."""

        def __init__(self, whole: Any) -> None:
            super().__init__()
            self.first = base.model_parts[0]
            self.__dict__["whole"] = whole

        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return self.whole(*arguments, **keywords)

    base.model_parts[0], base.model = First(base.model), None
    base.model = base.model_parts[0]
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path, weights={"every": 1}))
    train(trainer)
    assert len(session.watch.parameters.parameter_names()) == len(list(task.TinyMoeLM().parameters()))
    for record, step in zip(steps_of(tmp_path), task.plain_run(settings, "micro"), strict=True):
        assert record["grad/norm"] is not None and record["weight/norm"] == pytest.approx(
            step["weights_norm"], rel=1e-5
        )
    assert not said(tmp_path, "internal_error")
