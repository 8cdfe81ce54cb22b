"""Prints the build requirements of pyproject.toml, one a line, for `pip install -r`."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text(encoding="utf-8"))
print("\n".join(project["build-system"]["requires"]))
