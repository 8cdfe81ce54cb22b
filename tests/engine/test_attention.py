"""Attention logits with real torch: what kernels are given, whatever the model; nothing of the training changes."""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import trainmon  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

ROOT = Path(__file__).parents[2]


def attach(model: nn.Module, directory: Path, *, backend: Any = "auto", **attention: Any) -> Any:
    """A loop that looks at all rows of every step unless told otherwise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keys = {"output_dir": str(directory), "run_name": "r", "sinks": ["csv", "jsonl"]}
    section = {"every": 1, "rows": 0, **attention}
    return trainmon.attach(model, optimizer, {**keys, "attention": section}, backend=backend)


def steps(directory: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(directory / "r/rank_0/scalars.jsonl") if "step" in record]


def heads(directory: Path, step: int = 1) -> dict[str, dict[str, str]]:
    found = {}
    for path in sorted((directory / "r/rank_0/tensors").glob("attention_*.csv")):
        with path.open(newline="") as stream:
            found.update({row["name"]: row for row in csv.DictReader(stream) if row["step"] == str(step)})
    return found


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(directory / "r/rank_0/events.jsonl") if event.get("kind") == kind]


class Truth:
    """Records by the definitions, over calls."""

    def __init__(self) -> None:
        self.max = -math.inf
        self.l = self.rows = self.m = 0.0

    def add(self, scores: torch.Tensor, allowed: torch.Tensor) -> None:
        z = scores.detach().double().masked_fill(~allowed.expand_as(scores), -math.inf)
        m = z.amax(-1)
        real = m > -math.inf
        self.max = max(self.max, float(m.max()))
        self.m += float(m[real].sum())
        self.l += float(torch.exp(z - m[..., None]).sum(-1)[real].sum())
        self.rows += int(real.sum())

    def check(self, record: dict[str, Any], layer: str) -> None:
        assert record[f"attention/max_logit/{layer}"] == pytest.approx(self.max, rel=1e-5)
        assert record[f"attention/mean_sum/{layer}"] == pytest.approx(self.l / self.rows, rel=1e-5)
        assert record[f"attention/row_max_mean/{layer}"] == pytest.approx(self.m / self.rows, rel=1e-4)


def triangle(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10 ** torch.arange(half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Llama(nn.Module):
    """q_proj and k_proj, rotary embeddings, grouped heads; through the kernel or by hand."""

    def __init__(self, by_hand: bool = False, repeated: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o_proj = nn.Linear(16, 16)
        self.by_hand, self.repeated = by_hand, repeated
        self.truth = Truth()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        q, k, v = (
            p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        every = k.repeat_interleave(2, 1)
        scores = q @ every.mT * 0.3
        allowed = triangle(x.shape[1]) if mask is None else mask > -1
        self.truth.add(scores, allowed)
        if self.by_hand:
            low = torch.finfo(scores.dtype).min
            weights = functional.softmax(scores + torch.where(allowed, 0.0, low), dim=-1, dtype=torch.float32)
            out = weights @ v.repeat_interleave(2, 1)
        elif self.repeated:
            out = functional.scaled_dot_product_attention(
                q, every, v.repeat_interleave(2, 1), attn_mask=mask, is_causal=mask is None, scale=0.3
            )
        else:
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True
            )
        return self.o_proj(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize(
    ("by_hand", "repeated", "masked"), [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (0, 0, 1)]
)
def test_grouped_heads_rotary_embeddings_and_masks(
    tmp_path: Path, backend: Any, by_hand: bool, repeated: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Llama(by_hand, repeated)})
    mask = torch.zeros(2, 1, 6, 6).masked_fill(~triangle(6), torch.finfo(torch.float32).min)
    mask[0, :, :, 4:] = torch.finfo(torch.float32).min  # padding behind the first sequence
    with attach(model, tmp_path, backend=backend, per_head=True) as mon:
        for step in range(2):
            model.attn.truth = Truth()
            for _ in range(2):  # micro-batches
                model.attn(torch.randn(2, 6, 16) * (3 - step), mask if masked else None).sum().backward()
                mon.micro_end()
            mon.step_end()
    # The loop's own second step: maxima begin anew.
    first, second = steps(tmp_path)
    model.attn.truth.check(second, "attn")
    assert second["attention/max_logit"] == second["attention/max_logit/attn"] < first["attention/max_logit"]
    assert (
        second["attention/mean_sum"] == second["attention/mean_sum_min"] == second["attention/mean_sum/attn"]
    )
    assert second["attention/nonfinite_rows"] == 0 and second["attention/sampled"] == 1
    maxima = [float(heads(tmp_path, 2)[f"attn/{head}"]["attention/max_logit_heads"]) for head in range(4)]
    assert max(maxima) == second["attention/max_logit"]
    assert second["attention/max_logit_mean"] == pytest.approx(sum(maxima) / 4)
    assert not events(tmp_path, "internal_error") and not events(tmp_path, "probe_failed")


def test_the_gpt_example_with_its_fused_projection(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpt_model", ROOT / "examples/gpt/model.py")
    assert spec is not None and spec.loader is not None
    gpt = importlib.util.module_from_spec(spec)
    sys.modules["gpt_model"] = gpt  # its dataclass asks for it
    spec.loader.exec_module(gpt)
    torch.manual_seed(0)
    model = gpt.GPT(gpt.ModelConfig(width=16, layers=2, heads=4, context=8))
    tokens = torch.randint(256, (3, 8))
    with attach(model, tmp_path) as mon:
        model.loss(tokens, tokens).backward()
        mon.step_end()
    (record,) = steps(tmp_path)
    x = model.token(tokens) + model.position.weight
    for index, block in enumerate(model.blocks):
        truth = Truth()
        q, k, _ = block.qkv(block.norm_1(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        truth.add(q @ k.mT / 2, triangle(8))
        truth.check(record, f"blocks.{index}")
        x = block(x)
    values = [record[f"attention/mean_sum/blocks.{index}"] for index in (0, 1)]
    assert record["attention/mean_sum"] == pytest.approx(sum(values) / 2)
    assert record["attention/mean_sum_min"] == min(values)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "hinted", "padding", "both"])
def test_torchs_own_multi_head_attention(
    tmp_path: Path, weights: bool, batch_first: bool, mask: str | None
) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=batch_first)})
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    options: dict[str, Any] = {"need_weights": weights}
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    if mask in ("causal", "hinted", "both"):
        options |= {"attn_mask": ~triangle(5), "is_causal": mask == "hinted"}
        allowed = allowed & triangle(5)
    if mask in ("padding", "both"):
        options |= {"key_padding_mask": padding}
        allowed = allowed & ~padding[:, None, None]
    given = x if batch_first else x.transpose(0, 1)
    with attach(model, tmp_path) as mon:
        out, returned = model.attn(given, given, given, average_attn_weights=False, **options)
        out.sum().backward()
        mon.step_end()
    q, k, _ = functional.linear(x, model.attn.in_proj_weight, model.attn.in_proj_bias).chunk(3, -1)
    scores = q.unflatten(-1, (2, 4)).transpose(1, 2) @ k.unflatten(-1, (2, 4)).transpose(1, 2).mT / 2
    truth = Truth()
    truth.add(scores, allowed)
    truth.check(steps(tmp_path)[0], "attn")
    if weights:
        # An independent witness: 1 / l is the largest probability of a row, in the weights that torch itself returns.
        largest = float(returned.detach().amax(-1).mean())
        assert steps(tmp_path)[0]["attention/attn_prob_max_mean/attn"] == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_pass_counts_once_and_changes_no_bit(tmp_path: Path, reentrant: bool) -> None:
    torch.manual_seed(2)
    model = nn.ModuleDict({"attn": Llama()})
    x = torch.randn(1, 6, 16, requires_grad=True)
    found, gradients = [], []
    for name, again in (("plain", False), ("again", True)):
        with attach(model, tmp_path / name) as mon:
            out = checkpoint(model.attn, x, use_reentrant=reentrant) if again else model.attn(x)
            out.sum().backward()
            mon.step_end()
        found.append({k: v for k, v in steps(tmp_path / name)[0].items() if k.startswith("attention/")})
        gradients.append(x.grad)
        x.grad = None
    assert found[0] == found[1] and found[0]["attention/sampled"] == 1
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_sampled_rows_bound_the_maximum_from_below_and_keep_the_mean(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"attn": Llama()})
    x = torch.randn(2, 20, 16) * 2
    for name, rows in (("all", 0), ("some", 4)):
        with attach(model, tmp_path / name, rows=rows) as mon:
            for _ in range(20):
                model.attn(x)
                mon.step_end()
    everything, some = steps(tmp_path / "all"), steps(tmp_path / "some")
    true = everything[0]["attention/mean_sum"]
    assert {record["attention/sampled"] for record in some} == {0.2}
    assert max(record["attention/max_logit"] for record in some) <= everything[0]["attention/max_logit"]
    means = [record["attention/mean_sum"] for record in some]
    assert len(set(means)) == 5, "other rows in other steps"
    assert sum(means) / len(means) == pytest.approx(true, rel=0.05)


def test_what_the_user_hands_over(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 4, 8)
    truth = Truth()
    truth.add(q @ k.mT * 0.5, triangle(4))
    rows = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[2.0, 4.0 / 3.0]])
    with attach(model, tmp_path, qk_clip=0.4, per_head=True) as mon:
        for _ in range(2):
            mon.attention("heads", max_logit=torch.tensor([0.5, 0.2]), first_head=2)
            mon.attention("heads", max_logit=[0.1, 0.3])
            mon.attention("one", max_logit=0.25)
            mon.attention_rows("rows", *rows)
            mon.attention_qk("qk", q, k, scale=0.5)
            mon.step_end()
    for record in steps(tmp_path):
        truth.check(record, "qk")
        assert record["attention/max_logit/heads"] == pytest.approx(0.5)
        assert record["attention/max_logit/one"] == 0.25
        assert record["attention/mean_sum/rows"] == pytest.approx(5 / 3)
        assert record["attention/max_logit/rows"] == pytest.approx(1.098612, rel=1e-6)
        assert record["attention/mean_sum/one"] is None and record["attention/logit_mean/rows"] is None
    table = heads(tmp_path)
    gamma = {
        name: row["attention/qk_clip_gamma"] for name, row in table.items() if row["attention/qk_clip_gamma"]
    }
    assert float(gamma["heads/2"]) == pytest.approx(0.8) and float(gamma["heads/3"]) == 1.0
    assert float(gamma["heads/0"]) == 1.0 and "one/0" not in gamma


class Tracking(nn.Module):
    """Keeps its largest logits, and is emptied by its trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("max_attention_logit", torch.full((2,), -math.inf))

    def forward(self, value: float) -> None:
        self.max_attention_logit = torch.maximum(self.max_attention_logit, torch.tensor([value, value / 2]))


