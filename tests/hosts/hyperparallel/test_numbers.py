"""The fakes train as an ordinary loop does, in any shape, under every kind of parallelism that they know."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.hosts.hyperparallel import config_g3, config_lm, fake_g1, fake_g2, fake_g3, fake_g3_older  # noqa: E402
from tests.hosts.hyperparallel.clip import live_gradients  # noqa: E402
from tests.hosts.hyperparallel.model import plain_run, settings  # noqa: E402
from tests.hosts.hyperparallel.recorder import norm  # noqa: E402
from tests.hosts.hyperparallel.replay import one_thread  # noqa: E402

TRAINERS: dict[str, Any] = {
    "g1": fake_g1.LLMTrainer,
    "g2": fake_g2.LLMTrainer,
    "g3_text": fake_g3.TextTrainer,
    "g3_vlm": fake_g3.VLMTrainer,
    "g3_base": fake_g3.BaseTrainer,
    "g3_older": fake_g3_older.TextTrainer,
}
WEIGHTING = {"g1": "token", "g2": "token", "g3_base": "shifted"}  # the others: "micro"
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "three a step": {"micro_batches": 3, "loader_len": 9, "max_steps": 5},
    "one a step": {"micro_batches": 1, "loader_len": 3, "max_steps": 5},
    "a rest": {"micro_batches": 3, "loader_len": 7, "epochs": 3, "max_steps": 6},
    "wide": {"rows": 3, "length": 9, "data_seed": 4, "max_grad_norm": 4.0},
    "no clip": {"max_grad_norm": -1.0},
}


def trained(name: str, s: dict[str, Any], **parallel: Any) -> list[dict[str, Any]]:
    """By step: loss and norm that callbacks get, lr and norm of the live gradients at the optimizer's step."""
    g3 = name.startswith("g3")
    config: Any = (config_g3 if g3 else config_lm).from_settings(s)
    for key, value in parallel.items():
        setattr(config.fsdp_config if g3 else config.train.parallel, key, value)
    outer = TRAINERS[name](config)
    trainer = getattr(outer, "base", outer)
    steps: list[dict[str, Any]] = []
    update = trainer.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        live = live_gradients(trainer.model.parameters())
        live = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in live]
        steps.append({"lr": trainer.optimizer.param_groups[0]["lr"], "live_norm": norm(live)})
        return update(*args, **kwargs)

    trainer.optimizer.step = step
    told = trainer.on_step_end

    def on_step_end(**kwargs: Any) -> Any:
        steps[-1] |= {"loss": kwargs["loss"], "grad_norm": kwargs["grad_norm"]}
        return told(**kwargs)

    trainer.on_step_end = on_step_end
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about a replaced step, and about views of sharded modules
        outer.train()
    return steps


def check(name: str, s: dict[str, Any], got: list[dict[str, Any]]) -> None:
    average = s["loss_aggregation"] == "rank_average"
    weighting = "rank" if average else WEIGHTING.get(name, "micro")
    expected = plain_run(s, weighting, short_group=not name.startswith("g3"))
    assert len(got) == len(expected)
    for one, plain in zip(got, expected, strict=True):
        if plain["grad_norm"] is None:
            assert one["grad_norm"] == (0.0 if name.startswith("g3") else None)
        else:
            assert one["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert one["lr"] == plain["lr"]
        for key in ("loss", "live_norm"):
            assert one[key] == pytest.approx(plain[key], rel=1e-4), key


# The older G3 clips to a limit that isn't positive, too: test_traps.py.
CASES = [(n, s) for n in TRAINERS for s in SHAPES if (n, s) != ("g3_older", "no clip")]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_any_shape(name: str, shape: str) -> None:
    s = settings(**{"moe_monitor": not name.startswith("g3"), **SHAPES[shape]})
    check(name, s, trained(name, s))


@pytest.mark.parametrize("how", [{"wrap": "main_grad"}, {"wrap": "fsdp2"}, {"recompute": True}])
@pytest.mark.parametrize("name", ["g1", "g2", "g3_text"])
def test_one_rank_wrapped(name: str, how: dict[str, Any]) -> None:
    s = settings(moe_monitor=False)
    check(name, s, trained(name, s, **how))


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_virtual_chunks(name: str) -> None:
    s = settings(moe_monitor=False)
    check(name, s, trained(name, s, pp_chunks=2))


def on_a_rank(cases: list[tuple[str, dict[str, Any], dict[str, Any]]], directory: str) -> list[Any]:
    """Each case in a group of its own: the trainers take theirs down."""
    import torch.distributed as distributed

    from tests.hosts.hyperparallel.replay import join

    rank, size = distributed.get_rank(), distributed.get_world_size()
    distributed.barrier()
    distributed.destroy_process_group()
    told = []
    for number, (name, s, parallel) in enumerate(cases):
        join(directory, str(number), rank, size)
        told.append(trained(name, s, **parallel))
    join(directory, "end", rank, size)
    distributed.barrier()
    return told


def test_two_ranks(tmp_path: Any) -> None:
    """One call for all: starting ranks is what costs."""
    from tests.ranks.gloo import on_ranks

    two = settings(world=2, moe_monitor=False)
    cases = [
        (name, two, {"wrap": how}) for name in ("g1", "g3_text") for how in ("ddp", "fsdp2", "main_grad")
    ]
    cases += [("g2", two, {"wrap": how}) for how in ("hsdp", "fsdp2")]
    cases += [(name, settings(world=2, micro_batches=3, loader_len=7), {}) for name in ("g1", "g2")]
    cases += [("g1", settings(world=2, loss_aggregation="rank_average", loader_len=3, max_steps=4), {})]
    cases += [(name, settings(moe_monitor=False), {"pp": 2}) for name in ("g1", "g2")]
    cases += [("g1", settings(moe_monitor=False), {"pp": 2, "pp_chunks": 2})]
    told = on_ranks(2, on_a_rank, cases, str(tmp_path))
    for number, (name, s, parallel) in enumerate(cases):
        for rank in (0, 1):
            got = told[rank][number]
            if "pp" in parallel:  # each stage has its own part of the gradients
                squares = [told[r][number][0]["live_norm"] ** 2 for r in (0, 1)]
                whole = sum(squares) ** 0.5
                got = [{**step, "live_norm": whole} if i == 0 else step for i, step in enumerate(got)][:1]
                s = {**s, "max_steps": 1}
            check(name, s, got)
