"""Does work in threads beside the steps of a run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator

# How long a thread may keep Python to itself.
_SWITCH_S = 5e-4


class Beside:
    """Threads that have the priority of the run.

    On a busy machine one of the least priority might never come to its end.
    """

    def __init__(self) -> None:
        """Does nothing yet."""
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    def do(self, work: Callable[[], None]) -> None:
        """Does some work in a thread of its own; nothing once this is closed."""
        with self._changed:
            if self._closed:
                return
            self._running += 1

        def mark_done() -> None:
            try:
                with switching_often():
                    work()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        # No daemon: Python waits at its end for work under way.
        threading.Thread(target=mark_done, name="autopar-beside").start()

    def close(self) -> None:
        """Begins no more work; what is under way ends by itself."""
        with self._changed:
            self._closed = True

    def wait(self) -> None:
        """Waits until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)


@contextlib.contextmanager
def switching_often() -> Generator[None]:
    """Lets the thread of the run come in quickly while this one works in Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
