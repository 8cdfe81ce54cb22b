"""Would these gradients survive a cast to 8 or 16 bits, and which loss scale would save them?

python examples/ops/histograms.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
gradients = [
    (rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, -3, shape)).astype(np.float32)
    for shape in ((1000, 64), (64, 256))
]

histogram = trainmon.exponent_histogram(gradients)
seen = np.flatnonzero(histogram.counts)
median = np.searchsorted(histogram.counts.cumsum(), histogram.nonzero / 2)
print(
    f"{histogram.n} elements, magnitudes from 2^{seen[0] - 127} to 2^{seen[-1] - 126}, half below 2^{median - 126}"
)

# The fraction of elements that a cast turns into zero, or takes beyond the format's range.
for scale in (1.0, 2.0**10, 2.0**20):
    for name, losses in trainmon.underflow_shares(gradients, scale=scale).items():
        print(
            f"scale 2^{int(np.log2(scale)):<2} {name:<6} {losses.underflow:7.2%} lost {losses.overflow:7.2%} too large"
        )

# Counts of ranks, steps and tensors add up.
each = trainmon.exponent_histogram(gradients, per_tensor=True)
total = np.sum([part.state for part in each], axis=0)
assert (trainmon.ExponentHistogram.from_state(total).state == histogram.state).all()
