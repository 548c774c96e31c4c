"""Reserves stdout for the result of a command.

User code may print when it is imported, called or traced, from Python or from C. All
this output goes to stderr, so that ``autopar plan ... --json | jq`` reads one object.
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
    """The stdout of this process, which can send other output to stderr."""

    def __init__(self) -> None:
        """Makes an object that redirects nothing yet."""
        self._kept: int | None = None
        # The partial result of a command, which is printed if the command is
        # interrupted.
        self.unfinished = ""

    @contextlib.contextmanager
    def redirect_to_stderr(self) -> Generator[None]:
        """Sends output of Python and C within the context to stderr."""
        _flush()
        with contextlib.ExitStack() as stack:
            stack.callback(_flush)
            # The process may have started without stdout or stderr.
            with contextlib.suppress(OSError):
                os.fstat(_ERR)
                self._kept = os.dup(_OUT)
                os.dup2(_ERR, _OUT)
                stack.callback(self._restore)
            # Python's redirection is entered last, so that at the end it is undone
            # first, after a flush.
            stack.callback(_flush)
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield

    def _restore(self) -> None:
        assert self._kept is not None
        os.dup2(self._kept, _OUT)
        os.close(self._kept)
        self._kept = None

    def write_at_once(self, text: str) -> None:
        """Writes to stdout without buffers, for a process that is about to end."""
        with contextlib.suppress(OSError):
            os.write(_OUT if self._kept is None else self._kept, text.encode())

    def end(self) -> None:
        """Sends all later output, while the process ends, to stderr."""
        _flush()
        with contextlib.suppress(OSError):
            os.dup2(_ERR, _OUT)


def _flush() -> None:
    """Empties the buffers of Python and of C's standard library."""
    for stream in (sys.stdout, sys.stderr):
        # A stream may be closed or absent, or a pipe whose reader has ended.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of a command.

    Attributes:
      text: the text to print.
      code: the exit code of the command.
      failed: whether the text is an error message, which goes to stderr.
    """

    text: str
    code: int = 0
    failed: bool = False

    @classmethod
    def of(cls, data: dict[str, Any], code: int = 0) -> Result:
        """Makes a result of one JSON object, with null for infinite numbers and NaN."""
        return cls(json.dumps(_finite(data), indent=1, allow_nan=False), code)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not abs(data) < float("inf"):
        return None
    return data
