"""The G1 fakes under the host's module paths; put this folder's parent on PYTHONPATH. No part of HyperParallel."""

import sys
from pathlib import Path

_root = str(Path(__file__).parents[5])  # of the repository, where `tests` is
if _root not in sys.path:
    sys.path.append(_root)

from tests.hosts.hyperparallel.parallel import get_platform  # noqa: E402

__all__ = ["get_platform"]
