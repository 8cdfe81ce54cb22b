"""Trains a tiny Llama with MindFormers' GRAPH trainer on a CPU, watched by trainmon.

    python train.py train.yaml

REGISTER_PATH tells MindFormers where ``auto_register`` finds modules. It is set below; with ``run_mindformer.py`` in the
environment or by ``--register_path``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import mindspore.dataset
import numpy as np
from mindformers import MindFormerConfig, MindFormerModuleType, MindFormerRegister, Trainer, build_context
from mindformers.wrapper.wrapper import MFTrainOneStepCell

import trainmon

BATCH, LENGTH, WORDS = 2, 16, 61


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)  # type: ignore[untyped-decorator, unused-ignore]
class CpuTrainOneStepCell(MFTrainOneStepCell):  # type: ignore[misc, unused-ignore]
    """The stock cell but for its overflow check, whose operators only Ascend has."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.ascend_910b_target, self.enable_allfinite = True, False


def counting(steps: int) -> Iterator[tuple[Any]]:
    """Sequences that count on from a random word."""
    random = np.random.default_rng(0)
    for start in random.integers(3, 64, steps * BATCH):
        yield (((np.arange(LENGTH + 1) + start) % WORDS + 3).astype(np.int32),)


def data(steps: int) -> Any:
    source = mindspore.dataset.GeneratorDataset(lambda: counting(steps), ["input_ids"], shuffle=False)
    return source.batch(BATCH, drop_remainder=True)


def trainer(config: Any, steps: int, callbacks: Any = None) -> Any:
    """A trainer of the configuration's model; ``callbacks`` come behind those of the YAML."""
    build_context(config)
    return Trainer(config, task="text_generation", train_dataset=data(steps), callbacks=callbacks)


if __name__ == "__main__":
    os.environ.setdefault("REGISTER_PATH", trainmon.register_path())
    file = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "train.yaml")
    trainer(MindFormerConfig(file), steps=int(os.environ.get("STEPS", "20"))).train()
