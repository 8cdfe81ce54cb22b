"""``python -m benchmarks [--quick] [kernels] [overhead] [msprobe]``: written to RESULTS.md, OVERHEAD.md and MSPROBE.md in
this folder, with the machine described."""

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
    hyperparallel,
    losses,
    moe,
    overhead,
    reductions,
    rows,
    signs,
    sinks,
    spectral,
    staging,
    vs_msprobe,
)
from trainmon.ops import build_info, cpu_info

# Title and measure(quick) of each kernel family, in the order of docs/kernels.md.
FAMILIES: list[tuple[str, Callable[[bool], list[Any]]]] = [
    ("Statistics, norms, scan", reductions.measure),
    ("Exponents and losses of casts", histograms.measure),
    ("Differences", differences.measure),
    ("Agreement of signs", signs.measure),
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


def kernels(quick: bool) -> str:
    """The page of all kernel families."""
    families = "\n\n".join(f"## {title}\n\n{table(measure(quick))}" for title, measure in FAMILIES)
    return f"""# Kernels

{written()}
Competitors run on the same input in the same run; "read" is a plain prefetching read of the same bytes.

{families}
"""


def step_cost(quick: bool) -> str:
    """The page of what a training step costs with a monitor."""
    return f"""# Cost of a training step

{written()}
What the arms are and how they are measured: `benchmarks/overhead.py`.

{table(overhead.measure(quick))}

## HyperParallel

On fakes of its trainers: `benchmarks/hyperparallel.py`.

{table(hyperparallel.measure(quick))}
"""


def against_msprobe(quick: bool) -> str:
    """The page of what the drop-in costs beside msProbe's Monitor V2."""
    return f"""# The drop-in beside msProbe's Monitor V2

{written()}
What the arms are and how they are measured: `benchmarks/vs_msprobe.py`.

{table(vs_msprobe.measure(quick))}
"""


def written() -> str:
    """When and where."""
    return f"Written by `make bench` on {datetime.date.today().isoformat()}. Machine: {machine()}."


PARTS = {
    "kernels": (kernels, "RESULTS.md"),
    "overhead": (step_cost, "OVERHEAD.md"),
    "msprobe": (against_msprobe, "MSPROBE.md"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"{' or '.join(PARTS)}; all if none is named")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; prints, writes nothing"
    )
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"unknown part {name!r}")
    for name in options.parts or PARTS:
        make, page = PARTS[name]
        text = make(options.quick)
        print(text, flush=True)
        if not options.quick:
            Path(__file__).with_name(page).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
