"""The trainer's calls and objects, as its contract has them, where a CPU can't run the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from trainmon.adapters.mindformers.graph.callback import GraphMonitor
from trainmon.sinks.jsonl import read_jsonl


def parameter(value: Any, name: str, trains: bool = False) -> Parameter:
    return Parameter(Tensor(np.array(value, np.float32)), name=name, requires_grad=trains)


class Attention(nn.Cell):
    def __init__(self, heads: int, name: str) -> None:
        super().__init__()
        self.core_attention = nn.Cell()
        self.core_attention.max_logits_val = parameter(np.zeros(heads), f"{name}.max_logits_val")


class Experts(nn.Cell):
    """A router with its load and bias, and where each expert is."""

    def __init__(self, experts: int, name: str) -> None:
        super().__init__()
        self.router = nn.Cell()
        self.router.expert_load = parameter(np.zeros(experts), f"{name}.expert_load")
        self.router.expert_bias = parameter(np.zeros(experts), f"{name}.expert_bias")
        self.expert_mapping = parameter(np.arange(experts), f"{name}.expert_mapping")


class Layer(nn.Cell):
    def __init__(self, heads: int, experts: int, name: str) -> None:
        super().__init__()
        self.self_attention = Attention(heads, name)
        self.mlp = Experts(experts, name)
        self.weight = parameter(np.ones((4, 3)), f"{name}.weight", trains=True)


class Model(nn.Cell):
    """Two layers."""

    def __init__(self, heads: int = 2, experts: int = 4) -> None:
        super().__init__()
        names = ("decoder.layers.0", "decoder.layers.1")
        self.decoder = nn.Cell()
        self.decoder.layers = nn.CellList([Layer(heads, experts, name) for name in names])

    def logits(self, layer: int) -> Parameter:
        return self.decoder.layers[layer].self_attention.core_attention.max_logits_val


class Optimizer:
    """AdamW of MindFormers, whose moments are named after parameters with a prefix."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = ParameterTuple(list(parameters))
        self.learning_rate = parameter(0.5, "learning_rate")
        self.exp_avg = self.parameters.clone(prefix="adam_m", init="ones")
        self.exp_avg_sq = self.parameters.clone(prefix="adam_v", init="ones")
        self.global_step = parameter([0], "global_step")


class MFTrainOneStepCell(nn.Cell):
    """The trainer's cell: it owns the optimizer."""

    def __init__(self, network: nn.Cell, local_norm: bool = True) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.local_norm = local_norm
        self.optimizer = Optimizer(network.trainable_params())


class MFPipelineWithLossScaleCell(MFTrainOneStepCell):
    pass


class Params(dict[str, Any]):
    """MindSpore's, by attribute too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Trainer:
    """Builds the callback from a configuration and calls it as MindSpore does.

    Args:
        host: the trainer's configuration.
        before: callbacks before ours.
    """

    def __init__(
        self, folder: Path, host: dict[str, Any] | None = None, cell: Any = None, before: Iterable[Any] = ()
    ) -> None:
        self.folder = folder
        self.config = {"callbacks": [], "runner_config": {}, **(host or {})}
        self.cell = MFTrainOneStepCell(Model()) if cell is None else cell
        self.before = list(before)
        self.stops = False
        self.params = Params(
            cur_step_num=0,
            batch_num=10,
            epoch_num=1,
            network=self.cell,
            train_network=self.cell,
            optimizer=None,
            parallel_mode="stand_alone",
            dataset_sink_mode=False,
        )

    def build(self, kind: type = GraphMonitor, **keys: Any) -> Any:
        settings = {"output_dir": str(self.folder), "run_name": "r", "sinks": {"log": False}}
        return kind(**{**settings, **keys})

    def original_args(self) -> Params:
        return self.params

    def request_stop(self) -> None:
        self.stops = True

    def get_stop_requested(self) -> bool:
        return self.stops

    def begin(self, *callbacks: Any) -> None:
        self.callbacks = [*self.before, *callbacks]
        self.params["list_callback"] = self.callbacks
        self._all("on_train_begin")
        self.params["cur_epoch_num"] = self.params.get("cur_epoch_num") or 1
        self._all("on_train_epoch_begin")

    def step(
        self, outputs: Any, work: Callable[[], None] | None = None, *, stride: int = 1, fails: bool = False
    ) -> None:
        """``work`` is what the compiled step does to parameters; a step that fails has no end."""
        self.params["cur_step_num"] += stride
        self._all("on_train_step_begin")
        if work is not None:
            work()
        if fails:
            return
        self.params["net_outputs"] = outputs
        self._all("on_train_step_end")

    def end(self) -> None:
        self._all("on_train_epoch_end")
        self._all("on_train_end")

    def run(self, callback: Any, outputs: Iterable[Any], work: Callable[[int], None] | None = None) -> None:
        self.begin(callback)
        for index, one in enumerate(outputs):
            self.step(one, None if work is None else lambda i=index: work(i))  # type: ignore[misc]
        self.end()

    def _all(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook, lambda _context: None)(self)

    def steps(self) -> list[dict[str, Any]]:
        return [one for one in read_jsonl(self.folder / "r/rank_0/scalars.jsonl") if "step" in one]

    def events(self) -> list[dict[str, Any]]:
        return [one for one in read_jsonl(self.folder / "r/rank_0/events.jsonl") if "kind" in one]

    def rows(self, probe: str) -> Iterator[dict[str, str]]:
        import csv

        for path in sorted((self.folder / "r/rank_0/tensors").glob(f"{probe}_step*.csv")):
            with path.open(newline="") as file:
                yield from csv.DictReader(file)


def outputs(loss: float = 2.0, norm: float | None = 1.5, squares: Any = (4.0, 9.0)) -> tuple[Any, ...]:
    """Seven, as the trainer's cell returns them."""
    total = None if norm is None else tensor([norm])
    return (tensor([loss]), Tensor(False), tensor(8.0), tensor(0.25), total, tensor(squares), (12, 12))


def tensor(value: Any) -> Tensor:
    return Tensor(np.array(value, np.float32))


def fill(target: Parameter, values: Any) -> None:
    target.set_data(Tensor(np.array(values, np.float32)))


assert mindspore.get_context("device_target") == "CPU"
