"""The recorded cases, runs of them, and how trees of tables compare."""

from __future__ import annotations

import csv
import functools
import io
import json
import logging
import math
import os
import struct
import sys
import tarfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "goldens"
OPS = ("min", "max", "mean", "norm", "nans")

Tree = dict[str, bytes]
Rows = list[list[str]]
Key = tuple[Any, ...]


@functools.cache
def recordings() -> dict[str, dict[str, bytes]]:
    """By case, file contents by path: ``case.json``, ``expected/...``, ``true/...``."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(HERE / "cases.tar.xz") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                name, _, path = member.name.removeprefix("./").partition("/")
                found.setdefault(name, {})[path] = content.read()
    return found


def info(name: str) -> dict[str, Any]:
    """What was run, and what happened."""
    loaded: dict[str, Any] = json.loads(recordings()[name]["case.json"])
    return loaded


def recorded(name: str, kind: str) -> Tree:
    """Tables by path: ``expected`` are msProbe's, ``true`` exact."""
    start = kind + "/"
    return {
        path.removeprefix(start): data for path, data in recordings()[name].items() if path.startswith(start)
    }


def tree(directory: str | Path) -> Tree:
    """Tables below a directory by path."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(Path(directory).rglob("*.csv"))
    }


def rows(data: bytes) -> Rows:
    return list(csv.reader(io.StringIO(data.decode(), newline="")))


def dicts(data: bytes) -> list[dict[str, str]]:
    """Rows by column."""
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def identities(table: Rows) -> list[Key]:
    """What a row is about, and which of several about the same."""
    places = [at for at, name in enumerate(table[0]) if name not in OPS]
    seen: Counter[Key] = Counter()
    found: list[Key] = []
    for row in table[1:]:
        key = tuple(row[at] for at in places)
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def cells(data: bytes) -> dict[Key, dict[str, str]]:
    """Statistics as texts by row."""
    table = rows(data)
    found = [{name: row[at] for at, name in enumerate(table[0]) if name in OPS} for row in table[1:]]
    return dict(zip(identities(table), found, strict=True))


def float32_text(text: str) -> str:
    """A number as msProbe prints it: as float32 holds it."""
    value = float(text)
    try:
        return repr(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return repr(math.copysign(math.inf, value))


def same_number(got: str, want: str, name: str, others: dict[str, str]) -> bool:
    """Extremes and counts exactly, mean and norm to 1e-12 of the row's largest magnitude."""
    a, b = float(got), float(want)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    sizes = [abs(float(text)) for key, text in others.items() if key != "nans"]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return name in ("mean", "norm") and abs(a - b) <= 1e-12 * largest


def run(names: list[str], root: str) -> dict[str, dict[str, Any]]:
    """Runs cases under ``Reference`` and in all modes in this process, each rank of it; tables go to
    ``<root>/<case>/<mode>``.

    Returns:
        What the driver returns, by ``<case>/<mode>``.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("trainmon.msprobe").setLevel(logging.CRITICAL)
    sys.path.insert(0, str(HERE))
    import models  # type: ignore[import-not-found]
    import torch.distributed as distributed
    from truth import Reference  # type: ignore[import-not-found]

    from tests.msprobe.more import CASES
    from trainmon.msprobe import TrainerMonitorV2

    def made(path: str, mode: str) -> Any:
        if mode == "reference":
            return Reference(path)
        config = json.loads(Path(path).read_text())
        more = {"v2": {"compat": "msprobe-v2"}, "extended": {"extended": True}}.get(mode, {})
        return TrainerMonitorV2({**config, **more})

    found = {}
    for name in names:
        case = models.CASES.get(name) or CASES[name]
        for mode in ("reference", "v2", "default", "extended"):
            out = os.path.join(root, name, mode)
            os.makedirs(out, exist_ok=True)
            if distributed.is_initialized():
                distributed.barrier()
            found[f"{name}/{mode}"] = models.run_case(case, lambda path, mode=mode: made(path, mode), out)
    return found


if __name__ == "__main__":
    result = run(sys.argv[3:], sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(result))
