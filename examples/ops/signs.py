"""Whether gradients go the way of the momentum that they join, and what signs are worth in bfloat16.

python examples/ops/signs.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
slope = [rng.standard_normal(shape, dtype=np.float32) for shape in ((1000, 64), (64, 10))]
momentum = [np.zeros_like(one) for one in slope]

# Each gradient is the true slope and noise of the same size; momentum averages the noise away, and the signs of a
# gradient agree with it more and more often: at best where slope and noise point the same way or the slope is larger.
shares = []
for _step in range(12):
    gradients = [one + rng.standard_normal(one.shape, dtype=np.float32) for one in slope]
    shares.append(trainmon.sign_agreement(gradients, momentum).share)
    for average, gradient in zip(momentum, gradients, strict=True):
        average += 0.2 * (gradient - average)
print("agreement by step:", np.round(shares, 3).tolist())
assert shares[0] == 0.5, "zeros have no sign"
assert 0.6 < shares[1] < shares[-1] < 0.75

# Counts add: tensors, pieces, ranks. Dtypes may differ.
halves = [one.astype(np.float16) for one in slope]
whole = trainmon.sign_agreement(halves, momentum)
parts = [trainmon.sign_agreement(half, average) for half, average in zip(halves, momentum, strict=True)]
assert parts[0] + parts[1] == whole
print(f"of the slope itself: {whole.same} the same way, {whole.opposite} against, of {whole.n}")
