"""One digest for a tensor, however it is sharded; and what a changed bit does to it.

python examples/ops/fingerprints.py
"""

import tempfile
from functools import reduce
from operator import xor
from pathlib import Path

import numpy as np

import trainmon

weights = np.random.default_rng(0).standard_normal((256, 1000), dtype=np.float32)
(whole,) = trainmon.fingerprint(weights)
print(whole)

# Four ranks hold columns, four others hold rows. Each prints its own shard; XOR puts them together, in any order.
columns = np.split(weights, 4, axis=1)
rows = np.split(weights, 4, axis=0)
by_column = trainmon.fingerprint(columns, [(weights.shape, (0, 250 * rank)) for rank in range(4)])
by_row = trainmon.fingerprint(rows, [(weights.shape, (64 * rank, 0)) for rank in range(4)])
assert reduce(xor, by_column) == reduce(xor, reversed(by_row)) == whole
print("4 column shards, 4 row shards and the whole agree")

damaged = weights.copy()
damaged.view(np.uint32)[17, 3] ^= 1  # the last bit of one element
(other,) = trainmon.fingerprint(damaged)
assert other != whole
print("one flipped bit: ", other)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "weights.bin"
    path.write_bytes(weights.tobytes())
    print("the file:", trainmon.file_digest(path))
    assert trainmon.file_digest(path).endswith(whole.hex)  # the same bytes, the same polynomial
