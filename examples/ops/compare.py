"""Two checkpoints of one model: are they the same, where do they part first, and is it rounding or a bug.

python examples/ops/compare.py
"""

import numpy as np

import trainmon

rng = np.random.default_rng(0)
names = ["embedding", "layers.0.weight", "layers.0.bias", "head"]
reference = [
    rng.standard_normal(shape).astype(np.float32) for shape in ((1000, 64), (64, 256), (256,), (256, 10))
]

# A bias that lost its last bits in a sum with something large: differences of rounding.
rounded = [(w + np.float32(1e3)) - np.float32(1e3) if w.ndim == 1 else w.copy() for w in reference]
print(trainmon.compare(rounded, reference), "\n")

# One layer transposed by mistake, one element lost.
broken = [w.copy() for w in reference]
broken[1] = np.ascontiguousarray(reference[1].reshape(256, 64).T)
broken[3][7, 1] = np.nan
found = trainmon.compare(broken, reference)
print(found, "\n")
assert found.first_difference is not None
print(f"first in {names[found.first_difference.tensor]}")
assert found.n_nan_a == 1
assert not found.nonfinite_agree

# Each tensor has its record; records of parts and ranks add up to the same numbers.
for name, record in zip(names, found.records, strict=True):
    print(
        f"{name:>16}: cosine {record['cosine']:+.4f}, {record['n'] - record['n_identical']} of {record['n']} differ"
    )
assert trainmon.Comparison.merge(found.records).max_abs == found.max_abs

# Against bfloat16, distances are steps of bfloat16: 1 at most for values that were only cut.
low = [(w.view(np.uint32) >> 16).astype(np.uint16) for w in reference]
cut = trainmon.compare([(w, "bf16") for w in low], reference)
steps = {f"up to {2**k - 1}": int(cut.ulp[k]) for k in range(3)}
print(f"cut to bfloat16: distances {steps}, largest relative error {cut.max_rel:.2g}")
assert cut.max_ulp == 1
