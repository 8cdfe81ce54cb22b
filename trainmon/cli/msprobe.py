"""``trainmon msprobe <verb>``: what to do with the files of the drop-in and of msProbe's own monitors."""

from __future__ import annotations

import argparse
import logging
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


def run_verb(options: argparse.Namespace) -> int:
    """Runs one; 2 for input that can't be used, with the reason on standard error, else 0."""
    logging.basicConfig(format="%(message)s")
    try:
        from trainmon.msprobe.converting import csv2tensorboard_by_step

        out = csv2tensorboard_by_step(
            options.path, options.start, options.end, options.processes, options.type, options.out
        )
    except (OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    print(out)
    return 0
