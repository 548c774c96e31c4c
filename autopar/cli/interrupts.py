"""Ends the command line soon after Ctrl-C, whatever runs then.

Python raises `KeyboardInterrupt` in its main thread, once that runs Python again. A
solver or compiler in C runs for seconds before, and where the interrupt is raised in a
callback of the garbage collector, as JAX has one, it is lost. So a thread watches too.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

STOPPED = 130
_EVERY_S = 0.1


@contextlib.contextmanager
def stoppable(
    last: Callable[[], None], grace_s: float = 0.8
) -> Generator[Callable[[], None]]:
    """Makes Ctrl-C end this process; call it in the main thread.

    The interrupt is raised again until the main thread leaves this context, or calls
    what this yields: it has heard, and what it says now is not interrupted. Where it
    does neither in time, the process ends with exit code 130.

    Args:
      last: says that the process ends; called by another thread.
      grace_s: seconds from the interrupt to the end of the process.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    hook, sys.unraisablehook = sys.unraisablehook, _without_interrupts
    watcher = threading.Thread(
        target=_watch, args=(reader, left, last, grace_s), daemon=True
    )
    watcher.start()

    def hear() -> None:
        left.set()
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    try:
        yield hear
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook
        writer.close()  # the watcher reads the end of it
        watcher.join(grace_s)
        reader.close()


def _watch(
    reader: socket.socket,
    left: threading.Event,
    last: Callable[[], None],
    grace_s: float,
) -> None:
    numbers = reader.recv(1)
    while numbers and numbers[0] != signal.SIGINT:
        numbers = reader.recv(1)
    if not numbers:
        return
    for _ in range(round(grace_s / _EVERY_S)):
        if left.wait(_EVERY_S):
            return
        _thread.interrupt_main()
    if os.isatty(sys.__stderr__.fileno() if sys.__stderr__ else 2):
        os.write(2, b"\r\x1b[K\x1b[?25h")  # the progress line away, the cursor back
    last()
    os._exit(STOPPED)


def _without_interrupts(unraisable: Any) -> None:
    """Reports what nobody can catch, but for interrupts: these are raised again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
