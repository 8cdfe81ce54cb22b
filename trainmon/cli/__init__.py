"""``trainmon <verb>``: what the kernels run on, and whether a configuration is right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit status (0, or 2 for input that can't be used)."""
    parser = argparse.ArgumentParser(prog="trainmon", description="A training monitor for large models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("info", help="instruction set, BLAS, dtypes and build of the kernels")
    check = verbs.add_parser("check", help="read a configuration and show what it comes to, or what is wrong")
    check.add_argument("config", help="YAML or JSON file")
    options = parser.parse_args(arguments)
    if options.verb == "info":
        from trainmon.cli.info import print_info

        return print_info()
    from trainmon.cli.check import check_config

    return check_config(options.config)


if __name__ == "__main__":
    sys.exit(main())
