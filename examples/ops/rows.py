"""A table of per-tensor values as CSV and as JSON Lines, read back without losing a bit.

python examples/ops/rows.py
"""

import csv
import io
import json

import numpy as np

import trainmon

rng = np.random.default_rng(0)
tensors = {name: rng.standard_normal(1000).astype(np.float32) for name in ("embed", "head,tied", "norm")}
stats = trainmon.finish_stats(trainmon.tensor_stats(tensors.values()))
table = {"name": list(tensors), "norm": stats["norm"], "max": stats["max"], "n": stats["n"]}
known = {"max": np.array([True, True, False])}  # null: an empty cell, null in JSON

text = trainmon.csv_rows(table, known, header=True)
print(text.decode())
print(trainmon.json_rows(table, known).decode())

rows = list(csv.DictReader(io.StringIO(text.decode(), newline="")))
assert [float(row["norm"]) for row in rows] == stats["norm"].tolist()
records = [json.loads(line) for line in trainmon.json_rows(table, known).splitlines()]
assert [record["norm"] for record in records] == stats["norm"].tolist()
