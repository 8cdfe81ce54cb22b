"""Rows of calls are those that torch's own full backward hooks would give, in their order, wherever these work."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trainmon.adapters.torch_rows.calls import CallHooks  # noqa: E402
from trainmon.adapters.torch_rows.meter import Meter  # noqa: E402
from trainmon.adapters.torch_rows.names import named_modules, named_parameters  # noqa: E402
from trainmon.adapters.torch_rows.passes import Passes  # noqa: E402
from trainmon.backend.statistics import finished  # noqa: E402

Rows = list[tuple[str, float]]
#: A step: takes the model, does forward and backward.
Step = Callable[[nn.Module], None]


def tensors_of(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def by_torch(model: nn.Module, step: Step) -> Rows:
    rows: Rows = []

    def add(name: str, kind: str, tensors: list[torch.Tensor]) -> None:
        for index, one in enumerate(tensors):
            rows.append((f"{name}.{kind}.{index}", float(one.detach().double().norm())))

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(
            lambda m, a, k: add(name, "input", tensors_of(a) + tensors_of(tuple(k.values()))),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda m, a, o: add(name, "output", tensors_of(o)))

        def backward(m: nn.Module, inputs: Any, outputs: Any) -> None:
            add(name, "grad_input", tensors_of(inputs))
            add(name, "grad_output", tensors_of(outputs))

        module.register_full_backward_hook(backward)

    for name, module in model.named_modules():
        watch(name, module)
    step(model)
    return rows


def _raise(error: Exception) -> None:
    raise error


def hooked(model: nn.Module, **options: Any) -> tuple[CallHooks, list[tuple[str, Any]]]:
    rows: list[tuple[str, Any]] = []

    hooks = CallHooks(
        list(named_modules(model)),
        Meter(as_msprobe=True),
        lambda name, scope, stage, micro, reading, call=0: rows.append((name, reading)),
        _raise,
        **options,
    )
    hooks.install()
    hooks.arm(True)
    return hooks, rows


def by_us(model: nn.Module, step: Step, extended: bool = False, **options: Any) -> Rows:
    if extended:
        passes = Passes(model, list(named_parameters(model, None)), _raise)
        passes.install()
        passes.arm(True)
        options |= {"passes": passes, "evaluation": False, "repeated": False}
    hooks, rows = hooked(model, **options)
    step(model)
    hooks.remove()
    if extended:
        passes.remove()
    norms = finished([reading for _, reading in rows], None)[:, 4]
    return [(name, float(norm)) for (name, _), norm in zip(rows, norms, strict=True)]


class Block(nn.Module):
    """A module made of functions: children by name, and what to do with them."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.do = forward
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.do(self, *arguments, **keywords)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def data(rows: int = 3, grad: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 4, requires_grad=grad)


def loss_of(output: Any) -> torch.Tensor:
    return sum((one * one).sum() for one in tensors_of(output))  # type: ignore[return-value]


def plainly(model: nn.Module) -> None:
    loss_of(model(data())).backward()


def on_input_with_gradient(model: nn.Module) -> None:
    loss_of(model(data(grad=True))).backward()


def twice(model: nn.Module) -> None:
    plainly(model)
    plainly(model)


def graph_gone_through_twice(model: nn.Module) -> None:
    loss = loss_of(model(data()))
    loss.backward(retain_graph=True)
    loss.backward()


