"""``python -m benchmarks [--quick]``: all benchmarks, written to benchmarks/RESULTS.md with the machine described."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import trainmon
from benchmarks import (
    attention,
    compare,
    detectors,
    differences,
    fingerprints,
    histograms,
    losses,
    moe,
    overhead,
    reductions,
    rows,
    sinks,
    spectral,
    staging,
)
from trainmon.ops import build_info, cpu_info

# Title and measure(quick) of each kernel family, in the order of docs/kernels.md.
FAMILIES: list[tuple[str, Callable[[bool], list[Any]]]] = [
    ("Statistics, norms, scan", reductions.measure),
    ("Exponents and losses of casts", histograms.measure),
    ("Differences", differences.measure),
    ("Fingerprints", fingerprints.measure),
    ("Staging", staging.measure),
    ("Token-weighted loss", losses.measure),
    ("Mixture of experts", moe.measure),
    ("Spike detectors", detectors.measure),
    ("Attention logits", attention.measure),
    ("Stable rank", spectral.measure),
    ("Comparison of two lists", compare.measure),
    ("Rows of CSV and JSON", rows.measure),
    ("Outputs", sinks.measure),
]

RESULTS = Path(__file__).with_name("RESULTS.md")


def machine() -> str:
    """Processor, cores, versions; what a reader needs to compare figures."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu, build = cpu_info(), build_info()
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {platform.machine()}; tier "
        f"{cpu['tier']}; "
        f"{build['compiler']}; Python {platform.python_version()}, NumPy {np.__version__}, "
        f"trainmon {trainmon.__version__}"
    )


def table(rows: list[Any]) -> str:
    """Rows of measure, value, mark and whether it holds."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = [f"| {row.measure} | {row.value} | {row.mark} | {words[row.holds]} |" for row in rows]
    return "\n".join(["| measure | value | mark | holds |", "| --- | --- | --- | --- |", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; prints, writes nothing"
    )
    options = parser.parse_args()
    kernels = "\n\n".join(f"### {title}\n\n{table(measure(options.quick))}" for title, measure in FAMILIES)
    overhead_rows = overhead.measure(options.quick)
    text = f"""# Benchmarks

Written by `make bench` on {datetime.date.today().isoformat()}. Machine: {machine()}.
Competitors run on the same input in the same run; "read" is a plain prefetching read of the same bytes.

## Kernels

{kernels}

## Cost of a training step

{table(overhead_rows)}
"""
    print(text)
    if not options.quick:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