def test_values_that_the_model_tracks_itself(tmp_path: Path) -> None:
    model = nn.ModuleDict({"attn": Tracking(), "other": nn.Linear(1, 1)})
    with attach(model, tmp_path, per_head=True) as mon:
        for value in (3.0, 8.0, 2.0):
            model.attn(value)
            model.attn(1.0)
            mon.step_end()
            model.attn.max_attention_logit.fill_(-math.inf)
    assert [record["attention/max_logit"] for record in steps(tmp_path)] == [3.0, 8.0, 2.0]
    assert heads(tmp_path, 3)["attn/1"]["attention/max_logit_heads"] == "1.0"
    assert "attention/mean_sum" not in steps(tmp_path)[0], "nobody knows row sums: left out"


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    model = nn.ModuleDict({"attn": Llama(), "then": Llama()})
    with attach(model, tmp_path, qk_clip=100.0, per_head=True) as mon:
        for bad in (False, True, False):
            x = torch.randn(1, 4, 16)
            x[0, 2, 3] = math.nan if bad else 0.0
            model.then(model.attn(x))
            mon.step_end()
    fine, bad, again = steps(tmp_path)
    # Of the first layer the rows that see the bad key; all of the second, for torch's kernel takes 0 * NaN along.
    assert math.isnan(bad["attention/max_logit"]) and bad["attention/mean_sum"] > 0, "other rows count on"
    assert bad["attention/nonfinite_rows"] == 4 * 2 + 4 * 4 and fine["attention/nonfinite_rows"] == 0
    assert again["attention/max_logit"] < math.inf
    (said,) = events(tmp_path, "nonfinite_largest_attention_logit")
    assert said["text"].startswith("largest attention logit of attn is not finite in micro-batch 0 of step 2")
    assert heads(tmp_path, 2)["attn/0"]["attention/qk_clip_gamma"] == "", "null, never 0"


