"""``python -m trainmon.cli``."""

import sys

from trainmon.cli import main

sys.exit(main())
