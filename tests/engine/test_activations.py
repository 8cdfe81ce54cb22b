"""Activations with real torch: what is read and when, and that nothing of the training changes."""

from __future__ import annotations

import csv
import dataclasses
import math
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import trainmon  # noqa: E402
from trainmon.adapters.torch_parts.modules import tensors_in  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

Rows = dict[str, dict[str, float | None]]


def attach(model: nn.Module, directory: Path, *, backend: Any = "auto", **activations: Any) -> Any:
    """A loop that looks at every step unless told otherwise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keys = {"output_dir": str(directory), "run_name": "r", "sinks": ["csv", "jsonl"]}
    section = {"every": 1, **activations}
    return trainmon.attach(model, optimizer, {**keys, "activations": section}, backend=backend)


def rows(directory: Path, step: int = 1) -> Rows:
    """The activation table of a step."""
    found: Rows = {}
    for path in sorted((directory / "r/rank_0/tensors").glob("activations_*.csv")):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                if int(row.pop("step")) == step:
                    name = row.pop("name")
                    found[name] = {key: float(text) if text else None for key, text in row.items()}
    return found


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(directory / "r/rank_0/events.jsonl") if event.get("kind") == kind]


def norm(*tensors: torch.Tensor) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


class Inner(nn.Module):
    """Called twice, with containers, an in-place operation behind it, outputs that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.first(x)
        kept = hidden.clone()
        out = self.act(hidden) * scale
        return {"out": out, "extra": (kept, [None, "text", torch.tensor([1, 2])]), "again": out}


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_norms_of_all_that_flows(tmp_path: Path, backend: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(inner=Inner()))
    layer, inputs = model.inner.first, [torch.randn(2, 4), torch.randn(3, 4)]
    true: dict[str, list[torch.Tensor]] = {name: [] for name in ("pre", "post", "grad")}
    with attach(model, tmp_path, backend=backend, input=True, backward=True, target="inner") as mon:
        for micro, x in enumerate(inputs):
            out = model.inner(x, scale=2.0)  # twice in a step, and two micro-batches
            loss = (out["out"] * (micro + 1)).sum() + out["extra"][0].sum()
            true["pre"].append(layer(x))
            true["post"].append(torch.relu(true["pre"][-1].detach()))
            alive = true["pre"][-1].detach() > 0
            true["grad"].append(1.0 + 2.0 * (micro + 1) * alive)
            loss.backward()
            mon.micro_end(loss)
        mon.step_end()
    found = rows(tmp_path)
    pre, post, grad = (true[name] for name in ("pre", "post", "grad"))
    expected = {
        # The model's call and the one above for the truth: two calls of each micro-batch.
        "inner.first": norm(*pre, *pre),
        "inner.first/input": norm(*inputs, *inputs),
        "inner.first/grad_output": norm(*grad),
        "inner.act": norm(*post),
        "inner.act/input": norm(*pre),
        "inner": norm(*(2 * p for p in post), *pre),
        "inner/input": norm(*inputs),
        "inner/grad_output": norm(*(torch.full((len(x), 4), float(m + 1)) for m, x in enumerate(inputs)))
        and None,
    }
    for name, value in expected.items():
        if value is not None:
            assert found[name]["activation/norm"] == pytest.approx(value, rel=1e-6), name
    assert found["inner.act"]["activation/absmax"] == pytest.approx(
        max(float(p.max()) for p in post), rel=1e-6
    )
    assert found["inner/input"]["activation/nonfinite"] == 0
    assert found["inner/grad_input"]["activation/norm"] is None, "no input needs a gradient"


def test_gradients_in_and_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with attach(model, tmp_path, forward=False, backward=True, input=True) as mon:
        hidden = model[0](torch.ones(2, 2))
        (model[1](hidden) * 2).sum().backward()
        mon.step_end()
    found = rows(tmp_path)
    upper = model[1].weight.detach()
    assert found["1/grad_output"]["activation/norm"] == pytest.approx(norm(torch.full((2, 1), 2.0)))
    for name in ("0/grad_output", "1/grad_input"):
        assert found[name]["activation/norm"] == pytest.approx(norm(2 * upper, 2 * upper), rel=1e-6), name
    assert set(found) == {"0/grad_output", "0/grad_input", "1/grad_output", "1/grad_input"}


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    rest: Any = None


