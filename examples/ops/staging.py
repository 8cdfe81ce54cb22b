"""Tensors copied into one shared arena for a writer, their statistics and fingerprints taken in the same read.

python examples/ops/staging.py
"""

import mmap

import numpy as np

import trainmon

rng = np.random.default_rng(0)
state = {
    "weight": rng.standard_normal((512, 300), dtype=np.float32),
    "momentum": rng.standard_normal((300, 512)).T,
    "steps": np.arange(7, dtype=np.int64),
}
arena = mmap.mmap(-1, trainmon.stage_size(state.values()))  # memory that a child process would share
staged = trainmon.stage(state.values(), arena, names=state)

state["weight"] += 1  # training goes on; the staged copy doesn't
norms = trainmon.finish_stats(staged.stats)["norm"]
for name, view, offset, print_, norm in zip(
    state, staged.views, staged.offsets, staged.fingerprints, norms, strict=True
):
    print(f"{name:<8} {view.dtype!s:<7} {view.shape!s:<10} at {offset:>7}  norm {norm:8.2f}  {print_.hex}")

# What the writer gets is what was described.
assert trainmon.fingerprint(staged.views) == staged.fingerprints
assert (trainmon.tensor_stats(staged.views) == staged.stats).all()
assert np.array_equal(staged.views[1], state["momentum"])