def only_inputs(model: nn.Module) -> None:
    x = data(grad=True)
    torch.autograd.grad(loss_of(model(x)), [x])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequence": lambda: nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), nn.Identity()), linear()),
    "nested alone": lambda: nn.Sequential(nn.Sequential(nn.Sequential(linear()))),
    "identities": lambda: nn.Sequential(linear(), nn.Identity(), nn.Identity()),
    "residual": lambda: Block(lambda m, x: x + m.a(x) + m.b(m.a(x)), a=linear(), b=linear()),
    "shared": lambda: Block(lambda m, x: m.a(m.a(m.a(x))), a=linear()),
    "two outputs": lambda: Block(lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear()),
    "one output in another": lambda: Block(
        lambda m, x: m.p(m.a(x))[0],
        a=linear(),
        p=Block(lambda m, h: (torch.softmax(h, -1) * h, torch.softmax(h, -1))),
    ),
    "output that leads to another": lambda: Block(
        lambda m, x: m.p(m.a(x))[1], a=linear(), p=Block(lambda m, h: (w := h.exp(), w * 2.0))
    ),
    # What is made for an unused argument alone is another matter: torch's hooks send zeros through it, and give its
    # parameters a gradient of zeros that they would not have.
    "unused argument": lambda: Block(
        lambda m, x: (h := m.a(x), m.p(x, h, h * 3.0))[1], a=linear(), p=Block(lambda m, x, y, z: x * y)
    ),
    "no path to the inputs": lambda: Block(
        lambda m, x: m.p(m.a(x)) + x, a=linear(), p=Block(lambda m, h: m.c(h.detach()), c=linear())
    ),
    "integers and others": lambda: Block(
        lambda m, x: m.p(torch.arange(3), m.a(x), "note", 2, None)[1],
        a=linear(),
        p=Block(lambda m, i, h, *rest: (i, h * 3.0, "text")),
    ),
    "keywords": lambda: Block(lambda m, x: m.p(m.a(x), y=m.a(x)), a=linear(), p=Block(lambda m, x, y: x * y)),
    "keywords alone": lambda: Block(lambda m, x: m.p(y=m.a(x)), a=linear(), p=Block(lambda m, y: y * 2.0)),
    "list of outputs": lambda: Block(lambda m, x: m.p(m.a(x))[1], a=linear(), p=Block(lambda m, h: [h, h * 2])),
    "outputs given back": lambda: Block(lambda m, x: m.p(m.a(x), x)[0], a=linear(), p=Block(lambda m, h, x: (h, x))),
    "recurrent": lambda: Block(lambda m, x: m.r(x[None])[0], r=nn.LSTM(4, 4)),
    "attention": lambda: Block(
        lambda m, x: m.t(m.a(x)[None], m.a(x)[None], m.b(x)[None])[0], a=linear(), b=linear(),
        t=nn.MultiheadAttention(4, 2),
    ),
    "normalised": lambda: nn.Sequential(linear(), nn.LayerNorm(4), nn.Dropout(0.0), nn.GELU()),
    "checkpointed": lambda: Block(
        lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=nn.Sequential(linear(), nn.Tanh()), b=linear()
    ),
    "checkpointed anew": lambda: Block(
        lambda m, x: m.b(checkpoint(m.a, m.c(x), use_reentrant=True)), a=linear(), b=linear(), c=linear()
    ),
    "without gradient": lambda: Block(lambda m, x: m.b(m.f(x)), b=linear(), f=Block(lambda m, x: x.detach() + 1)),
    "part without gradient": lambda: Block(
        lambda m, x: m.b(_silently(m.a, x)) + m.a(x), a=linear(), b=linear()
    ),
}  # fmt: skip


