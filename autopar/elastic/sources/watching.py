"""Threads that begin again, whatever ends them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

# Seconds before a thread that failed begins again: at first, and at most.
_FIRST_S, _LONGEST_S = 0.05, 10.0


class Watched:
    """A thread that does its work again after any error, and reports the error.

    Attributes:
      ending: set when the work is to return.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Watched], None],
        report: Callable[[str], None],
    ) -> None:
        """Starts.

        Args:
          name: of the thread.
          work: returns once ``ending`` is set.
          report: takes what has ended the thread.
        """
        self.ending = threading.Event()
        self._work, self._report = work, report
        self._called: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function; once more where an error in it has ended the thread.

        Args:
          function: does no harm where it runs twice, as an event that comes twice.
        """
        self._called = function
        function()
        self._called = None

    def end(self) -> None:
        """Waits until the work has returned."""
        self.ending.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _FIRST_S
        while not self.ending.is_set():
            try:
                called, self._called = self._called, None
                if called is not None:
                    called()
                self._work(self)
            except BaseException as error:  # SystemExit would end the thread, too
                with contextlib.suppress(BaseException):
                    text = f"its thread ended by {type(error).__name__}: {error}"[:500]
                    self._report(f"{text}; it begins again.")
                    self.ending.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
