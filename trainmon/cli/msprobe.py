"""``trainmon msprobe <verb>``: what to do with the files of the drop-in and of msProbe's own monitors."""

from __future__ import annotations

import argparse
import json
import logging
import sqlite3
import sys

__all__ = ["add_verbs", "run_verb"]


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """What can be asked for."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    board = verbs.add_parser("tensorboard", help="tables as TensorBoard event files")
    board.add_argument("path", metavar="DIR", help="output directory of Monitor V2 or of the older monitor")
    board.add_argument("--out", metavar="DIR", help="<time>-csv2tensorboard_by_step in DIR if not given")
    board.add_argument(
        "--type",
        action="append",
        metavar="METRIC",
        help="actv, grad_reduced, ...; may be repeated; all if not given",
    )
    board.add_argument(
        "--start", metavar="TIME", help="of the older monitor's directories, as Dec03_21-34-40"
    )
    board.add_argument("--end", metavar="TIME")
    board.add_argument(
        "--processes", type=int, default=1, metavar="N", help="ranks that are converted at once"
    )
    base = verbs.add_parser("db", help="tables as one SQLite file, monitor_data.trend.db")
    base.add_argument("--data", required=True, metavar="DIR", help="output directory, as for tensorboard")
    base.add_argument("--db", required=True, metavar="DIR", help="directory for the file")
    base.add_argument(
        "--mapping", metavar="FILE", help="JSON object: parts of names and what stands for them"
    )
    base.add_argument(
        "--micro_step", choices=("true", "false"), default="true", help="the axis counts micro-batches"
    )
    base.add_argument("--process_num", type=int, default=1, metavar="N", help="ranks that are read at once")
    first = verbs.add_parser("anomalies", help="the earliest anomalies of all ranks")
    first.add_argument(
        "-d", "--data_path", dest="path", required=True, metavar="DIR", help="output directory"
    )
    first.add_argument(
        "-o", "--out_path", dest="out", metavar="DIR", help="for anomaly_analyse.json; DIR if not given"
    )
    first.add_argument("-k", "--topk", type=int, default=8, metavar="K", help="how many")
    first.add_argument("-s", "--step", metavar="[STEPS]", help='of these steps alone, as "[1, 2]"')


def run_verb(options: argparse.Namespace) -> int:
    """Runs one; 2 for input that can't be used, with the reason on standard error, else 0."""
    logging.basicConfig(format="%(message)s")
    try:
        return {"anomalies": _anomalies, "db": _database, "tensorboard": _tensorboard}[options.what](options)
    except (OSError, ValueError, ImportError, sqlite3.Error) as error:
        print(error, file=sys.stderr)
        return 2


def _tensorboard(options: argparse.Namespace) -> int:
    from trainmon.msprobe.converting import csv2tensorboard_by_step

    out = csv2tensorboard_by_step(
        options.path, options.start, options.end, options.processes, options.type, options.out
    )
    print(out)
    return 0


def _database(options: argparse.Namespace) -> int:
    from trainmon.msprobe.database import data2db

    micro, processes = options.micro_step == "true", options.process_num
    print(data2db(options.data, options.db, mapping=options.mapping, micro_step=micro, process_num=processes))
    return 0


def _anomalies(options: argparse.Namespace) -> int:
    from trainmon.msprobe.anomalies import analyse_anomalies

    steps = None
    if options.step is not None:
        steps = json.loads(options.step)
        if not isinstance(steps, list) or not all(isinstance(one, int) for one in steps):
            raise ValueError(f"-s must be a list of steps, not {options.step!r}")
    for number, one in enumerate(analyse_anomalies(options.path, options.out, options.topk, steps), 1):
        print(
            f"{number}. rank {one['rank']}, step {one['step']}, micro-batch {one['micro_step']}: {one['message']}"
        )
    return 0
