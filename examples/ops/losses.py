"""Loss per token over micro-batches of different lengths and over ranks, exactly; and what averaging means gets wrong.

python examples/ops/losses.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
ranks = []
for _ in range(4):
    accumulator = trainmon.LossAccumulator(buckets=4)
    for _ in range(3):  # micro-batches of [sequences, positions]; the mask is 0 for padding
        losses = rng.exponential(2.0, (2, 512)).astype(np.float32)
        lengths = rng.integers(50, 512, 2)
        mask = np.arange(512) < lengths[:, None]
        losses[~mask] = np.nan  # never looked at
        accumulator.add(losses, mask, buckets=trainmon.position_buckets(512, 4))
    ranks.append(accumulator)

# One all-reduce (here a plain sum) merges all ranks; any number of ranks gives the same bits.
total = trainmon.LossAccumulator.from_state(np.sum([rank.state.astype(np.float64) for rank in ranks], axis=0))
print(f"loss {total.mean:.6f} over {total.tokens} tokens, {total.masked} masked")
print(f"mean of the {total.pairs} micro-batch means {total.mean_of_means:.6f}, gap {total.gap:+.6f}")
for number, mean in enumerate(total.bucket_means):
    print(f"  positions {128 * number:>3} to {128 * number + 127:>3}: {mean:.4f}")

merged = trainmon.LossAccumulator(buckets=4)
for rank in reversed(ranks):
    merged.merge(rank)
assert merged.mean == total.mean