def _silently(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


STEPS = {step.__name__: step for step in (plainly, on_input_with_gradient, twice)}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_rows_are_those_of_torchs_hooks(kind: str, step: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    other = copy.deepcopy(model)
    want, got = by_torch(model, STEPS[step]), by_us(other, STEPS[step], lossy=True)
    assert [name for name, _ in got] == [name for name, _ in want]
    assert [norm for _, norm in got] == pytest.approx([norm for _, norm in want], rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("step", [graph_gone_through_twice, only_inputs])
@pytest.mark.filterwarnings("ignore")
def test_other_ways_through_a_graph(step: Step) -> None:
    torch.manual_seed(0)
    model = MODELS["sequence"]()
    other = copy.deepcopy(model)
    want, got = by_torch(model, step), by_us(other, step, lossy=True)
    assert [name for name, _ in got] == [name for name, _ in want]


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_keep_their_bits(kind: str, extended: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    other = copy.deepcopy(model)
    plainly(model)
    by_us(other, plainly, extended)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_extended_rows_are_these_and_more(kind: str, step: str) -> None:
    """Without the zeros, and but for what evaluation and repeated passes are about, each row of the default is there."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    other = copy.deepcopy(model)
    default, extended = by_us(model, STEPS[step]), by_us(other, STEPS[step], extended=True)
    shown = Counter((name.rsplit(".", 1)[0], norm) for name, norm in extended)
    wanted = Counter((name.rsplit(".", 1)[0], norm) for name, norm in default if ".grad" not in name or norm)
    if "checkpointed" not in kind and kind != "part without gradient":
        assert not wanted - shown
    else:
        backward = Counter({key: count for key, count in wanted.items() if ".grad" in key[0]})
        assert not backward - shown


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()),
    "output": lambda: Block(lambda m, x: m.b(m.a(x).add_(1.0)), a=linear(), b=linear()),
    "residual": lambda: Block(lambda m, x: _add(m.a(x), m.b(m.a(x))), a=linear(), b=linear()),
    "argument": lambda: Block(lambda m, x: m.p(m.a(x)), a=linear(), p=Block(lambda m, h: h.mul_(2.0))),
    "argument used again": lambda: Block(
        lambda m, x: (h := m.a(x), m.p(h), h * 3.0)[2], a=linear(), p=Block(lambda m, h: h.tanh_())
    ),
    "one of several outputs": lambda: Block(
        lambda m, x: (pair := m.p(m.a(x)), pair[0].add_(pair[1]))[1],
        a=linear(),
        p=Block(lambda m, h: (h * 2, h * 3)),
    ),
    "batch norm and relu": lambda: nn.Sequential(linear(), nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
}


def _add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y
    return x


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_works_in_place_goes_on_working(kind: str) -> None:
    """T-04."""
    torch.manual_seed(0)
    model = IN_PLACE[kind]()
    other = copy.deepcopy(model)
    plainly(model)
    names = {name for name, _ in by_us(other, plainly)}
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert any("grad_output" in name for name in names)


def test_rows_of_what_works_in_place() -> None:
    torch.manual_seed(0)
    model = IN_PLACE["module"]()
    rows = dict(by_us(model, plainly))
    h = model[0](data())
    h.retain_grad()
    y = h.relu()
    y.retain_grad()
    loss_of(model[2](y)).backward()
    assert rows["1.grad_input.0"] == pytest.approx(float(h.grad.norm()), rel=1e-6)
    assert rows["1.grad_output.0"] == pytest.approx(float(y.grad.norm()), rel=1e-6)
    assert rows["1.input.0"] == pytest.approx(float(h.detach().norm()), rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_an_older_backward_hook_stays() -> None:
    """T-05."""
    model = nn.Sequential(linear(), linear())
    seen = []
    model[0].register_backward_hook(lambda *_: seen.append(1))
    names = [name for name, _ in by_us(model, plainly)]
    assert seen and "0.grad_output.0" in names and "1.grad_input.0" in names


class Packed:
    """What a graph keeps for its backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a saved output would hold itself


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("kind", ["identities", "sequence", "residual", "recurrent", "keywords"])
def test_nothing_is_held(kind: str, backward: bool) -> None:
    """T-25: neither tensors nor graphs live longer for the hooks, whether or not anybody goes backward."""
    model = MODELS[kind]()
    hooks, rows = hooked(model)
    kept: list[weakref.ref[Packed]] = []

    def pack(tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor)
        kept.append(weakref.ref(packed))
        return packed

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            output = model(data())
        ends = weakref.ref(output)
        if backward:
            output.sum().backward()
        del output
        if kind == "recurrent":  # several outputs, which know of each other until the step is over
            hooks.arm(True)
        assert ends() is None
        assert kept and not [one for one in kept if one() is not None]
    finally:
        gc.enable()
    assert rows and not any(isinstance(reading.source, torch.Tensor) for _, reading in rows)
    hooks.remove()
    assert not hooks._open and not hooks._hooked


def test_a_pass_that_ends_with_an_exception() -> None:
    def fail(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not math.isnan(x.detach()[0, 0].item()):
            return x * 2.0
        raise ValueError("no")

    model = Block(lambda m, x: m.p(m.a(x)), a=linear(), p=Block(fail))
    hooks, rows = hooked(model)
    with pytest.raises(ValueError):
        model(data() * float("nan"))
    rows.clear()
    plainly(model)
    names = [name for name, _ in rows]
    assert names.count("p.grad_input.0") == 1
    hooks.remove()


def test_outside_its_steps_a_hook_does_nothing() -> None:
    model = nn.Sequential(linear(), linear())
    hooks, rows = hooked(model)
    hooks.arm(False)
    seen: list[Any] = []
    model[1].register_forward_pre_hook(lambda m, a: seen.append(a[0].grad_fn.name()))
    plainly(model)
    assert not rows
    assert seen == ["AddmmBackward0"]  # no view was handed on
    hooks.remove()
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
