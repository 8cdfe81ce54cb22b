"""The extension that the other tests run on was built whole: every tier of this machine, OpenBLAS, one version."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainmon

CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPUINFO.exists(), reason="reads what Linux says of the processor")
def test_the_best_tier_of_this_machine_runs() -> None:
    lines = [
        line.split() for line in CPUINFO.read_text(encoding="ascii").splitlines() if line.startswith("flags")
    ]
    flags = set(lines[0]) if lines else set()
    expected = "baseline"
    if {"avx2", "fma", "f16c"} <= flags:
        expected = "avx2"
        if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= flags:
            expected = "avx512"
    environment = {name: value for name, value in os.environ.items() if name != "TRAINMON_CPU"}
    code = "import json, trainmon; print(json.dumps(trainmon.cpu_info()))"
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    info = json.loads(answer.stdout)
    assert info["tier"] == expected
    assert set(info["families"].values()) == {expected}


def test_blas_is_linked_and_computes() -> None:
    assert trainmon.build_info()["blas"]["works"] is True


def test_the_version_has_one_source() -> None:
    assert trainmon.__version__ == importlib.metadata.version("trainmon")
