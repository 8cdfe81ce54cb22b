"""``trainmon check``: a configuration, resolved or with all its problems."""

from __future__ import annotations

import json
import sys

from trainmon.config import ConfigError, load_config

__all__ = ["check_config"]


def check_config(path: str) -> int:
    """Prints the resolved configuration as JSON; 2 and all problems on standard error if it is wrong."""
    try:
        config = load_config(path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(config.to_dict(), indent=2))
    return 0
