"""Fully sharded training (FSDP2), watched: every rank holds a shard of each parameter, and its own data.

torchrun --standalone --nproc-per-node 2 examples/parallel/fsdp2.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as distributed
from text import STEPS, finish_step, make_data, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainmon


def main(output: str) -> None:
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = make_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = make_data(share=distributed.get_rank())
    # The norms are those of the whole model: every shard counts once.
    with trainmon.attach(model, optimizer, total_steps=STEPS, output_dir=output, run_name="fsdp2") as mon:
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
