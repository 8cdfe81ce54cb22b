"""Data parallel training, watched: every rank has the whole model and its own data.

torchrun --standalone --nproc-per-node 2 examples/parallel/ddp.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as distributed
from text import STEPS, finish_step, make_data, make_model
from torch.nn.parallel import DistributedDataParallel

import trainmon


def main(output: str) -> None:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = make_data(share=distributed.get_rank())
    # After the model has been wrapped, on every rank; rank 0 writes the numbers of all.
    with trainmon.attach(model, optimizer, total_steps=STEPS, output_dir=output, run_name="ddp") as mon:
        for _ in range(STEPS):
            with mon.data_wait():
                batch = data.next_batch()
            logits = model(batch.inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            loss.backward()
            finish_step(mon, model, optimizer, loss, batch.tokens)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
