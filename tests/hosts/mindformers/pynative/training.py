"""A process that trains with MindFormers' PyNative trainer, once for each scenario of a JSON list, and leaves what NumPy
makes of copies of its gradients and weights.

``python -m tests.hosts.mindformers.pynative.training scenarios.json``, in a folder of its own. Keys of a scenario are
those of :class:`Scenario`; it leaves ``<name>.json`` and what trainmon writes to ``<name>/``, and prints
``=== <name>`` before it begins.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.mindformers.pynative import hyper_parallel, operators
from tests.hosts.mindformers.pynative.scenarios import LENGTH, VOCABULARY, sequences

hyper_parallel.install()

import mindspore  # noqa: E402
import mindspore.dataset  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

operators.install()

import mindformers  # noqa: E402
from mindformers.pynative.trainer.trainer import Trainer  # noqa: E402

VERSION = mindformers.__version__
#: Since 2.1.0 a batch of the data is a micro-batch, before it is that of a whole step.
BATCH_IS_MICRO = not VERSION.startswith(("1.", "2.0."))
WIDTH, EXPERTS = 8, 4
#: Sequences of a step, and of all data.
BATCH, SEQUENCES = 4, 16


@dataclass
class Scenario:
    """One training.

    Attributes:
        host: sections of the host's configuration, joined key by key with the usual ones.
        entry: keys of the entry TrainMonitor; None: there is no such entry. ``auto_register: None``: the name is known by
            importing the adapter.
        api: keys of a PyNativeMonitor that is given in code.
        model: keys of :class:`Tiny`.
        raises: the step at whose end a callback behind ours raises.
        dies: lets what it raises end the process.
        load: a checkpoint to go on from.
        broken: what of trainmon raises: ``module:name`` or ``module:class.name``.
        logits_monitor: the host's MaxLogitsMonitor is there, too, every so many steps.
        plain: trains by ``mindspore.train.Model`` instead, with batches of a whole step.
    """

    name: str
    host: dict[str, Any] = field(default_factory=dict)
    entry: dict[str, Any] | None = None
    api: dict[str, Any] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    raises: int = 0
    dies: bool = False
    load: str | None = None
    broken: tuple[str, ...] = ()
    logits_monitor: int = 0
    plain: bool = False


class Numbers:
    """What the host's LossCallback reads of a model's configuration; what is not there is None."""

    def __init__(self, **numbers: Any) -> None:
        self.__dict__.update(numbers)

    def __deepcopy__(self, memo: Any) -> Numbers:
        return Numbers(**self.__dict__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Router(nn.Cell):
    """Each token goes to two experts, by its number; returns what the host's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.full((WIDTH,), 0.1), mindspore.float32), name="router.weight")

    def construct(self, h: Any, ids: Any) -> Any:
        chosen = ops.stack([ids % EXPERTS, (ids // 2) % EXPERTS], -1)
        counts = ops.one_hot(chosen.reshape(-1), EXPERTS).sum(0)
        return (h * self.weight).sum(-1), chosen, counts


class Experts(nn.Cell):
    """Counts tokens as the host's layers do."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        if routed:
            self.router = Router()
        self.tokens_per_expert = Parameter(
            Tensor(np.zeros(EXPERTS), mindspore.float32), name="tokens_per_expert", requires_grad=False
        )
        self.expert_bias = Parameter(
            Tensor([0.0, 0.1, -0.1, 0.2], mindspore.float32), name="expert_bias", requires_grad=False
        )

    def construct(self, h: Any, ids: Any) -> Any:
        if hasattr(self, "router"):
            score, _, counts = self.router(h, ids)
        else:
            score, counts = h.sum(-1), ops.one_hot(ids.reshape(-1) % EXPERTS, EXPERTS).sum(0)
        self.tokens_per_expert.copy_(self.tokens_per_expert + ops.stop_gradient(counts))
        return h * ops.sigmoid(score).expand_dims(-1)


class Layer(nn.Cell):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp = mlp

    def construct(self, h: Any, ids: Any) -> Any:
        return self.mlp(h, ids)


class Block(nn.Cell):
    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = nn.CellList(layers)

    def construct(self, h: Any, ids: Any) -> Any:
        for layer in self.layers:
            h = layer(h, ids)
        return h


class Tiny(nn.Cell):
    """A model of three matrices, and what a scenario adds to it.

    Args:
        dtype: of the parameters.
        experts: whether layers with experts stand in it: 0 without and 1 with a router, of which the first counts alone.
        idle: a parameter that takes no part.
        nan_at: the forward pass, from 1, whose loss is not a number.
        spike_at: that whose loss is a thousand times too large.
        result: how the loss is returned: ``tensor``, ``dict`` or ``tuple``.
        logits: keeps the largest attention logits.
    """

    def __init__(
        self,
        dtype: str = "float32",
        experts: bool = False,
        idle: bool = False,
        nan_at: int = 0,
        spike_at: int = 0,
        result: str = "tensor",
        logits: bool = False,
    ) -> None:
        super().__init__()
        mindspore.set_seed(3)
        random = np.random.RandomState(5)

        def matrix(name: str, *shape: int) -> Any:
            return Parameter(Tensor(random.randn(*shape) * 0.3, getattr(mindspore, dtype)), name=name)

        self.table = matrix("table", VOCABULARY, WIDTH)
        self.inner = matrix("inner", WIDTH, WIDTH)
        self.shift = matrix("shift", WIDTH)
        self.outer = matrix("outer", WIDTH, VOCABULARY)
        if idle:
            self.idle = matrix("idle", 3)
        self.decoder = Block([Layer(Experts(False)), Layer(Experts(True))] if experts else [])
        self.kept = Parameter(Tensor(np.zeros(2), mindspore.float32), name="kept", requires_grad=False)
        self.calls, self.nan_at, self.spike_at = 0, nan_at, spike_at
        self.result, self.logits = result, logits

    def construct(self, input_ids: Any, labels: Any) -> Any:
        self.calls += 1
        hot = ops.one_hot(input_ids, VOCABULARY).astype(self.table.dtype)
        h = ops.tanh(ops.matmul(ops.matmul(hot, self.table), self.inner) + self.shift)
        h = self.decoder(h, input_ids)
        logits = ops.matmul(h, self.outer.astype(h.dtype)).astype(mindspore.float32)
        loss = ops.cross_entropy(logits.reshape((-1, VOCABULARY)), labels.reshape((-1,)))
        if self.logits:
            top = Tensor([float(self.calls), -2.5], mindspore.float32)
            self.kept.copy_(ops.maximum(self.kept, top))
        if self.calls == self.nan_at:
            loss = loss * float("nan")
        if self.calls == self.spike_at:
            loss = loss * 1000.0
        return {"tensor": loss, "dict": {"loss": loss}, "tuple": (loss, logits)}[self.result]

    def to_empty(self, *_arguments: Any, **_keywords: Any) -> None:
        """It is there already."""

    def init_states(self, *_arguments: Any, **_keywords: Any) -> None:
        """It is there already."""

    def get_max_attention_logit(self) -> dict[str, Any]:
        return (
            {"decoder.layers.0.self_attention.core_attention.max_logits_val": self.kept}
            if self.logits
            else {}
        )

    def reset_max_attention_logit(self) -> None:
        self.kept.copy_(ops.zeros_like(self.kept))

    def get_gpt_transformer_config(self) -> Numbers:
        return Numbers(
            hidden_size=WIDTH,
            num_layers=1,
            num_attention_heads=2,
            vocab_size=VOCABULARY,
            padded_vocab_size=VOCABULARY,
            seq_length=LENGTH,
            ffn_hidden_size=WIDTH,
            kv_channels=4,
            num_query_groups=2,
            mtp_num_layers=0,
            multi_latent_attention=False,
            gated_linear_unit=False,
            swiglu=False,
            group_query_attention=False,
        )


def dataset(count: int, batch: int) -> Any:
    source = list(sequences(count))
    return mindspore.dataset.GeneratorDataset(source, ["input_ids", "labels"], shuffle=False).batch(batch)


class Truth:
    """What NumPy makes of copies, by hooks of its own; of gradients of micro-batches, and as the optimizer got them.

    Attributes:
        steps: one mapping a step.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, **given: Any) -> None:
        held = given["model"]
        self.model = held[0] if isinstance(held, list) else held
        given["optimizer"].register_forward_pre_hook(self._before_update)
        for parameter in self.model.trainable_params():
            parameter.register_hook(lambda gradient, name=parameter.name: self._micro(name, gradient))

    def _micro(self, name: str, gradient: Any) -> None:
        wide = gradient.float().asnumpy().astype(np.float64)
        self.micro.setdefault(name, []).append(wide)

    def _before_update(self, cell: Any, inputs: Any) -> None:
        self.clipped = norm(one.asnumpy() for one in inputs[0])
        self.rate = float(
            np.max(cell.get_lr().asnumpy() if not cell.is_group_lr else [cell.get_lr()[0].asnumpy()])
        )

    def on_step_begin(self, args: Any, state: Any, **given: Any) -> None:
        self.micro: dict[str, list[Any]] = {}
        self.clipped = self.rate = None

    def on_step_end(self, args: Any, state: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        weights = [one.float().asnumpy() for one in optimizer.parameters]
        self.steps.append(
            {
                "step": state.global_step,
                "loss": float(given["loss"].asnumpy()) if given["loss"] is not None else None,
                "grad_norm": None if given["grad_norm"] is None else float(given["grad_norm"].asnumpy()),
                "micro": {name: [norm([one]) for one in grads] for name, grads in self.micro.items()},
                "sums": {
                    name: [norm([np.sum(grads[: end + 1], axis=0)]) for end in range(len(grads))]
                    for name, grads in self.micro.items()
                },
                "device": norm(np.sum(grads, axis=0) for grads in self.micro.values()),
                "clipped": self.clipped,
                "rate": self.rate,
                "weights": norm(weights),
                "first_moment": norm(one.asnumpy() for one in optimizer.exp_avg),
                "second_moment": norm(one.asnumpy() for one in optimizer.exp_avg_sq),
                "samples": getattr(state, "consumed_samples", None),
            }
        )


class Raises:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, **given: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("a callback of the user")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *arguments, **keywords: None
        raise AttributeError(name)


for _name in ("on_train_end", "on_epoch_begin", "on_epoch_end"):
    setattr(Truth, _name, lambda self, *arguments, **keywords: None)


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(one, np.float64)).sum() for one in arrays)))


