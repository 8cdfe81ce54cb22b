"""What sections hold beside the training: the sizes that docs/state.md lists, byte by byte."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from torch import nn  # noqa: E402

import trainmon  # noqa: E402
from trainmon.ops import DetectorBank  # noqa: E402
from trainmon.probes.base import ProbeContext  # noqa: E402

SPAN, EXPERTS = 7, 4
BACKENDS = ("host", "torch")
#: Generators of random numbers, counted by their state.
GENERATOR = torch.Generator().get_state().nbytes
SECTIONS: dict[str, Any] = {
    "gradients": {"per_parameter": True, "micro": True, "device": True},
    "weights": {"every": 1, "per_parameter": True},
    "moments": {"every": 1, "per_parameter": True},
    "updates": {"every": 1, "per_parameter": True, "adam": True},
    "spectral": {"every": 1, "elements": 1 << 20},
    "activations": {"every": 1, "input": True, "backward": True},
    "attention": {"every": 1, "per_head": True},
    "moe": {"per_expert": True, "placement": True, "span": SPAN},
}


def held(root: object, known: set[int]) -> dict[str, int]:
    """Bytes of arrays and tensors that can be reached from an object, by kind, each memory once, but for ``known``."""
    found = {"arrays": 0, "tensors": 0}
    seen, stack = set(known), [root]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, ProbeContext | nn.Module | type | str | bytes | int | float):
            continue
        seen.add(id(one))
        match one:
            case np.ndarray():
                base = one
                while isinstance(base.base, np.ndarray):
                    base = base.base
                if id(base) not in seen or base is one:
                    seen.add(id(base))
                    found["arrays"] += base.nbytes
            case torch.Tensor():
                place = one.untyped_storage().data_ptr()
                if place not in seen:
                    seen.add(place)
                    found["tensors"] += one.untyped_storage().nbytes()
            case torch.Generator():
                found["tensors"] += GENERATOR
            case DetectorBank():
                found["arrays"] += one.state.nbytes
            case dict():
                stack += [*one.keys(), *one.values()]
            case list() | tuple() | set() | frozenset():
                stack += one
            case _ if type(one).__module__.startswith("trainmon."):
                stack += _fields(one)
    return found


def _fields(one: object) -> Iterator[object]:
    yield from vars(one).values() if hasattr(one, "__dict__") else ()
    for kind in type(one).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(one, name):
                yield getattr(one, name)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(300, 520), nn.Linear(520, 300)
        self.narrow = nn.Parameter(torch.randn(280, 270, dtype=torch.bfloat16))
        self.small = nn.Linear(300, 8)
        self.stack = nn.Parameter(torch.randn(3, 260, 290))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = (x[:, :280].bfloat16() @ self.narrow).float().sum() + (x[:, :260] @ self.stack).sum()
        return self.small(self.back(self.wide(x).relu())).square().mean() + some * 1e-6


def run(directory: Path, backend: str) -> tuple[Any, Model]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keys = {"output_dir": str(directory), "run_name": "r", "sinks": ["csv"], "overhead": False, **SECTIONS}
    mon: Any = trainmon.attach(model, optimizer, keys, backend=backend)  # type: ignore[arg-type]
    for _ in range(3):
        loss = model(torch.randn(4, 300))
        loss.backward()
        mon.attention_qk("attn", torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8))
        for layer in ("a", "b"):
            mon.experts(layer, counts=[1, 2, 3, 4], num_experts=EXPERTS, placement=[0, 0, 1, 1])
        mon.micro_end(loss=loss, tokens=4)
        mon.grads_ready()
        optimizer.step()
        optimizer.zero_grad()
        mon.step_end()
    return mon, model


def matrices(model: Model) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    for one in model.parameters():
        if one.ndim >= 2:
            yield from [(tuple(one.shape[-2:]), one.dtype)] * (1 if one.ndim == 2 else len(one))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_sections_hold_is_what_the_page_lists(tmp_path: Path, backend: str) -> None:
    mon, model = run(tmp_path, backend)
    live = {one.untyped_storage().data_ptr() for one in model.parameters()}
    sizes = {slot.title: held(slot.probe, live) for slot in mon.monitor._probes}
    copies = sum(one.nbytes for one in model.parameters())
    assert sizes["updates"]["tensors"] == copies
    spectral = sizes["spectral"]
    if backend == "host":
        warm = sum(2 * 4 * shape[1] for shape, _ in matrices(model) if min(shape) > 256)
        assert warm == 8 * (300 + 520 + 270 + 3 * 290)
        assert spectral["arrays"] - warm in range(512), "and a row number a matrix"
    else:
        warm = sum(4 * 8 * shape[1] + GENERATOR for shape, _ in matrices(model))
        assert spectral["tensors"] == warm
    memory = 8 * 2 * (SPAN * EXPERTS + 6 * EXPERTS + 1) + 8 * 2 * EXPERTS
    assert sizes["moe"]["arrays"] - memory in range(1024), "and where each expert's numbers stand"
    others = sum(
        sum(size.values()) for name, size in sizes.items() if name not in ("updates", "spectral", "moe")
    )
    assert others < 4096, "nothing that grows with tensors"
    mon.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engine_holds_two_frames_and_the_rules_one_state_a_series(tmp_path: Path, backend: str) -> None:
    mon, model = run(tmp_path, backend)
    frames = sum(held(frame, set())["arrays"] for frame in mon.monitor._frames)
    rows = len(list(model.parameters()))
    assert frames == 2 * 9 * mon.monitor._registry.size < 2 * 9 * (rows * 40 + 400)
    rules = held(mon.monitor._supervision.health, set())["arrays"]
    assert rules < 16 * 1024, "mad keeps a window of 256 values for the loss and for ln grad/norm"
    mon.close()


def test_closed_nothing_is_left(tmp_path: Path) -> None:
    mon, _ = run(tmp_path, "host")
    mon.close()
    assert sum(held(mon.monitor._pending, set()).values()) == 0


def test_the_page_lists_every_section() -> None:
    page = (Path(trainmon.__file__).parent.parent / "docs/state.md").read_text(encoding="utf-8")
    table = page.partition("## Memory")[2].partition("\n## ")[0]
    listed = set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    )
    assert set(SECTIONS) | {"loss", "replicas", "health", "sinks"} <= listed
