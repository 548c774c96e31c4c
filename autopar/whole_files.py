"""Atomic writes of files, even when the disk fills up; and file locks."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pathlib
import secrets
import stat


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically; only its owner may read and write it.

    Raises:
      OSError: the file cannot be written. An earlier file is unchanged.
    """
    _replace(path, content, 0o600)


def export_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes an output file of the user atomically.

    An existing file keeps its mode, and a symbolic link stays a link to the new file.
    A path that is no regular file, such as ``/dev/stdout``, is written directly.

    Raises:
      OSError: the file cannot be written. An earlier file is unchanged.
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
        if isinstance(error, OSError):  # the error names the temporary file
            error.filename = os.fspath(path)
        raise


def append_lines(path: pathlib.Path, lines: bytes) -> None:
    """Appends all lines to a file, or none if they cannot be written.

    Raises:
      OSError: the lines cannot be written. The file is unchanged.
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
    """Lines to append to a file; if the disk is full, they wait in memory."""

    def __init__(self, path: pathlib.Path, most: int) -> None:
        """Creates an empty queue of lines.

        Args:
          path: path of the file.
          most: the largest number of waiting lines; the oldest lines are dropped.
        """
        self._path = path
        self._lines: collections.deque[bytes] = collections.deque(maxlen=most)

    def add(self, line: bytes) -> None:
        """Adds a line to the waiting lines."""
        self._lines.append(line)

    def flush(self) -> None:
        """Writes all waiting lines, or none if they cannot be written.

        Raises:
          OSError: the lines cannot be written, and keep waiting.
        """
        if self._lines:
            append_lines(self._path, b"".join(self._lines))
            self._lines.clear()


class FileLock:
    """A lock that ends with the process that holds it."""

    def __init__(self, path: pathlib.Path) -> None:
        """Creates a lock that is not held yet."""
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Tries to take the lock; returns False if another process holds it.

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
        """Releases the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: pathlib.Path) -> int:
    """Returns the id of the process that holds a lock; 0 if no process holds it."""
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
