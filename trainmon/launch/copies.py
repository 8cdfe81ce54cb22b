"""A host's file without our entry, beside the original: one copy for all processes that need the same.

The name says what it is and holds a digest of the text: `.cfg.trainmon-1a2b3c4d.yaml`. Who uses a copy holds a shared
lock on it, which the system drops when the process ends, however it ends. So whoever gets the lock for himself alone
may remove it: the last process at its exit; else a small watcher that the process that wrote it leaves behind (after
SIGTERM, Ctrl-C, kill -9); else the next launch. Where the file system has no locks, each process removes it at its exit.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import subprocess
import sys
import tempfile

__all__ = ["copy_beside", "sweep"]

_NAME = re.compile(r"\..+\.trainmon-([0-9a-f]{8})\.\w+")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
#: Others may remove a copy in the moment between its opening and its locking.
_TRIES = 50

_WATCHER = """
import fcntl, os, sys
path, inode = sys.argv[1], int(sys.argv[2])
if os.fork():
    os._exit(0)
try:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    if os.fstat(file).st_ino == inode:
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.stat(path).st_ino == inode:
            os.unlink(path)
except OSError:
    pass
"""


def copy_beside(path: str, text: bytes) -> tuple[str, str]:
    """The path of a file with this text for as long as this process lives, and a warning if it isn't beside `path`.

    Raises:
        OSError: neither there nor among temporary files can one be written.
    """
    folder, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    copy = f".{stem}.trainmon-{_digest(text)}{suffix}"
    mode = stat.S_IMODE(os.stat(path).st_mode) | stat.S_IRUSR | stat.S_IWUSR
    try:
        sweep(folder)
        return _take(os.path.join(folder, copy), text, mode), ""
    except OSError as error:
        where = os.path.join(tempfile.gettempdir(), f"trainmon-{os.getuid()}")
        os.makedirs(where, 0o700, exist_ok=True)
        if os.lstat(where).st_uid != os.getuid() or not stat.S_ISDIR(os.lstat(where).st_mode):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), where) from None
        sweep(where)
        other = _take(os.path.join(where, copy), text, mode)
        return other, (
            f"nothing can be written beside {path} ({error.strerror}): the script gets {other}; relative paths that it "
            f"resolves from its file's directory lead elsewhere"
        )


def sweep(folder: str) -> None:
    """Removes the copies in a directory that nobody uses any more."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        path = os.path.join(folder, name)
        try:
            file = os.open(path, _FLAGS)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(file, "rb", closefd=False) as stream:
                text = stream.read()
            if _is(path, file) and (not text or _digest(text) == match[1]):
                os.unlink(path)
        except OSError:
            pass
        finally:
            os.close(file)


def _digest(text: bytes) -> str:
    """Of a text and a user, since users can't write each other's files."""
    return hashlib.blake2b(text, digest_size=4, salt=str(os.getuid()).encode()[-16:]).hexdigest()


def _is(path: str, file: int) -> bool:
    """Whether this open file is still the one of that name."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(file)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _take(path: str, text: bytes, mode: int) -> str:
    for _ in range(_TRIES):
        file = os.open(path, _FLAGS | os.O_CREAT, mode)
        try:
            wrote, locked = _fill(file, text)
            with open(file, "rb", closefd=False) as stream:
                stream.seek(0)
                good = stream.read() == text
            if good and _is(path, file):
                _keep(path, file, wrote, locked)
                return path
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


def _fill(file: int, text: bytes) -> tuple[bool, bool]:
    """Locks the file, and writes it if nobody has; whether this process wrote, and whether there are locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for who writes
        return False, True
    except OSError:
        if os.fstat(file).st_size != len(text):
            os.pwrite(file, text, 0)
        return True, False
    os.ftruncate(file, 0)
    os.pwrite(file, text, 0)
    fcntl.flock(file, fcntl.LOCK_SH)
    return True, True


def _keep(path: str, file: int, wrote: bool, locked: bool) -> None:
    """Holds the lock to the end of the process."""
    os.set_inheritable(file, True)  # a script that starts itself anew (os.exec) goes on using the copy
    atexit.register(_release, os.path.abspath(path), file, os.getpid(), locked)
    if wrote and locked and sys.executable:
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _WATCHER,
            os.path.abspath(path),
            str(os.fstat(file).st_ino),
        ]
        quiet = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # without it: the exit, or the next launch
            subprocess.run(
                command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=False
            )


def _release(path: str, file: int, pid: int, locked: bool) -> None:
    if os.getpid() != pid:
        return  # a fork shares the lock
    with contextlib.suppress(OSError):  # others use it: the last one removes it
        if locked:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(path, file):
            os.unlink(path)
    with contextlib.suppress(OSError):  # whoever has inherited it keeps nobody waiting
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
