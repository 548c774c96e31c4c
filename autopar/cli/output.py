"""Keeps stdout for the result of a command.

The code of a user prints when it is imported, called and traced, from Python or from C.
All of that goes to stderr, so that ``autopar plan ... --json | jq`` reads one object.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
from collections.abc import Generator
from typing import Any

_OUT, _ERR = 1, 2


class Stdout:
    """The stdout of this process; what else is printed goes to stderr."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: int | None = None
        # What a command has found so far, shown where it is interrupted.
        self.unfinished = ""

    @contextlib.contextmanager
    def redirect_to_stderr(self) -> Generator[None]:
        """Sends what is printed inside to stderr, from Python and from C."""
        _flush()
        with contextlib.ExitStack() as stack:
            stack.callback(_flush)
            # A process may have been started without one of the two.
            with contextlib.suppress(OSError):
                os.fstat(_ERR)
                self._kept = os.dup(_OUT)
                os.dup2(_ERR, _OUT)
                stack.callback(self._restore)
            # Last, and so undone and flushed first.
            stack.callback(_flush)
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield

    def _restore(self) -> None:
        assert self._kept is not None
        os.dup2(self._kept, _OUT)
        os.close(self._kept)
        self._kept = None

    def write_at_once(self, text: str) -> None:
        """Writes past all buffers, for a process that is about to end."""
        with contextlib.suppress(OSError):
            os.write(_OUT if self._kept is None else self._kept, text.encode())

    def end(self) -> None:
        """Sends what is printed from now on, as the process ends, to stderr."""
        _flush()
        with contextlib.suppress(OSError):
            os.dup2(_ERR, _OUT)


def _flush() -> None:
    """Empties the buffers of Python and of C's standard library."""
    for stream in (sys.stdout, sys.stderr):
        # A stream may be closed, absent, or a pipe that nobody reads.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of a command.

    Attributes:
      text: as it is printed.
      code: the exit code of the command.
      failed: whether the text is an error, which goes to standard error.
    """

    text: str
    code: int = 0
    failed: bool = False

    @classmethod
    def of(cls, data: dict[str, Any], code: int = 0) -> Result:
        """One JSON object; a number that JSON lacks becomes null."""
        return cls(json.dumps(_finite(data), indent=1, allow_nan=False), code)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not abs(data) < float("inf"):
        return None
    return data
