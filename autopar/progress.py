"""Says what a first call does, which may take minutes: a log, and a line on a terminal.

Everything goes to the logger ``autopar`` at level INFO. On a terminal the newest
message also stands in one line of stderr, which is wiped when the work is done.
``AUTOPAR_PROGRESS=0`` keeps the line away, ``AUTOPAR_PROGRESS=1`` shows it everywhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator

LOGGER = logging.getLogger("autopar")

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
def shown() -> Generator[None]:
    """Within it, messages stand in a line of a terminal."""
    if _LISTENER.get() is not None or not wanted():
        yield
        return
    token = _LISTENER.set(write)
    try:
        yield
    finally:
        _LISTENER.reset(token)
        wipe()


def wanted() -> bool:
    """Whether a line of progress is shown: on a terminal, or as the user said."""
    said = os.environ.get("AUTOPAR_PROGRESS", "")
    return sys.stderr.isatty() if not said else said != "0"


def write(message: str) -> None:
    """Shows a message in the line of a terminal."""
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write("\r\x1b[K" + f"autopar: {message}"[:width])
    sys.stderr.flush()


def wipe() -> None:
    """Wipes the line of a terminal."""
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()
