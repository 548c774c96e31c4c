"""Shows the progress of a first call, which may take minutes.

All messages go to the logger ``autopar`` at level INFO. On a terminal, one line of
stderr also shows the newest message, and is wiped when the work is done. If stderr is
no terminal, a line every 10 s shows the newest message with the elapsed seconds.
``AUTOPAR_PROGRESS=0`` turns the lines on stderr off. ``AUTOPAR_PROGRESS=1`` shows the
single line even without a terminal.
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

# Seconds between two lines if stderr is no terminal.
EVERY_S = 10.0

_Listener = Callable[[str], None]
_LISTENER: contextvars.ContextVar[_Listener | None] = contextvars.ContextVar(
    "autopar_progress", default=None
)


def say(message: str) -> None:
    """Logs a message, and shows it inside `show_progress`."""
    LOGGER.info(message)
    listener = _LISTENER.get()
    if listener is not None:
        listener(message)


@contextlib.contextmanager
def stage(what: str) -> Generator[None]:
    """Logs the beginning of some work, and the seconds that it took."""
    say(what)
    start = time.perf_counter()
    yield
    LOGGER.info("%s took %.1f s", what, time.perf_counter() - start)


@contextlib.contextmanager
def show_progress(first: str = "") -> Generator[None]:
    """Shows messages on stderr inside the ``with`` block.

    On a terminal they take one line; elsewhere there is a line every `EVERY_S` seconds.

    Args:
      first: the message to show before the first call of `say`.
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
    """Whether the single line of progress is shown.

    The line is shown on a terminal, unless ``AUTOPAR_PROGRESS`` says otherwise.
    """
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
    """One line of a terminal, which shows the newest message."""

    def say(self, message: str) -> None:
        """Shows a message."""
        write(message)

    def end(self) -> None:
        """Wipes the line."""
        wipe()


class _Lines:
    """Writes a line with elapsed seconds and newest message every `EVERY_S` seconds."""

    def __init__(self) -> None:
        self._message = "starting"
        self._begin = time.perf_counter()
        self._ended, self._writing = threading.Event(), threading.Lock()
        threading.Thread(target=self._run, name="autopar progress", daemon=True).start()

    def say(self, message: str) -> None:
        """Keeps a message for the next line."""
        self._message = message

    def end(self) -> None:
        """Stops writing lines; none comes after this call."""
        with self._writing:
            self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            spent = time.perf_counter() - self._begin
            with self._writing:
                if not self._ended.is_set():
                    _write(f"autopar: {spent:.0f} s: {self._message}\n")


def _write(text: str) -> None:
    # The stream may be closed, or be a pipe without a reader.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
