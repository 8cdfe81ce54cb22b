"""Trains a tiny model with MindFormers' PyNative trainer, watched by trainmon.

    python train.py train.yaml

REGISTER_PATH tells MindFormers where ``auto_register`` finds modules. It is set below; with ``run_mindformer.py`` in the
environment or by ``--register_path``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mindspore
import mindspore.dataset
import numpy as np
import yaml
from mindformers.pynative.trainer.trainer import Trainer
from mindspore import Parameter, Tensor, nn, ops

import trainmon

WORDS, WIDTH, LENGTH, LAYERS = 61, 16, 12, 2


class Numbers(SimpleNamespace):
    """Of a model; what it has not is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Layer(nn.Cell):  # type: ignore[misc, unused-ignore]
    def __init__(self, random: Any) -> None:
        super().__init__()
        self.up = Parameter(Tensor(random.normal(0, 0.2, (WIDTH, 2 * WIDTH)), mindspore.float32))
        self.down = Parameter(Tensor(random.normal(0, 0.2, (2 * WIDTH, WIDTH)), mindspore.float32))

    def construct(self, h: Any) -> Any:
        return h + ops.matmul(ops.gelu(ops.matmul(h, self.up)), self.down)


class Tiny(nn.Cell):  # type: ignore[misc, unused-ignore]
    """What the trainer asks of a model: to be called with a batch, and the three methods at the end."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        self.words = Parameter(Tensor(random.normal(0, 0.2, (WORDS, WIDTH)), mindspore.float32))
        self.layers = nn.CellList([Layer(random) for _ in range(LAYERS)])

    def construct(self, input_ids: Any, labels: Any) -> Any:
        h = ops.matmul(ops.one_hot(input_ids, WORDS).astype(mindspore.float32), self.words)
        for layer in self.layers:
            h = layer(h)
        logits = ops.matmul(h, self.words.T)
        return {"loss": ops.cross_entropy(logits.reshape((-1, WORDS)), labels.reshape((-1,)))}

    def to_empty(self, *_device: Any, **_more: Any) -> None:
        """Its parameters are there already."""

    def init_states(self, *_given: Any, **_more: Any) -> None:
        """They have values, too."""

    def get_gpt_transformer_config(self) -> Numbers:
        """For the host's count of operations."""
        return Numbers(
            num_layers=LAYERS,
            hidden_size=WIDTH,
            ffn_hidden_size=2 * WIDTH,
            seq_length=LENGTH,
            num_attention_heads=1,
            num_query_groups=1,
            kv_channels=WIDTH,
            vocab_size=WORDS,
            padded_vocab_size=WORDS,
            mtp_num_layers=0,
            multi_latent_attention=False,
            group_query_attention=False,
            gated_linear_unit=False,
        )


def counting() -> Iterator[tuple[Any, Any]]:
    """Sequences that count on from a random word."""
    random = np.random.default_rng(1)
    for start in random.integers(0, WORDS, 160):
        row = ((np.arange(LENGTH + 1) + start) % WORDS).astype(np.int32)
        yield row[:-1], row[1:]


def main(file: str) -> None:
    os.environ.setdefault("REGISTER_PATH", trainmon.register_path())
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with open(file) as text:
        config = yaml.safe_load(text)
    config["training"]["steps"] = int(os.environ.get("STEPS", config["training"]["steps"]))
    data = mindspore.dataset.GeneratorDataset(list(counting()), ["input_ids", "labels"], shuffle=False)
    batches = data.batch(config["training"]["local_batch_size"], drop_remainder=True)
    Trainer(config=config, model=Tiny(), train_dataset=batches).train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "train.yaml"))
