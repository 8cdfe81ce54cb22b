"""One training of the example's model, in a process of its own: ``python driver.py '<options as JSON>'``.

Options: ``file`` (YAML), ``steps``, ``watch`` (import the adapter, which registers its name), ``callbacks`` (names of
those below, behind those of the YAML). Leaves ``truth.npz`` and ``ended.json``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import mindspore.dataset
import numpy as np
from mindformers import MindFormerConfig
from mindspore.communication import GlobalComm, get_rank
from mindspore.train import Callback

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "mindformers_graph" / "train.py"


class Truth(Callback):
    """What NumPy sees of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Any]] = {}

    def keep(self, name: str, value: Any) -> None:
        self.kept.setdefault(name, []).append(np.array(value))

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        outputs = [one.asnumpy() if hasattr(one, "asnumpy") else one for one in params.net_outputs]
        for name, value in zip(
            ("loss", "overflow", "scale", "rate", "norm", "squares", "sizes"), outputs, strict=False
        ):
            self.keep(name, value)
        optimizer = params.network.optimizer
        for parameter, mean, square in zip(
            optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq, strict=True
        ):
            self.keep(f"weight {parameter.name}", parameter.asnumpy())
            self.keep(f"exp_avg {parameter.name}", mean.asnumpy())
            self.keep(f"exp_avg_sq {parameter.name}", square.asnumpy())
        self.kept["names"] = [np.array([one.name for one in optimizer.parameters])]

    def on_train_end(self, run_context: Any) -> None:
        np.savez(f"truth{_of_rank()}.npz", **{name: np.stack(values) for name, values in self.kept.items()})


class Logits(Callback):
    """Largest logits and mean softmax denominators of each layer and step, from queries and keys on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.kept: list[list[tuple[float, float]]] = []

    def on_train_epoch_begin(self, run_context: Any) -> None:
        if self.seen:
            return
        for path, cell in run_context.original_args().network.network.cells_and_names():
            if hasattr(cell, "apply_rotary_emb"):
                self.seen[path] = None
                cell.apply_rotary_emb.register_forward_hook(self._hook(path))

    def _hook(self, path: str) -> Any:
        def look(_cell: Any, _inputs: Any, outputs: Any) -> None:
            q, k = (one.asnumpy().astype(np.float64) for one in outputs[:2])
            logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
            size = logits.shape[-1]
            logits = np.where(np.tri(size, dtype=bool), logits, -np.inf)
            sums = np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
            self.seen[path] = logits.max(), sums.mean()

        return look

    def on_train_step_end(self, run_context: Any) -> None:
        self.kept.append(list(self.seen.values()))

    def on_train_end(self, run_context: Any) -> None:
        np.savez("logits.npz", names=list(self.seen), values=np.array(self.kept))


class Poison(Callback):
    """A weight becomes NaN after step 3."""

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        if params.cur_step_num == 3:
            weight = params.network.optimizer.parameters[-1]
            values = weight.asnumpy().copy()
            values[0] = np.nan
            weight.set_data(mindspore.Tensor(values))


class Raises(Callback):
    """Ends the training in its second step."""

    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 2:
            raise ZeroDivisionError("the host's own")


class Order(Callback):
    """Which callbacks there are, in their order."""

    def on_train_begin(self, run_context: Any) -> None:
        names = [type(one).__name__ for one in run_context.original_args().list_callback]
        Path("order.json").write_text(json.dumps(names))


def _of_rank() -> str:
    return f"_{get_rank()}" if GlobalComm.INITED else ""


def rows_of_rank(example: Any, steps: int) -> Any:
    """Each rank has sequences of its own."""
    rank = get_rank()
    rows = [
        row for index, row in enumerate(example.counting(2 * steps)) if index // example.BATCH % 2 == rank
    ]
    source = mindspore.dataset.GeneratorDataset(lambda: iter(rows), ["input_ids"], shuffle=False)
    return source.batch(example.BATCH)


def main(options: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if options.get("watch"):
        import trainmon.adapters.mindformers  # noqa: F401
    if options.get("ranks"):
        example.data = lambda steps: rows_of_rank(example, steps)
    callbacks = [globals()[name]() for name in options.get("callbacks", ())]
    ended: dict[str, Any] = {"error": None}
    try:
        sys.argv = [sys.argv[0], options["file"]]
        trainer = example.trainer(MindFormerConfig(options["file"]), options["steps"], callbacks)
        trainer.train()
    except Exception as error:
        ended["error"] = f"{type(error).__name__}: {error}"
    Path(f"ended{_of_rank()}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
