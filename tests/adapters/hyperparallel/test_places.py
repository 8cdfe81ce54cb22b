"""Where a rank is among the others: by every spelling, and what is said where it can't be found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon  # noqa: E402
from tests.adapters.hyperparallel.pieces import Mesh  # noqa: E402
from tests.adapters.hyperparallel.runs import config, said, steps_of  # noqa: E402
from tests.adapters.hyperparallel.test_pieces import Trainer, module  # noqa: E402
from trainmon.adapters.hyperparallel import axes  # noqa: E402
from trainmon.adapters.hyperparallel.axes import axis  # noqa: E402
from trainmon.adapters.hyperparallel.model import Experts, chunk_names, model_of  # noqa: E402
from trainmon.adapters.hyperparallel.places import places_of  # noqa: E402


class NamedMesh:
    """A device mesh that knows its axes by name; what else it can is what a test gives it."""

    def __init__(self, **axes: Any) -> None:
        self._axes = axes
        self.mesh_dim_names = tuple(axes)

    def __getitem__(self, name: str) -> Any:
        return self._axes[name]


class Group:
    """Stands for a process group."""

    def __init__(self, rank: int, members: tuple[int, ...]) -> None:
        self.rank, self.members = rank, members


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group.members)


class OfGroups(NamedMesh):
    def get_group(self, name: str) -> Any:
        return self._axes[name]


class OfCoordinates(NamedMesh):
    def get_coordinate(self) -> list[int]:
        return list(self._axes.values())


class OfLocalRanks(NamedMesh):
    def get_local_rank(self, name: str) -> int:
        return int(self._axes[name])


MESHES: dict[str, Callable[[int], Any]] = {
    "a number of the context": lambda rank: SimpleNamespace(tp_size=4, tp_rank=rank),
    "a mesh of the axis": lambda rank: NamedMesh(tp=Mesh(rank, 4)),
    "its rank by name": lambda rank: OfLocalRanks(dp=0, tp=rank),
    "its group by name": lambda rank: OfGroups(dp=None, tp=Group(rank, ())),
    "a group that holds one": lambda rank: OfGroups(tp=SimpleNamespace(group=Group(rank, ()))),
    "the group of its mesh": lambda rank: NamedMesh(
        tp=SimpleNamespace(get_group=lambda: Group(rank, ()), size=lambda: 4)
    ),
    "coordinates": lambda rank: OfCoordinates(dp=1, tp=rank),
    "the devices of the context": lambda rank: SimpleNamespace(
        tp_size=4, device_mesh=NamedMesh(tp=Mesh(rank, 4))
    ),
}


@pytest.mark.parametrize("spelling", MESHES)
@pytest.mark.parametrize("rank", [0, 3])
def test_every_spelling_of_a_rank(spelling: str, rank: int) -> None:
    trainer = SimpleNamespace(mesh=MESHES[spelling](rank), parallel_dims=SimpleNamespace(tp=4))
    assert axis(trainer, "tp") == (rank, 4)
    if "context" not in spelling:
        trainer.mesh, trainer.device_mesh = None, trainer.mesh
        assert axis(trainer, "tp") == (rank, 4)


@pytest.mark.parametrize(
    "spelling", ["a mesh of the axis", "the group of its mesh", "the devices of the context"]
)
def test_a_size_that_only_the_mesh_tells(spelling: str) -> None:
    assert axis(SimpleNamespace(mesh=MESHES[spelling](2)), "tp") == (2, 4)


@pytest.mark.parametrize(
    "mesh",
    [
        None,
        NamedMesh(),
        NamedMesh(tp=Mesh(4, 4)),  # out of range
        OfGroups(tp=Group(-1, ())),  # not in it
        SimpleNamespace(tp_rank="0"),
    ],
)
def test_a_rank_that_cant_be_told_is_none_and_not_0(mesh: Any) -> None:
    assert axis(SimpleNamespace(mesh=mesh, parallel_dims=SimpleNamespace(tp=4)), "tp") == (None, 4)


def test_an_axis_of_one_and_none_at_all() -> None:
    assert axis(SimpleNamespace(mesh=None, parallel_dims=SimpleNamespace(tp=1)), "tp") == (0, 1)
    assert (
        axis(SimpleNamespace(), "tp") == axis(SimpleNamespace(mesh=NamedMesh(dp=Mesh(1, 2))), "tp") == (0, 1)
    )


@pytest.mark.parametrize(
    ("first", "last", "stages", "stage"),
    [
        (True, False, 4, 0),
        (False, True, 4, 3),
        (False, False, 4, None),
        (False, False, 3, 1),
        (None, None, 3, None),
    ],
)
def test_stages_by_their_ends(first: Any, last: Any, stages: int, stage: int | None) -> None:
    dims = SimpleNamespace(pp=stages)
    trainer = SimpleNamespace(mesh=None, parallel_dims=dims, pp_has_first_stage=first, pp_has_last_stage=last)
    assert axis(trainer, "pp") == (stage, stages)


def test_the_context_of_meshes() -> None:
    sizes = {"tp_size": 2, "tp_rank": 1, "pp_size": 1, "pp_rank": 0, "dp_size": 4, "dp_rank": 2, "cp_size": 1}
    trainer = SimpleNamespace(mesh=SimpleNamespace(**sizes))
    layout = places_of(trainer, None).layout
    assert (layout.rank, layout.world, layout.counts_tokens, layout.data_rank) == (5, 8, False, 2)
    trainer.mesh.sequence_parallel = True  # routers of tensor parallel ranks see different tokens
    assert places_of(trainer, None).layout.data_rank == 5
    trainer.mesh.sequence_parallel = False
    trainer.mesh.cp_size, trainer.mesh.cp_rank, trainer.mesh.dp_size, trainer.mesh.dp_rank = 2, 1, 2, 1
    assert places_of(trainer, None).layout.data_rank == 3
    trainer.dp_cp_mesh = Mesh(2, 4)  # the host's own numbers
    assert (
        places_of(trainer, None) == places_of(trainer, None)
        and places_of(trainer, None).layout.data_rank == 2
    )
    assert not places_of(trainer, None).unknown


def lm(mesh: Any, info: Any, **dims: int) -> Any:
    """As the first two generations tell it."""
    sizes = {"pp": 1, "tp": 1, "cp": 1, "dp_size": 1} | dims
    return SimpleNamespace(mesh=mesh, parallel_dims=SimpleNamespace(**sizes), _dp_group_info=info)


def info(name: str, group: Any, size: int) -> Any:
    return SimpleNamespace(group_name=name, group=group, rank_size=size)


def test_stages_and_sequence_parallel_ranks() -> None:
    trainer = lm(NamedMesh(pp=Mesh(1, 2), tp=Mesh(0, 1)), info("dp", None, 1), pp=2, dp_size=4)
    layout = places_of(trainer, None).layout
    assert (layout.stage, layout.counts_tokens) == (1, True)
    trainer.pp_has_last_stage = False  # in a schedule that goes to and fro the last stage is elsewhere
    assert not places_of(trainer, None).layout.counts_tokens
    # without a data parallel axis, ranks of sequence parallelism see other tokens
    trainer = lm(NamedMesh(tp=Mesh(1, 2)), info("dp", None, 2), tp=2)
    assert places_of(trainer, None).layout.counts_tokens


@pytest.mark.parametrize(
    ("told", "cp", "data_rank"),
    [
        (info("dp", Group(1, (1, 5)), 2), 1, 1),
        (info("loss", Group(3, (1, 3, 5, 7)), 4), 2, 3),  # with the context parallel ranks in it
        (info("dp", Group(3, (1, 3, 5, 7)), 4), 2, 3),
        (info("dp", Group(1, (1, 5)), 2), 2, 2),  # without them
        (info("dp", None, 8), 1, 5),  # all ranks
        (info("dp", None, 2), 1, 1),  # as the mesh has it
    ],
)
def test_which_part_of_the_batch_a_rank_is_fed(told: Any, cp: int, data_rank: int) -> None:
    mesh = NamedMesh(tp=Mesh(1, 2), dp=Mesh(1, 2), cp=Mesh(0, 2))
    places = places_of(lm(mesh, told, tp=2, cp=cp, dp_size=2), None)
    assert places.layout.data_rank == data_rank and not places.unknown and not places.layout.counts_tokens


@pytest.mark.parametrize(("members", "counts"), [((0, 2, 4, 6), True), ((1, 3, 5, 7), False)])
def test_without_a_rank_the_group_tells_who_counts(members: tuple[int, ...], counts: bool) -> None:
    """Ranks that share out the batch among them are of one tensor parallel rank."""
    places = places_of(lm(None, info("dp", Group(2, members), 4), tp=2, dp_size=4), None)
    assert places.layout.counts_tokens is counts and not places.unknown
    places = places_of(lm(None, info("dp", None, 1), tp=8), None)
    assert places.layout.counts_tokens is False and not places.unknown  # rank 0 does


def test_what_cant_be_found_is_said_with_what_it_makes_uncertain() -> None:
    places = places_of(lm(None, info("dp", None, 2), tp=2, pp=2, dp_size=2), None)
    assert places.layout.counts_tokens and places.layout.data_rank is None and places.feeds == 2
    tensor, stage, data = places.unknown
    for text, name in ((tensor, "tp"), (stage, "pp"), (data, "dp")):
        assert f"2 along {name} was not found (looked for {name}_rank, get_local_rank(), get_group()" in text
    assert "each of 2 tensor parallel ranks counts its tokens" in tensor and "loss is right" in tensor
    assert "each of 2 stages counts its tokens" in stage and "what layers see" in data
    known = lm(None, info("dp", Group(0, (4, 5)), 2), tp=1, pp=3, dp_size=2)
    known.pp_has_first_stage, known.pp_has_last_stage = None, True
    places = places_of(known, None)
    assert places.layout.counts_tokens and places.layout.stage == 2 and not places.unknown
    text = places_of(
        lm(NamedMesh(tp=Mesh(0, 2)), info("dp", Group(1, (1, 5)), 2), tp=2, cp=2, dp_size=2), None
    )
    assert len(text.unknown) == 1 and "2 along cp was not found" in text.unknown[0]


def test_it_is_said_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    trainer = Trainer(module(w=torch.zeros(4)), mesh=SimpleNamespace(tp_size=2, pp_size=1, dp_size=2))
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    for step in (1, 2):
        trainer.step(step)
    session.end()
    assert len(steps_of(tmp_path)) == 2 and not said(tmp_path, "internal_error")
    told = said(tmp_path, "place_unknown")
    assert [event["level"] for event in told] == ["warning"] * 2
    assert "along tp" in told[0]["text"] and "along dp" in told[1]["text"]


# -- what the model's own parameters are ----------------------------------------------------------------------------


def test_parts_of_a_model() -> None:
    a, b = module(w=torch.zeros(1)), module(v=torch.zeros(1))
    whole = torch.nn.ModuleDict({"a": a, "b": b})
    assert model_of(Trainer(whole, model_parts=[a, b])) is whole
    assert model_of(Trainer(a, model_parts=[a])) is a
    both = model_of(Trainer(a, model_parts=[a, b]))
    assert list(both.parameters()) == [a.w, b.v] and chunk_names(both) is not None


def test_names_of_chunks() -> None:
    chunks = torch.nn.ModuleList([module(a=torch.zeros(1)), module(b=torch.zeros(1))])
    names = chunk_names(chunks)
    assert names is not None and [names(name) for name, _ in chunks.named_parameters()] == ["a", "b"]
    assert chunk_names(torch.nn.ModuleList([module(a=torch.zeros(1)), module(a=torch.zeros(1))])) is None
    assert chunk_names(chunks[0]) is None


def layer(experts: Any, total: int = 8) -> Any:
    moe = torch.nn.Module()
    moe.experts, moe.num_experts = experts, total
    return torch.nn.ModuleDict({"moe": moe, "head": torch.nn.Linear(2, 2)})


def experts_of(model: Any, rank: Any = 1, ranks: int = 4, name_of: Any = None) -> Experts:
    mesh = NamedMesh() if rank is None else NamedMesh(ep=Mesh(rank, ranks))
    return Experts(SimpleNamespace(mesh=mesh, parallel_dims=SimpleNamespace(ep=ranks)), model, name_of)


def test_stacked_experts_are_rows_of_the_whole() -> None:
    for stack in (
        torch.nn.Parameter(torch.zeros(2, 3)),
        module(up=torch.zeros(2, 3), down=torch.zeros(2, 3)),
    ):
        experts, model = experts_of(layer(stack)), layer(stack)
        names = [name for name, _ in model.named_parameters() if "experts" in name]
        assert names and all(experts.piece(name, torch.zeros(2, 3)) == (2, 8) for name in names)
        assert experts.piece("moe.experts_bias", torch.zeros(2)) is None and experts.naming is None
        assert experts.piece("head.weight", torch.zeros(2, 2)) is None and experts.unknown is None
    chunked = experts_of(torch.nn.ModuleList([model]), name_of=lambda name: name.partition(".")[2] or name)
    assert chunked.piece("moe.experts.up", torch.zeros(2, 3)) == (2, 8)


def test_listed_experts_have_numbers_over_all_ranks() -> None:
    model = layer(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]))
    experts = experts_of(model, rank=3)
    assert experts.naming is not None and experts.piece("moe.experts.6.weight", torch.zeros(2, 2)) is None
    names = [experts.naming(name) for name, _ in model.named_parameters()]
    assert names == [
        *(f"moe.experts.{number}.{kind}" for number in (6, 7) for kind in ("weight", "bias")),
        "head.weight",
        "head.bias",
    ]
    assert experts.naming("moe.experts") == "moe.experts"


@pytest.mark.parametrize("rank", [None, 1])
def test_experts_that_cant_be_placed_are_said(rank: Any) -> None:
    for stack in (torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 2)):
        experts = experts_of(layer(stack), rank, 4 if rank is None else 2)
        assert experts.unknown is not None and "has 2 of 8 experts" in experts.unknown
        assert "looked for ep_rank" in experts.unknown
    assert experts_of(layer(torch.nn.Parameter(torch.zeros(8, 3)))).unknown is None


def test_ranks_of_a_mesh_of_one_axis() -> None:
    assert axes.whole_mesh(Mesh(1, 2)) == (1, 2)
    assert axes.whole_mesh(SimpleNamespace(size=lambda: 2, get_group=lambda: Group(1, ()))) == (1, 2)
    assert axes.whole_mesh(SimpleNamespace(size=lambda: 2)) == (None, 2) and axes.whole_mesh(None) == (
        None,
        1,
    )
    assert axes.mesh_members(Mesh(1, 2)) is None
