"""One micro-batch's own gradient, and an optimizer's update, as differences between a tensor and a copy of it.

python examples/ops/differences.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
shapes = {"embed": (1000, 64), "head": (64, 10)}
micro_batches = [[rng.standard_normal(shape) for shape in shapes.values()] for _ in range(3)]

# Gradients pile up over the micro-batches; only their sum can be seen. A copy, brought up to date in the read that
# measures it, gives each micro-batch's own norm.
accumulated = [np.zeros(shape, np.float32) for shape in shapes.values()]
copies = [np.zeros(shape, np.float32) for shape in shapes.values()]
for number, gradients in enumerate(micro_batches):
    for total, gradient in zip(accumulated, gradients, strict=True):
        total += gradient
    moved = trainmon.diff_norm(accumulated, copies, update=True, per_tensor=True)
    assert moved.each is not None
    own = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
    assert abs(moved.norm / own - 1) < 1e-5
    print(
        f"micro-batch {number}: norm {moved.norm:.3f}",
        dict(zip(shapes, moved.each.norm.round(3).tolist(), strict=True)),
    )

# A step of the optimizer: how far the weights went, relative to their size, and which share did not move at all.
weights = [rng.standard_normal(shape).astype(np.float16) for shape in shapes.values()]
before = [weight.copy() for weight in weights]
for weight, gradient in zip(weights, accumulated, strict=True):
    weight -= (1e-4 * gradient).astype(np.float16)
update = trainmon.diff_norm(weights, before)
print(f"update/norm {update.norm:.4f}, update/ratio {update.ratio:.2e}, unchanged {update.unchanged:.1%}")
assert 0 < update.unchanged < 1  # float16 loses what is smaller than half a unit in the last place
