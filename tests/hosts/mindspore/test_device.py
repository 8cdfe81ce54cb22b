"""What is done with tensors that the host can't read where they are, forced on a CPU: sums by MindSpore's operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import Parameter, Tensor  # noqa: E402

from tests.hosts.mindspore.training import Truth, events_of, monitor, steps_of, train  # noqa: E402
from trainmon.backend.host import HostBackend  # noqa: E402
from trainmon.backend.mindspore import CompiledSums, MindSporeBackend, MindSporeDevice  # noqa: E402

RANDOM = np.random.default_rng(5)


def tensors(arrays: list[Any]) -> list[Any]:
    return [Parameter(Tensor(one), name=f"p{index}") for index, one in enumerate(arrays)]


def read(lazy: Any) -> Any:
    backend = MindSporeDevice()
    (found,) = backend.read([lazy]).wait()
    return found


CASES: dict[str, list[Any]] = {
    "random": [
        RANDOM.standard_normal((3, 5)).astype(np.float32),
        RANDOM.standard_normal(7).astype(np.float32),
    ],
    "several sums": [RANDOM.standard_normal((131, 1009)).astype(np.float32)],
    "a whole number of sums": [RANDOM.standard_normal((2, 65536)).astype(np.float32)],
    "half": [RANDOM.standard_normal(9).astype(np.float16)],
    "small and large": [np.full(4, 1e-30, np.float32), np.full(4, 1e30, np.float32)],
    "zero": [np.zeros(3, np.float32)],
    "infinite": [np.array([1.0, np.inf, -np.inf, -2.0], np.float32)],
    "nan": [np.array([1.0, np.nan, -np.inf], np.float32)],
}


@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_host(case: str) -> None:
    arrays = CASES[case]
    device, host = MindSporeDevice(), HostBackend()
    given = tensors(arrays)
    for ours, theirs in (
        (device.summaries(given), host.summaries(arrays)),
        (device.squares(given, negatives=True), host.squares(arrays, negatives=True)),
        (device.squares(given), host.squares(arrays)),
        (device.square_sum(given), host.square_sum(arrays)),
    ):
        (expected,) = host.read([theirs]).wait()
        found = read(ours)
        # A device doesn't say where the first bad element is; beside NaN nobody says what is largest or below zero.
        known = {6: [0, 2, 3, 4] if case == "nan" else [0, 1, 2, 3, 4], 2: [0] if case == "nan" else [0, 1]}
        columns = known.get(expected.shape[-1], [0])
        np.testing.assert_allclose(found[..., columns], expected[..., columns], rtol=1e-5)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (5, 3), (64, 1)])
def test_the_largest_eigenvalue(shape: tuple[int, int]) -> None:
    """From below, and after some visits near; a matrix that grows elsewhere is followed."""
    matrix = RANDOM.standard_normal(shape).astype(np.float32)
    other = matrix + 5 * np.outer(np.eye(shape[0])[0], np.eye(shape[1])[-1]).astype(np.float32)
    device, state = MindSporeDevice(), None
    for one in (matrix, other):
        truth = np.linalg.svd(one.astype(np.float64), compute_uv=False)[0] ** 2
        for _ in range(6):
            lazy, (state,) = device.spectra(tensors([one]), [state], [3], 0.01, 1e-6)
            found = read(lazy)
            assert found[0, 1] <= truth * (1 + 1e-6)
        np.testing.assert_allclose(found[0, 0], np.square(one.astype(np.float64)).sum(), rtol=1e-6)
        np.testing.assert_allclose(found[0, 1], truth, rtol=0.01)
    lazy, _ = device.spectra(tensors([np.zeros((3, 4), np.float32)]), [None], [3], 0.01, 1e-6)
    assert read(lazy).tolist() == [[0.0, 0.0, 0.0]]


def test_gradients_of_which_only_sums_are_there() -> None:
    backend, ones = MindSporeBackend(), np.ones(3, np.float32)
    with pytest.raises(NotImplementedError, match=r"set gradients\.signs: false"):
        backend.signs([CompiledSums(1.0, 0)], [ones])
    (values,) = backend.read([backend.signs([ones], [-ones])]).wait()
    assert values.tolist() == [0, 3, 3]


def test_a_training_on_a_device(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are those of copies; nothing of a tensor's size comes to the host; weights end as ever."""
    from trainmon.adapters.mindspore_parts import session

    monkeypatch.setattr(session, "host_addresses", lambda: False)
    truth = Truth()
    spectral = {"every": 1, "eigenvalue": True, "elements": 1 << 40}
    seen, _ = train(truth, monitor(tmp_path, updates=False, spectral=spectral))
    plain, _ = train()
    for one, other in zip(seen.trainable_params(), plain.trainable_params(), strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
    records = steps_of(tmp_path)
    for record, weight, moments in zip(records, truth.weights, truth.moments, strict=True):
        np.testing.assert_allclose(record["weight/norm"], weight, rtol=1e-6)
        np.testing.assert_allclose(record["moment/norm/exp_avg"], moments[0], rtol=1e-6)
        np.testing.assert_allclose(record["moment/norm/exp_avg_sq"], moments[1], rtol=1e-6)
        assert record["grad/norm"] > 0 and record["weight/nonfinite"] == 0
    told = {event["kind"]: event["text"] for event in events_of(tmp_path)}
    assert "device_tensors" in told and "internal_error" not in told
    assert list((tmp_path / "r/rank_0/tensors").glob("spectral_*.csv"))