def test_containers_of_any_kind() -> None:
    a, b, c = torch.ones(1), torch.zeros(2), torch.zeros(3)
    nested = {"x": (a, None, [b, {"y": Output(c, rest=a)}]), "z": 3}
    assert [id(tensor) for tensor in tensors_in(nested)] == [id(a), id(b), id(c)]
    circle: list[Any] = [a]
    circle.append(circle)
    assert len(tensors_in(circle)) == 1
    assert tensors_in(None) == tensors_in(Output) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_pass_counts_once(tmp_path: Path, reentrant: bool) -> None:
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    model = nn.Sequential(OrderedDict(block=block))
    x = torch.randn(2, 3, requires_grad=True)
    grads, outputs = {}, {}
    for directory, wrapped in ((tmp_path / "plain", False), (tmp_path / "again", True)):
        with attach(model, directory, backward=True) as mon:
            out = checkpoint(block, x, use_reentrant=reentrant) if wrapped else block(x)
            out.square().sum().backward()
            mon.step_end()
        outputs[wrapped] = rows(directory)
        grads[wrapped], x.grad = x.grad, None
    assert outputs[True] == outputs[False]
    assert outputs[True]["block.0/grad_output"]["activation/norm"] is not None
    assert torch.equal(grads[True], grads[False])


def test_training_only(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].eval()
    with attach(model, tmp_path) as mon:
        with mon.evaluation():
            model(torch.full((1, 2), 9.0))
        expected = model(torch.ones(1, 2))
        model.eval()
        model(torch.full((1, 2), 9.0))
        mon.step_end()
        del expected
    found = rows(tmp_path)
    assert found["0"]["activation/norm"] == pytest.approx(norm(model[0](torch.ones(1, 2))), rel=1e-6)
    assert found["1"]["activation/norm"] is None


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_no_tensor_is_kept(tmp_path: Path, backend: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with attach(model, tmp_path, backend=backend, backward=True, input=True) as mon:
        out = model(torch.ones(1, 2))
        kept = weakref.ref(out)
        out.sum().backward()
        del out
        assert kept() is None
        mon.step_end()


@pytest.mark.parametrize("with_inputs", [True, False])
def test_the_first_module_that_is_not_finite_is_named_once(tmp_path: Path, with_inputs: bool) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 2)))
    with attach(model, tmp_path, input=with_inputs) as mon:
        for bad in (False, True, True, False):
            with torch.no_grad():
                model.b.bias.fill_(math.nan if bad else 0.0)
            model(torch.ones(3, 2))
            mon.step_end()
    (said,) = events(tmp_path, "nonfinite_output")
    first = said["data"]["first"]
    assert (first["step"], first["name"], first["counts"], first["micro"]) == (2, "b", {"nan": 6}, 0)
    assert first["role"] == ("producer" if with_inputs else "unknown")
    assert said["text"].startswith("output of b is not finite in micro-batch 0 of step 2: 6 nan")
    assert ("its inputs were finite" in said["text"]) == with_inputs
    assert first["more"] == 1
    assert rows(tmp_path, 2)["c"]["activation/nonfinite"] == 6
    assert math.isnan(rows(tmp_path, 2)["b"]["activation/norm"] or 0)
    assert events(tmp_path, "finite_again")[0]["step"] == 4


def test_selection_and_cadence(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(up=nn.Linear(2, 2), norm=nn.LayerNorm(2), down=nn.Linear(2, 2)))
    with attach(model, tmp_path, target=["norm", "up"], invert=True, every=2) as mon:
        assert not model.up._forward_hooks and not model.norm._forward_hooks
        for _ in range(4):
            model(torch.ones(1, 2))
            mon.step_end()
    assert [set(rows(tmp_path, step)) for step in (1, 2, 3, 4)] == [{"down"}, {"down"}, set(), {"down"}]


def test_off_means_no_hook_and_close_removes_all(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"output_dir": str(tmp_path), "sinks": ["jsonl"]}

    def hooks() -> int:
        return sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        )

    with trainmon.attach(model, optimizer, keys):
        assert hooks() == 0
    first = attach(model, tmp_path / "a", input=True, backward=True)
    other = model[0].register_forward_hook(lambda *_: None)
    second = attach(model, tmp_path / "b")
    model(torch.ones(1, 2)).sum().backward()
    first.close()
    first.close()
    other.remove()
    model(torch.ones(1, 2)).sum().backward()
    second.step_end()
    second.close()
    assert hooks() == 0
    assert rows(tmp_path / "b")["0"]["activation/norm"] == pytest.approx(
        math.sqrt(2) * norm(model[0](torch.ones(1, 2))), rel=1e-6
    )


