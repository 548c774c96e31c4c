"""Files that are there whole or not at all, also on a disk that fills up; and locks."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pathlib
import secrets
import stat


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, for its owner alone, that is there whole or not at all.

    Raises:
      OSError: it cannot be written; what was there before is as it was.
    """
    _replace(path, content, 0o600)


def export_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file for people that is there whole or not at all.

    A file that was there keeps its mode, and a link its place. What is no plain file,
    such as ``/dev/stdout``, is written to as it is.

    Raises:
      OSError: it cannot be written; what was there before is as it was.
    """
    given = pathlib.Path(path)
    # /dev/stdout may be a link to the file that a shell holds open.
    name = given.absolute()
    device = name.is_relative_to("/dev") and not name.is_relative_to("/dev/shm")
    if device or (given.exists() and not given.is_file()):
        given.write_bytes(content)
    else:
        _replace(pathlib.Path(os.path.realpath(given)), content, 0o666)


def _replace(path: pathlib.Path, content: bytes, mode: int) -> None:
    part = path.parent / f".{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(part, flags, mode), "wb") as file:
            file.write(content)
        if mode != 0o600:
            with contextlib.suppress(OSError):
                os.chmod(part, stat.S_IMODE(path.stat().st_mode))
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):  # it names the part
            error.filename = os.fspath(path)
        raise


def append_lines(path: pathlib.Path, lines: bytes) -> None:
    """Adds lines to a file, all of them or none.

    Raises:
      OSError: they cannot be written; the file is as it was.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(file).st_size
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(file, left) :]
        except BaseException:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


class WaitingLines:
    """Lines of a file; those for which there is no room wait until there is."""

    def __init__(self, path: pathlib.Path, most: int) -> None:
        """Writes nothing yet.

        Args:
          path: of the file.
          most: lines that wait; older ones are given up.
        """
        self._path = path
        self._lines: collections.deque[bytes] = collections.deque(maxlen=most)

    def add(self, line: bytes) -> None:
        """Has a line wait behind the others."""
        self._lines.append(line)

    def flush(self) -> None:
        """Writes all that wait, or none.

        Raises:
          OSError: they cannot be written; they go on waiting.
        """
        if self._lines:
            append_lines(self._path, b"".join(self._lines))
            self._lines.clear()


class FileLock:
    """A lock that ends with the process that holds it."""

    def __init__(self, path: pathlib.Path) -> None:
        """Is not held yet."""
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Takes the lock; returns whether nobody else has it.

        Raises:
          OSError: the file cannot be made, or its file system has no locks.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        return True

    def free(self) -> None:
        """Gives the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: pathlib.Path) -> int:
    """The process that holds a lock; 0: nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(descriptor, 32) or b"1")
    finally:
        os.close(descriptor)
    return 0
