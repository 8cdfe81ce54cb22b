"""Configuration files: from a path to a tree with places. The only module here that loads the extension, on use."""

from __future__ import annotations

import os
import re

from .errors import ConfigError, Place, Problem
from .tree import Value, from_node
from .words import nearest

__all__ = ["parse", "read_bytes", "read_file"]


def _wrong(named: Value, message: str) -> ConfigError:
    return ConfigError([Problem(named.place, named.path, message)])


def read_file(path: str | os.PathLike[str], named: Value | None = None) -> Value:
    """The tree of a YAML or JSON file.

    `named` is the value that names the file, if a configuration does: what is wrong with the file itself is told
    there. Raises ConfigError, with all that the reader found wrong.
    """
    file = os.path.expanduser(os.fspath(path))
    return parse(read_bytes(file, named), file)


def read_bytes(path: str | os.PathLike[str], named: Value | None = None) -> bytes:
    """The text of a file, as far as one can be long. Raises ConfigError."""
    from .. import _config

    named = named or Value(None)
    file = os.path.expanduser(os.fspath(path))
    try:
        with open(file, "rb") as stream:
            return stream.read(_config.MAX_BYTES + 1)
    except FileNotFoundError:
        raise _wrong(named, f"no such configuration file: {file}{_neighbour(file)}") from None
    except IsADirectoryError:
        raise _wrong(named, f"a directory, not a configuration file: {file}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _wrong(named, f"the configuration file can't be read: {file!r}: {reason}") from None


def parse(text: bytes, file: str) -> Value:
    """The tree of a file's text. Raises ConfigError, with all that the reader found wrong."""
    from .. import _config

    if file.endswith(".json"):
        text = _join_surrogates(text)
    try:
        return from_node(_config.load(text, file), file)
    except _config.ParseError as error:
        problems = [Problem(Place(file, line, column), "", what) for line, column, what in error.problems]
        raise ConfigError(problems) from None


def _neighbour(file: str) -> str:
    folder, name = os.path.split(file)
    try:
        close = nearest(name, os.listdir(folder or "."))
    except OSError:
        return ""
    return f"; did you mean {close!r}?" if close else ""


_SURROGATES = re.compile(rb"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def _join_surrogates(text: bytes) -> bytes:
    """JSON escapes a character beyond the 16-bit ones as two halves; YAML wants it whole."""

    def whole(match: re.Match[bytes]) -> bytes:
        high, low = int(match[2], 16), int(match[3], 16)
        return match[1] + b"\\U%08X" % (0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF))

    return _SURROGATES.sub(whole, text)