def configuration(scenario: Scenario) -> dict[str, Any]:
    found: dict[str, Any] = {
        "training": {"steps": 3, "local_batch_size": 2, "global_batch_size": 4, "max_norm": 0.1, "seed": 1},
        "checkpoint": {"enable_save": False},
        "optimizer": {"type": "AdamW", "weight_decay": 0.01},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 0.01, "warmup_steps": 2},
        "train_dataset": {"dataloader": {"type": "none"}},
        "model": {"model_type": "tiny", "architectures": "Tiny"},
        "context": {"device_target": "CPU"},
    }
    if VERSION.startswith("1."):
        found["training"] |= {"local_batch_size": 4}
        del found["training"]["max_norm"]
    for key, section in scenario.host.items():
        found[key] = {**found.get(key, {}), **section} if isinstance(section, dict) else section
    if scenario.entry is not None:
        entry = {"type": "TrainMonitor", "auto_register": "trainmon_mf.TrainMonitor", **scenario.entry}
        found["callbacks"] = [{key: value for key, value in entry.items() if value is not None}]
    if scenario.logits_monitor:
        found.setdefault("callbacks", []).append(
            {"type": "MaxLogitsMonitor", "step_interval": scenario.logits_monitor}
        )
    return found


def train(scenario: Scenario) -> dict[str, Any]:
    from trainmon.adapters.mindformers.pynative import PyNativeMonitor

    truth, model = Truth(), Tiny(**scenario.model)
    callbacks: list[Any] = [truth]
    if scenario.api is not None:
        callbacks.append(PyNativeMonitor({"output_dir": ".", "run_name": scenario.name, **scenario.api}))
    if scenario.raises:
        callbacks.append(Raises(scenario.raises))
    keys = configuration(scenario)
    batch = keys["training"]["local_batch_size"] if BATCH_IS_MICRO else BATCH
    data = dataset(SEQUENCES, batch)
    found: dict[str, Any] = {"version": VERSION, "steps": truth.steps}
    try:
        trainer = Trainer(config=keys, model=model, train_dataset=data, callbacks=callbacks)
        trainer.train(**({"checkpoint_path": scenario.load} if scenario.load else {}))
    except Exception as error:
        if scenario.dies:
            raise
        found["error"] = f"{type(error).__name__}: {error}"
    found["weights"] = {one.name: one.float().asnumpy().tolist() for one in model.get_parameters()}
    return found


