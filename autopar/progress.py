"""Says what a first call does, which may take minutes: a log, and a line on a terminal.

Everything goes to the logger ``autopar`` at level INFO. On a terminal the newest
message also stands in one line of stderr, which is wiped when the work is done. Where
stderr is no terminal, a line every 10 s says it, with the seconds so far.
``AUTOPAR_PROGRESS=0`` keeps both away, ``AUTOPAR_PROGRESS=1`` shows the one line
everywhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator

LOGGER = logging.getLogger("autopar")

# Seconds between two lines where stderr is no terminal.
EVERY_S = 10.0

_Listener = Callable[[str], None]
_LISTENER: contextvars.ContextVar[_Listener | None] = contextvars.ContextVar(
    "autopar_progress", default=None
)


def say(message: str) -> None:
    """Logs a message, and shows it where a line of progress is shown."""
    LOGGER.info(message)
    listener = _LISTENER.get()
    if listener is not None:
        listener(message)


@contextlib.contextmanager
def stage(what: str) -> Generator[None]:
    """Says that something begins, and how long it took."""
    say(what)
    start = time.perf_counter()
    yield
    LOGGER.info("%s took %.1f s", what, time.perf_counter() - start)


@contextlib.contextmanager
def show_progress(first: str = "") -> Generator[None]:
    """Within it, messages stand in a line of a terminal, or in a line now and then.

    Args:
      first: what is being done until something is said.
    """
    never = os.environ.get("AUTOPAR_PROGRESS") == "0"
    if _LISTENER.get() is not None or never:
        yield
        return
    lines = _Line() if is_shown() else _Lines()
    token = _LISTENER.set(lines.say)
    if first:
        lines.say(first)
    try:
        yield
    finally:
        _LISTENER.reset(token)
        lines.end()


def is_shown() -> bool:
    """Whether a line of progress is shown: on a terminal, or as the user said."""
    said = os.environ.get("AUTOPAR_PROGRESS", "")
    return sys.stderr.isatty() if not said else said != "0"


def write(message: str) -> None:
    """Shows a message in the line of a terminal."""
    width = shutil.get_terminal_size().columns - 1
    _write("\r\x1b[K" + f"autopar: {message}"[:width])


def wipe() -> None:
    """Wipes the line of a terminal."""
    _write("\r\x1b[K")


class _Line:
    """One line of a terminal, which the newest message takes."""

    def say(self, message: str) -> None:
        """Shows a message."""
        write(message)

    def end(self) -> None:
        """Wipes the line."""
        wipe()


class _Lines:
    """A line each `EVERY_S` seconds, with the seconds so far and the newest message."""

    def __init__(self) -> None:
        self._message = "starting"
        self._begin = time.perf_counter()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="autopar progress", daemon=True).start()

    def say(self, message: str) -> None:
        """Keeps a message for the next line."""
        self._message = message

    def end(self) -> None:
        """Ends the lines."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            spent = time.perf_counter() - self._begin
            _write(f"autopar: {spent:.0f} s: {self._message}\n")


def _write(text: str) -> None:
    # The stream may be closed, or a pipe that nobody reads.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
