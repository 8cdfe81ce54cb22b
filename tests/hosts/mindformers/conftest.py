"""MindFormers writes its log into the current directory as soon as it is imported, unless it is told another place."""

import atexit
import os
import shutil
import tempfile

if "LOG_MF_PATH" not in os.environ:
    os.environ["LOG_MF_PATH"] = tempfile.mkdtemp(prefix="trainmon-log-")
    atexit.register(shutil.rmtree, os.environ["LOG_MF_PATH"], ignore_errors=True)
