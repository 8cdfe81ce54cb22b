"""Attention logits of one layer over micro-batches, heads split over two ranks, keys split over two ranks; QK-clip.

python examples/ops/attention.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
heads, key_heads, length, depth = 8, 2, 600, 64
temper = np.linspace(0.5, 40, heads, dtype=np.float32)[:, None, None]  # the last heads saturate


def layer() -> tuple[np.ndarray, np.ndarray]:
    q = temper * rng.standard_normal((2, heads, length, depth), dtype=np.float32)
    return q, rng.standard_normal((2, key_heads, length, depth), dtype=np.float32)


# Micro-batches (and data-parallel ranks) merge by `merge`, shards of the heads by `cat`.
total = None
for _ in range(3):
    q, k = layer()
    lengths = rng.integers(200, length, 2)  # padded sequences
    ranks = [
        trainmon.attention_logits(q[:, 4 * r : 4 * r + 4], k[:, r : r + 1], q_mask=lengths, k_mask=lengths)
        for r in range(2)
    ]
    micro = trainmon.AttentionLogits.cat(ranks)
    total = micro if total is None else total.merge(micro)

print(" head   max logit   mean_sum  normalised  mean of largest probability")
for head in range(heads):
    print(
        f"{head:>5}  {total.max[head]:>10.2f} {total.mean_sum[head]:>10.3f}  {total.mean_sum_norm[head]:>10.4f}"
        f"  {total.attn_prob_max_mean[head]:>10.4f}"
    )

clip = trainmon.qk_clip(total, tau=100)
print(f"QK-clip at 100: {clip.share:.0%} of the heads, smallest factor {clip.gamma.min():.3f}")

# Keys split over two ranks: rows first, then sums.
whole = trainmon.attention_logits(q, k)
parts = [
    trainmon.attention_logits(q, k[:, :, a : a + 300], q_start=0, k_start=a, per_row=True)[1]
    for a in (0, 300)
]
split = trainmon.merge_key_splits(parts).logits()
assert np.allclose(split.mean_sum, whole.mean_sum, rtol=1e-5)
assert np.allclose(split.max, whole.max, rtol=1e-5)

# 50 of 600 rows: a lower bound of the maximum, an estimate of the mean; the mean logit needs no scores at all.
few = trainmon.attention_logits(q, k, sample_rows=50, seed=1)
print(
    f"sampled {few.sampled[0]:.0%}: mean_sum {few.mean_sum[0]:.1f} +- {few.mean_sum_error[0]:.1f}, "
    f"all: {whole.mean_sum[0]:.1f}"
)
assert (few.max <= whole.max + 1e-3).all()
sum_z, keys = trainmon.attention_logit_mean(q, k)
assert np.allclose(sum_z / keys, whole.logit_mean)
