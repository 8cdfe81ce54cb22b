"""What a monitor costs a compiled training with ``Model.train`` on a CPU: compiling, and its steps.

    python -m benchmarks.mindspore [--quick]

In the environment of `make mindspore`. A small transformer of 68 parameters, compiled again and again in one process,
arm by arm in turn, against the same training without a monitor; the best of all turns counts. Compiling is the first
step, in CPU time of all threads, which neighbours on the machine disturb least. *reducer*: MindSpore's own step cell,
with one hook behind its reducer; *parameters*: a cell of one's own without a reducer, with a hook on each parameter;
*no count*: with `gradients: {nonfinite: false}`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._measure import Row

COMPILING = 0.30
WIDTH, BLOCKS, WORDS, LENGTH = 16, 4, 32, 8
STEPS = 20


def measure(quick: bool = False) -> list[Row]:
    """The rows of the report."""
    if importlib.util.find_spec("mindspore") is None:
        return [Row("MindSpore", "not installed here")]
    arms: dict[str, tuple[bool, dict[str, Any] | None]] = {
        "reducer": (False, {}),
        "reducer, no count": (False, {"gradients": {"nonfinite": False}}),
        "parameters": (True, {}),
        "parameters, no count": (True, {"gradients": {"nonfinite": False}}),
    }
    plain: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    seen: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(2 if quick else 6):
        for own, times in plain.items():
            times.append(_train(own, None))
        for arm, (own, keys) in arms.items():
            seen[arm].append(_train(own, keys))
    rows = [Row("load average after", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")]
    for own, times in plain.items():
        name = "a cell of one's own" if own else "MindSpore's cell"
        first, step = _best(times)
        rows.append(Row(f"first step without monitor, {name}", f"{first:.2f} s"))
        rows.append(Row(f"step without monitor, {name}", f"{step * 1e3:.1f} ms"))
    for arm, (own, _) in arms.items():
        (first, step), (plain_first, plain_step) = _best(seen[arm]), _best(plain[own])
        more = first / plain_first - 1
        rows.append(Row(f"first step, {arm}", f"{more:+.0%}", f"at most {COMPILING:+.0%}", more <= COMPILING))
        rows.append(Row(f"step, {arm}", f"{(step - plain_step) * 1e3:+.2f} ms"))
    return rows


def _best(times: list[tuple[float, float]]) -> tuple[float, float]:
    return min(first for first, _ in times), min(step for _, step in times)


def _train(own: bool, keys: dict[str, Any] | None) -> tuple[float, float]:
    """CPU seconds of the first step and of the shortest other one."""
    import mindspore
    import mindspore.dataset
    from mindspore import nn
    from mindspore.train import Callback, Model

    import trainmon

    class Clock(Callback):  # type: ignore[misc]
        """Ahead of the monitor: a step's time is from its begin to the next one's."""

        def __init__(self) -> None:
            super().__init__()
            self.begins: list[float] = []

        def on_train_step_begin(self, run_context: Any) -> None:
            self.begins.append(time.process_time())

    class OwnCell(nn.TrainOneStepCell):  # type: ignore[misc]
        def construct(self, *inputs: Any) -> Any:
            loss = self.network(*inputs)
            gradients = self.grad(self.network, self.weights)(*inputs, mindspore.ops.ones_like(loss))
            return mindspore.ops.depend(loss, self.optimizer(gradients))

    def samples() -> Iterator[tuple[Any, Any]]:
        random = np.random.default_rng(0)
        for _ in range(2 * (STEPS + 1)):
            ids = random.integers(0, WORDS, LENGTH + 1).astype(np.int32)
            yield ids[:-1], ids[1:]

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(1)
    net, loss = _network()
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.01)
    cell = OwnCell(nn.WithLossCell(net, loss), optimizer) if own else None
    model = Model(net, loss, optimizer) if cell is None else Model(cell)
    data = mindspore.dataset.GeneratorDataset(samples, ["ids", "labels"], shuffle=False).batch(2)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        monitors = []
        if keys is not None:
            monitors = [trainmon.MindSporeMonitor(output_dir=folder, sinks={"log": False}, **keys)]
        model.train(1, data, callbacks=[clock, *monitors], dataset_sink_mode=False)
    times = np.diff(clock.begins)
    return float(times[0]), float(times[1:].min())


def _network() -> tuple[Any, Any]:
    from mindspore import nn, ops

    class Block(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
            self.q, self.k, self.v, self.out = (nn.Dense(WIDTH, WIDTH) for _ in range(4))
            self.up, self.down = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)
            self.bend, self.softmax = nn.GELU(), nn.Softmax(-1)

        def construct(self, x: Any) -> Any:
            h = self.before(x)
            scores = ops.matmul(self.q(h), self.k(h).swapaxes(-1, -2)) * WIDTH**-0.5
            x = x + self.out(ops.matmul(self.softmax(scores), self.v(h)))
            return x + self.down(self.bend(self.up(self.between(x))))

    class Transformer(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.SequentialCell([Block() for _ in range(BLOCKS)])
            self.norm, self.head = nn.LayerNorm((WIDTH,)), nn.Dense(WIDTH, WORDS, has_bias=False)

        def construct(self, ids: Any) -> Any:
            return self.head(self.norm(self.blocks(self.words(ids))))

    class Loss(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

        def construct(self, logits: Any, labels: Any) -> Any:
            return self.inner(logits.reshape(-1, WORDS), labels.reshape(-1))

    return Transformer(), Loss()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    for row in measure(parser.parse_args().quick):
        print(row.measure, row.value, row.mark, "" if row.holds is None else row.holds, sep="  ")


if __name__ == "__main__":
    main()
