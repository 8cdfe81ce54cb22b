"""``python -m trainmon.launch``."""

import sys

from trainmon.launch import main

sys.exit(main())