def test_the_first_cause_is_told_across_sections(tmp_path: Path) -> None:
    """In the order of the computation: embedding, the logits of its layer, that layer's output, the loss."""
    model = nn.ModuleDict({"embed": nn.Linear(16, 16), "attn": Llama()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sections = {"attention": {"every": 1}, "activations": {"every": 1, "input": True}}
    told = []
    for bad in ("embed", "attn"):
        keys = {"output_dir": str(tmp_path / bad), "run_name": "r", "sinks": ["jsonl"], **sections}
        with trainmon.attach(model, optimizer, keys) as mon:
            x = torch.randn(1, 4, 16)
            with torch.no_grad():
                layer = model.embed if bad == "embed" else model.attn.q_proj
                layer.bias[0] = math.inf
            loss = model.attn(model.embed(x)).square().mean()
            loss.backward()
            layer.bias.data[0] = 0.0
            mon.micro_end(loss, 4)
            mon.step_end()
        said = [
            e
            for e in read_jsonl(tmp_path / bad / "r/rank_0/events.jsonl")
            if e.get("kind", "").startswith("nonf")
        ]
        told.append(said[0]["text"])
    assert told[0].startswith("output of embed is not finite") and "inputs were finite" in told[0]
    assert told[1].startswith("output of attn.q_proj is not finite") and "inputs were finite" in told[1]


def test_a_layer_that_raises_leaves_no_mode_behind(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(2, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    model = nn.ModuleDict({"attn": Broken()})
    with attach(model, tmp_path) as mon:
        with pytest.raises(RuntimeError, match="mine"):
            model.attn(torch.ones(1, 2))
        assert torch._C._len_torch_function_stack() == 0
        q = torch.randn(1, 1, 2, 2)
        functional.scaled_dot_product_attention(q, q, q)
        mon.step_end()
    assert "attention/max_logit" not in steps(tmp_path)[0]


def test_hooks_cadence_and_evaluation(tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": Llama(), "two": Llama(), "mlp": nn.Linear(2, 2)})
    x = torch.randn(1, 4, 16)

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (model.one, model.two, model.mlp)]

    with attach(model, tmp_path, every=3, exclude="two") as mon:
        assert hooks() == [2, 0, 0]
        for _ in range(3):
            with mon.evaluation():
                model.one(x * 100)
            model.one(x)
            model.one.eval()
            model.one(x * 100)
            model.one.train()
            mon.step_end()
    mon.close()
    assert hooks() == [0, 0, 0]
    seen = [record.get("attention/max_logit") for record in steps(tmp_path)]
    assert seen[1] is None and seen[0] == seen[2]
    assert seen[0] < 50
    with trainmon.attach(
        model, torch.optim.SGD(model.parameters()), {"output_dir": str(tmp_path / "off"), "sinks": []}
    ):
        assert hooks() == [0, 0, 0]


@pytest.mark.parametrize("inner", ["layer", "kernel"])
def test_torch_compile_is_refused_or_not_disturbed(tmp_path: Path, inner: str) -> None:
    torch._dynamo.reset()
    compile_: dict[str, Any] = {"backend": "eager", "fullgraph": True}

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.kernel = torch.compile(functional.scaled_dot_product_attention, **compile_)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return self.kernel(q, k, v)  # type: ignore[no-any-return]

    layer: Any = Compiled()
    if inner == "layer":
        layer.kernel = functional.scaled_dot_product_attention
        layer.compile(**compile_)
    model = nn.ModuleDict({"attn": layer})
    with attach(model, tmp_path, every=2) as mon:
        for _ in range(4):
            model.attn(torch.ones(1, 3, 8)).sum().backward()
            mon.step_end()
    assert len(steps(tmp_path)) == 4 and not events(tmp_path, "internal_error")
    if inner == "layer":
        (said,) = events(tmp_path, "modules_compiled")
        assert said["text"].startswith(
            "attention: 2 selected modules lie inside torch.compile or TorchScript"
        )