def train_plainly(scenario: Scenario) -> dict[str, Any]:
    """The same model, data and optimizer, without clipping, by MindSpore's own loop."""
    from mindformers.pynative.optimizer.adamw import AdamW
    from mindspore.train import Model

    import trainmon

    class Loss(nn.Cell):
        def __init__(self, model: Any) -> None:
            super().__init__(auto_prefix=False)
            self.model = model

        def construct(self, ids: Any, labels: Any) -> Any:
            return self.model(ids, labels)

    model = Tiny(**scenario.model)
    optimizer = AdamW(model.trainable_params(), learning_rate=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    monitor = trainmon.MindSporeMonitor(
        {"output_dir": ".", "run_name": scenario.name, **(scenario.api or {})}
    )
    Model(nn.TrainOneStepCell(Loss(model), optimizer)).train(
        1, dataset(12, BATCH), callbacks=[monitor], dataset_sink_mode=False
    )
    return {"weights": {one.name: one.float().asnumpy().tolist() for one in model.get_parameters()}}


def break_down(places: tuple[str, ...]) -> Any:
    """What a place holds raises from now on; returns what puts it back."""

    def broken(*_arguments: Any, **_keywords: Any) -> Any:
        raise ArithmeticError("broken within")

    kept = []
    for place in places:
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(f"trainmon.adapters.mindformers.pynative.{module}")
        *above, name = path.split(".")
        for part in above:
            owner = getattr(owner, part)
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, broken)
    return lambda: [setattr(*one) for one in kept]


def main(file: Path) -> None:
    for keys in json.loads(file.read_text()):
        scenario = Scenario(**keys)
        print(f"=== {scenario.name}", flush=True)
        mend = break_down(scenario.broken)
        found = train_plainly(scenario) if scenario.plain else train(scenario)
        mend()
        Path(f"{scenario.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
