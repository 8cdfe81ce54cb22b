"""Tensor parallel training, watched: the perceptrons' matrices are cut, everything else is on every rank, all fed alike.

torchrun --standalone --nproc-per-node 2 examples/parallel/tensor_parallel.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as distributed
from text import STEPS, finish_step, make_data, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trainmon


def main(output: str) -> None:
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = make_model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = make_data(share=0)
    # All ranks see the same tokens: one of them counts them.
    counts = distributed.get_rank() == 0
    with trainmon.attach(
        model, optimizer, total_steps=STEPS, output_dir=output, run_name="tp", counts_tokens=counts
    ) as mon:
        for _ in range(STEPS):
            with mon.data_wait():
                batch = data.next_batch()
            loss = model.loss(batch.inputs, batch.targets)
            loss.backward()
            # torch doesn't clip plain tensors and DTensors together.
            finish_step(mon, model, optimizer, loss, batch.tokens, clip=None)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