def test_a_parameter_as_input_keeps_no_hook(tmp_path: Path) -> None:
    model, prompt = nn.Sequential(nn.Linear(2, 2)), nn.Parameter(torch.ones(1, 2))
    with attach(model, tmp_path, backward=True, input=True) as mon:
        for _ in range(3):
            model(prompt).sum().backward()
            mon.step_end()
    assert not prompt._backward_hooks
    assert [rows(tmp_path, step)["0/grad_input"]["activation/norm"] for step in (1, 2, 3)] == [
        pytest.approx(norm(model[0].weight.sum(0)), rel=1e-6)
    ] * 3


@pytest.mark.parametrize("compiled_whole", [True, False])
def test_compiled_modules_are_refused_clearly_and_work(tmp_path: Path, compiled_whole: bool) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    compile_ = {"backend": "eager", "fullgraph": True}  # a hook that could not be traced would raise
    if compiled_whole:
        model: Any = torch.compile(plain, **compile_)
    else:
        model = plain
        plain.b = torch.compile(plain.b, **compile_)
    with attach(model, tmp_path) as mon:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            mon.step_end()
    (said,) = events(tmp_path, "modules_compiled")
    if compiled_whole:
        assert "a, b, b.0, ..." in said["text"] and "activations: 4 selected" in said["text"]
        assert not rows(tmp_path)
    else:
        assert "b.0, b.1;" in said["text"]
        expected = norm(plain.b(plain.a(torch.ones(1, 2))))
        assert rows(tmp_path)["b"]["activation/norm"] == pytest.approx(expected, rel=1e-6)


def test_compiled_after_the_hooks_were_put_there(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with attach(model, tmp_path, input=True, backward=True) as mon:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(4):
            compiled(torch.ones(1, 2)).sum().backward()
            mon.step_end()
    (said,) = events(tmp_path, "modules_unseen")
    assert said["step"] == 3 and "torch.compile" in said["text"]
    assert rows(tmp_path)["0"]["activation/norm"] is None


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("tokens_per_expert", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_are_left_out_and_lazy_ones_seen(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(Scripted()), nn.LazyLinear(2))
    model(torch.ones(1, 2))
    with attach(model, tmp_path, input=True, backward=True) as mon:
        model(torch.ones(1, 2)).sum().backward()
        mon.step_end()
    assert rows(tmp_path)["1"]["activation/norm"] is not None
    (said,) = events(tmp_path, "modules_compiled")
    assert "2 selected modules" in said["text"] and "0, 0.linear;" in said["text"]


def test_a_model_that_cannot_be_looked_into_trains_on(tmp_path: Path) -> None:
    class Hidden(nn.Linear):
        def named_children(self) -> Any:
            raise RuntimeError("hidden")

    model = nn.Sequential(Hidden(2, 2))
    with attach(model, tmp_path) as mon:
        model(torch.ones(1, 2)).sum().backward()
        mon.step_end()
    assert {said["text"].partition(":")[0] for said in events(tmp_path, "model_not_readable")} == {
        "activations",
        "moe",
    }


def test_a_broken_container_does_not_reach_the_loop(tmp_path: Path) -> None:
    class Trap(dict[str, Any]):
        def values(self) -> Any:
            raise RuntimeError("trap")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Identity()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.odd(Trap(x=x))
            return self.linear(x)  # type: ignore[no-any-return]

    model = Model()
    with attach(model, tmp_path, backward=True) as mon:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            mon.step_end()
    (said,) = events(tmp_path, "internal_error")
    assert "trap" in said["text"]
    assert rows(tmp_path, 4)["linear"]["activation/norm"] is not None


def test_the_torch_backend_reads_once_a_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with attach(model, tmp_path, backend="torch", backward=True, input=True) as mon:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            mon.step_end()
    assert mon.monitor._backend.reads == 3


@pytest.mark.parametrize("section", [{"forward": False}, {"output": False}, {"invert": True}])
def test_nothing_to_look_at_is_an_error(tmp_path: Path, section: dict[str, bool]) -> None:
    with pytest.raises(trainmon.ConfigError, match="activations"):
        attach(nn.Linear(1, 1), tmp_path, **section)
