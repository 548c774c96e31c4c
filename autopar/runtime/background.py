"""Runs work in threads beside the training steps, and abandons what XLA compiles.

XLA cannot stop a compilation, which may take minutes on a busy machine. A process that
leaves its world, or ends, must not keep the other processes waiting for that long. So
`Beside.leave` waits for all work except compilations. A compilation goes on by itself,
and its thread ends as soon as XLA returns.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Generator

# Python's switch interval in seconds while background work runs: a thread must release
# the interpreter lock after this time.
_SWITCH_S = 5e-4


class AbandonedError(Exception):
    """The work of this thread was abandoned while it compiled a program."""


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    """Work in a background thread; the lock of its `Beside` guards the fields.

    Attributes:
      changed: notified when a field changes.
      compiles: whether XLA compiles a program for this work.
      abandoned: whether nobody waits for this work any more.
    """

    changed: threading.Condition
    compiles: bool = False
    abandoned: bool = False


_WORK: contextvars.ContextVar[_Work | None] = contextvars.ContextVar(
    "autopar_work", default=None
)


@contextlib.contextmanager
def abandonable() -> Generator[None]:
    """Marks a compilation, for which `Beside.leave` does not wait.

    Outside the threads of a `Beside` this does nothing.

    Raises:
      AbandonedError: the work was abandoned meanwhile.
    """
    work = _WORK.get()
    if work is None:
        yield
        return
    with work.changed:
        work.compiles = True
        work.changed.notify_all()
    try:
        yield
    finally:
        with work.changed:
            work.compiles = False
            if work.abandoned:
                raise AbandonedError("nobody waits for this program any more")


class Beside:
    """Runs work in background threads, at the same CPU priority as the training.

    At the lowest priority, a thread might never finish on a busy machine.
    """

    def __init__(self) -> None:
        """Runs no thread yet."""
        self._changed = threading.Condition()
        self._running: list[_Work] = []
        self._closed = self._at_exit = False

    def do(self, work: Callable[[], None]) -> None:
        """Starts work in a new thread; does nothing after `close`."""
        mine = _Work(self._changed)
        with self._changed:
            if self._closed:
                return
            self._running.append(mine)
            if not self._at_exit:
                # Threads are daemons, so that Python does not wait for abandoned work
                # at its exit. It waits for other work by this hook.
                self._at_exit = True
                atexit.register(self.wait)

        def run() -> None:
            _WORK.set(mine)
            signal.pthread_sigmask(
                signal.SIG_BLOCK, signal.valid_signals() - _OWN_SIGNALS
            )
            try:
                with switching_often(), contextlib.suppress(AbandonedError):
                    work()
            finally:
                with self._changed:
                    if not mine.abandoned:
                        self._running.remove(mine)
                    self._changed.notify_all()

        context = contextvars.Context()
        threading.Thread(
            target=context.run, args=(run,), name="autopar-beside", daemon=True
        ).start()

    def close(self) -> None:
        """Lets `do` start no more work; running work goes on to its end."""
        with self._changed:
            self._closed = True

    def wait(self) -> None:
        """Waits until no work is running, except abandoned work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def leave(self) -> None:
        """Waits until no work is running, but abandons work that compiles a program.

        The thread of abandoned work ends after its compilation, with an
        `AbandonedError`. If this process ends before, the thread ends with it.
        """
        with self._changed:
            self._changed.wait_for(lambda: all(w.compiles for w in self._running))
            for work in self._running:
                work.abandoned = True
            if self._running and not _end_without_destructors():
                # Without the function of glibc, the exit has to wait.
                _wait_at_exit(self._changed, tuple(self._running))
            self._running.clear()


def _wait_at_exit(changed: threading.Condition, left: tuple[_Work, ...]) -> None:
    """Makes Python wait at its exit until XLA has returned to threads."""

    def wait() -> None:
        with changed:
            changed.wait_for(lambda: not any(w.compiles for w in left))

    atexit.register(wait)


_ENDS_AT_ONCE = threading.Event()


def _end_without_destructors() -> bool:
    """Makes this process end beside threads in XLA; returns whether that is possible.

    XLA may still compile in another thread. Destructors of its global variables would
    then make the process crash, so none is called. The exit status and what Python does
    at its end stay the same.
    """
    if _ENDS_AT_ONCE.is_set():
        return True
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return False
    # A function of `on_exit` is called with the exit status as its first argument.
    # Functions run in the reverse order of their registration, so this is the first.
    if libc.on_exit(libc._exit, None):
        return False
    _ENDS_AT_ONCE.set()
    return True


def _hold_returning_threads() -> None:
    """Lets a thread that returns from XLA to an ended interpreter wait for good.

    Before Python 3.14, such a thread is ended by `pthread_exit`. That unwinds XLA's C++
    frames, some of which let no exception pass: the process would abort
    (https://github.com/python/cpython/issues/87135). A thread in `pause` returns for a
    signal only, and those of `Beside` take none.
    """
    if not _ENDS_AT_ONCE.is_set() or sys.version_info >= (3, 14):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C++ library
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_terminate = runtime._ZSt13set_terminatePFvvE
        set_terminate.argtypes = [ctypes.c_void_p]
        set_terminate.restype = ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


# This hook is registered before those of other modules, so it runs after them: until
# then, a failure in C++ code ends the process.
atexit.register(_hold_returning_threads)

# Signals that a thread causes itself.
_OWN_SIGNALS = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
}  # fmt: skip


@contextlib.contextmanager
def switching_often() -> Generator[None]:
    """Lets the training thread get the interpreter lock quickly in this context."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
