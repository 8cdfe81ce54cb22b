"""What backends need while they work: bounded, however large a tensor is."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch backend needs torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import trainmon.backend.host as host_backend  # noqa: E402
import trainmon.backend.torch as backend_torch  # noqa: E402
import trainmon.backend.torch_attention as backend_attention  # noqa: E402
from trainmon.backend.host import HostBackend  # noqa: E402
from trainmon.backend.torch import TorchBackend  # noqa: E402
from trainmon.events import AdamStep  # noqa: E402

#: Elements, instead of 4 Mi: 64 MiB are 16 bytes for each.
PIECE = 1 << 12
LARGE = (40, 16, 128)  # 20 pieces


class Peak(TorchDispatchMode):
    """Bytes that operations have made and somebody still holds, at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        old = {t.untyped_storage()._cdata for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)}
        out = function(*arguments, **(keywords or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                key = one.untyped_storage()._cdata
                if key in old and not self._holders[key]:
                    continue  # a view of what was there before
                size = one.untyped_storage().nbytes()
                self.now += 0 if self._holders[key] else size
                self.most = max(self.most, self.now)
                self._holders[key] += 1
                weakref.finalize(one, self._released, key, size)
        return out

    def _released(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        self.now -= 0 if self._holders[key] else size


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    with Peak() as peak:
        result = work()
    return peak.most, result


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_torch, "_BATCH", PIECE)
    monkeypatch.setattr(backend_attention, "_SCORES", PIECE)


def test_the_measure_sees_what_is_made() -> None:
    def work() -> None:
        one = torch.zeros(1000)
        two = one.view(10, 100)[:5]
        del one
        three = two + 1
        del two, three
        torch.zeros(100)

    assert peak_of(work)[0] == 4000 + 2000


@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "what",
    ["summaries", "squares", "flushed", "differences", "update", "adam_squares", "square_sum", "signs"],
)
def test_no_memory_grows_with_tensors(what: str, dtype: Any, float64: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in (LARGE, (3,), (0,), (300, 70), (70, 300))]
    tensors[-1] = tensors[-1].t()  # strided
    tensors[0][3, 5, 7], tensors[3][200, 3] = float("nan"), float("inf")
    others = [tensor + 0.25 * torch.randn(tensor.shape).to(dtype) for tensor in tensors]
    steps = [
        AdamStep(str(row), mean, mean.square(), torch.tensor(3.0), 0.1, (0.9, 0.99), 1e-8, 0.01)
        for row, mean in enumerate(others)
    ]

    def call(backend: Any) -> Any:
        match what:
            case "summaries" | "square_sum":
                return getattr(backend, what)(tensors)
            case "squares":
                return backend.squares(tensors, True)
            case "flushed":
                return backend.flushed(tensors, ["fp16", "e4m3fn"])
            case "signs":
                return backend.signs(tensors, others)
            case "differences":
                return backend.differences(tensors, others)
            case "update":
                return backend.differences(tensors, others, update=True)
            case _:
                return backend.adam_squares(steps, tensors)

    def copied() -> list[Any]:
        return [other.clone() for other in others]

    before = copied()
    device = TorchBackend("cpu", float64=float64)
    most, lazy = peak_of(lambda: call(device))
    assert most <= 16 * PIECE, "64 MiB where a piece is 4 Mi elements"
    found = device.read([lazy]).wait()[0]
    if what == "update":
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(others, tensors, strict=True))
        others[:] = before
    expected = HostBackend().read([call(HostBackend())]).wait()[0]
    if what == "summaries":
        found, expected = found[:, :5], expected[:, :5]
    error = 2e-6 if dtype == torch.float32 else 2e-2 if what == "adam_squares" else 2e-3
    np.testing.assert_allclose(found, expected, rtol=error, atol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize(("lead", "rows"), [(1, None), (6, None), (6, 4)])
def test_no_memory_grows_with_queries_times_keys(
    lead: int, rows: int | None, scores: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(lead, 4, 200, 8), torch.randn(lead, 2, 200, 8)
    mask = torch.rand(1, 1, 200, 200) < 0.9 if masked else None
    keys = {"scale": 0.4, "causal": True, "q_start": 0, "mask": mask, "sample_rows": rows, "seed": 3}
    whole = q @ k.repeat_interleave(2, 1).mT * 0.4
    allowed = torch.ones(200, 200, dtype=torch.bool).tril() & (True if mask is None else mask)
    whole = whole.masked_fill(~allowed, float("-inf"))

    def call(backend: Any) -> Any:
        if scores:
            return backend.attention_scores(whole, sample_rows=rows, seed=3)
        return backend.attention(q, k, **keys)

    device = TorchBackend("cpu")
    most, lazy = peak_of(lambda: call(device))
    inputs = 4 * (q.numel() + k.numel()) + (0 if rows else 200 * 200 * 2)
    assert most <= 16 * PIECE + inputs, "of scores only a few at a time"
    found, expected = (
        one.read([row]).wait()[0] for one, row in ((device, lazy), (HostBackend(), call(HostBackend())))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adams_estimate_in_host_memory_widens_block_by_block(dtype: Any) -> None:
    torch.manual_seed(0)
    mean, weight = (torch.randn(300, 1000).to(dtype) for _ in range(2))
    step = AdamStep("w", mean, mean.square(), torch.tensor(3.0), 0.1, (0.9, 0.99), 1e-8, 0.01)
    most, lazy = peak_of(lambda: HostBackend().adam_squares([step], [weight]))
    assert most <= 6 * 8 * host_backend._BLOCK, "the last blocks and the next ones"
    m, v, w = mean.double(), step.square.double(), weight.double()
    move = m / (1 - 0.9**3) / ((v / (1 - 0.99**3)).sqrt() + 1e-8) + 0.01 * w
    assert HostBackend().read([lazy]).wait()[0] == pytest.approx(float(move.square().sum()) * 0.01, rel=1e-9)
