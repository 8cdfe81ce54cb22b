"""Statistics, norms and the first non-finite element of a model's gradients, each in one read.

python examples/ops/reductions.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
gradients = {
    "embed": rng.standard_normal((1000, 64)),
    "head": rng.standard_normal((64, 10)).astype(np.float32),
}
total, each = trainmon.multi_norm(gradients.values(), per_tensor=True)
print(f"global norm {total:.3f}")
for name, norm in zip(gradients, each, strict=True):
    print(f"  {name:<6} {norm:.3f}")

gradients["head"][3, 7] = np.inf
found = trainmon.scan_nonfinite(gradients.values(), names=gradients.keys())
assert found is not None
print(f"first non-finite element: {found.kind} in {found.name} at flat index {found.index}")

records = trainmon.tensor_stats(gradients.values())
finite = trainmon.finish_stats(records, reading="finite")
print("finite elements:", {name: int(n) for name, n in zip(gradients, finite["n"], strict=True)})
