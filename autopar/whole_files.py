"""Files that are there whole or not at all, also on a disk that fills up."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, for its owner alone, that is there whole or not at all.

    Raises:
      OSError: it cannot be written; what was there before is as it was.
    """
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
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
