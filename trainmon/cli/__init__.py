"""``trainmon <verb>``: what the kernels run on, whether a configuration is right, what a run did last, what
rules would have said of it; files of msProbe's monitors; and the start of a training script under the monitor."""

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
    box = verbs.add_parser("blackbox", help="what each rank did last, from the black boxes of a run")
    box.add_argument(
        "places", nargs="+", metavar="DIR", help="directories (of the run, of node-local boxes) or files"
    )
    box.add_argument("--life", type=int, help="of this life of the run; the newest if not given")
    box.add_argument("--rank", type=int, help="all that this rank's box holds")
    box.add_argument("--json", action="store_true", help="for programs")
    replay = verbs.add_parser("replay", help="what rules would have said of a run that is over")
    replay.add_argument("run", metavar="RUN", help="a scalars.jsonl, or the directory of a run")
    replay.add_argument("--rules", metavar="FILE", help="rules; every detector of spikes if not given")
    replay.add_argument("--labels", metavar="FILE", help="steps in which something was wrong")
    replay.add_argument(
        "--before", type=int, default=100, help="an alarm so many steps before a label is about it"
    )
    replay.add_argument("--after", type=int, default=20, help="and so many after its end")
    replay.add_argument("--json", action="store_true", help="for programs")
    from trainmon.cli.msprobe import add_verbs, run_verb

    add_verbs(verbs.add_parser("msprobe", help="convert and search the files of msProbe's monitors"))
    verbs.add_parser(
        "launch", add_help=False, help="run a training script and attach to the trainer it builds"
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["launch"]:  # whose words are the script's: no parser looks at them
        from trainmon.launch import main as launch

        return launch(words[1:])
    options = parser.parse_args(words)
    if options.verb == "info":
        from trainmon.cli.info import print_info

        return print_info()
    if options.verb == "msprobe":
        return run_verb(options)
    if options.verb == "blackbox":
        from trainmon.cli.blackbox import show_boxes

        return show_boxes(options.places, life=options.life, rank=options.rank, as_json=options.json)
    if options.verb == "replay":
        from trainmon.cli.replay import replay_run

        return replay_run(
            options.run,
            options.rules,
            options.labels,
            before=options.before,
            after=options.after,
            as_json=options.json,
        )
    from trainmon.cli.check import check_config

    return check_config(options.config)


if __name__ == "__main__":
    sys.exit(main())
