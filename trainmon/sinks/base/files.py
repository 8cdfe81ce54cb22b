"""Append-only files of whole records, and files published by rename.

A reader of a live or killed run sees whole records: each record is one ``write`` on an ``O_APPEND``
descriptor, nothing is buffered in the process (so a forked child has nothing to write twice), and a record
that did not fit is cut off again. Knows nothing of what the records hold.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["RecordFile", "Unwritten", "publish"]


class Unwritten(OSError):
    """Records could not be written.

    Attributes:
        records: how many of them are lost; the others wait in the sink.
    """

    def __init__(self, cause: OSError, records: int) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause), cause.filename)
        self.records = records


class RecordFile:
    """An append-only file; each :meth:`write` appends one whole record or leaves the file as it was.

    Args:
        path: the file; its directory is made if need be.
        exclusive: fail with ``FileExistsError`` if it exists.
        mode: of a new file, less the umask.
    """

    def __init__(self, path: Path, *, exclusive: bool = False, mode: int = 0o644) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0)
        self._descriptor = os.open(path, flags, mode)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def ends_with(self, tail: bytes) -> bool:
        """Whether the file is empty or its last bytes are ``tail``."""
        size = self.size
        if size == 0:
            return True
        return os.pread(self._descriptor, len(tail), max(0, size - len(tail))) == tail

    def write(self, record: bytes) -> None:
        """Appends ``record``.

        Raises:
            OSError: it could not be written whole (a full disk, a quota); the part that was is removed.
        """
        start = self.size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # Only regular files have something to cut off; a device or a pipe never held the part.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, start)
            raise

    def flush(self) -> None:
        """Nothing to do: no bytes stay in the process."""

    def sync(self) -> None:
        """Waits until the device holds the data."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def publish(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Replaces ``path`` by ``content``: every reader, also after a power cut, sees the old or the new whole.

    Args:
        durable: wait until the device holds it; without, a power cut may leave neither.

    Raises:
        OSError: the directory can't be written or is full; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not durable:
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
