"""Stable rank of weights while they train: a certified interval a step, few reads once the state is warm.

python examples/ops/spectral.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
# A weight whose leading direction grows, a stack of experts, a vector: as a list, in the layout they have.
weight = rng.standard_normal((640, 512)).astype(np.float32) / 32
left, right = rng.standard_normal(640) / 640**0.5, rng.standard_normal(512) / 512**0.5
experts = rng.standard_normal((4, 300, 400)).astype(np.float16)
bias = rng.standard_normal(512).astype(np.float32)

state = None
for step in range(4):
    grown = weight + (step * np.outer(left, right)).astype(np.float32)
    results, state = trainmon.stable_rank([grown, experts, bias], state)
    first = results[0]
    print(
        f"step {step}: stable rank {first.low:.2f} to {first.high:.2f}, largest singular value {first.sigma:.3f}, "
        f"{first.passes} reads, stopped by {first.stopped_by}"
    )
    exact = np.linalg.norm(grown) ** 2 / np.linalg.norm(grown, 2) ** 2
    assert first.low <= exact <= first.high * (1 + 1e-5)
assert len(results) == 1 + 4 + 1  # one a matrix, each expert its own
assert results[-1].stable_rank == 1.0

# Ranks that hold rows of one matrix: without another read, an interval that is wider but right.
shards, _ = trainmon.stable_rank([grown[:320], grown[320:]])
whole = trainmon.merge_spectral(shards)
print(f"from two shards: {whole.low:.2f} to {whole.high:.2f}")
assert whole.low <= exact <= whole.high * (1 + 1e-5)
