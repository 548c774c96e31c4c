"""The current activity of a worker for its heartbeats, and the stacks of its threads.

The training loop records its place. The thread of the link reads these records, so that
a loop that hangs, for example in a collective, can still be described. This module does
not import JAX.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

# The places of a loop, in the order of a step: it asks whether the step may start,
# reads samples, runs the compiled program, keeps the state, saves, and returns to the
# script. After the last step it waits for the other processes.
PLACES = ("order", "samples", "program", "after", "save", "script", "finish")
# The first steps of a world are not measured, because they compile and connect.
FIRST_STEPS = 3
# Number of steps in a median; the longest step is taken over at least the second
# number.
_RECENT, _REMEMBERED = 20, 1000
# After this many seconds at one place, a loop's thread is examined.
_LOOK_S = 2.0
# A thread that compiles, traces or plans has one of these modules on its stack.
_COMPILES = (
    "jax/_src/compiler.py",
    "jax/_src/interpreters/mlir.py",
    "jax/_src/interpreters/partial_eval.py",
    "autopar/planner/",
    "autopar/runtime/compiler.py",
)
# Beginnings of the names of threads that work for the loop.
_HELPERS = ("step_", "stage_", "waits for others")
# Paths of Python, of installed packages and of autopar: these are not the user's files.
_OTHERS = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{pathlib.Path(__file__).parents[2]}/",
    "<",
)


class Activity:
    """The place of a training loop, and the times of its steps.

    One thread writes the place, and another thread reads it.

    Attributes:
      program: name of the compiled step.
      tasks: returns the task of a step of stages that this process runs; None: there is
        only one stage.
      sent_bytes: bytes that a device sends in a step, as the plan predicts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The loop has not begun.

        Args:
          clock: returns the time in seconds.
        """
        self._clock = clock
        self.program = ""
        self.tasks: Callable[[], Mapping[str, Any]] | None = None
        self.sent_bytes: float | None = None
        self._done: Mapping[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a world, and measures the times of its steps from scratch."""
        self._mark: tuple[str, int, float, int] = ("order", -1, self._clock(), 0)
        # The place at the last heartbeat, the time then, and the CPU seconds used until
        # then.
        self._found = (self._mark, 0.0, 0.0)
        self._spent: dict[str, float] = dict.fromkeys(PLACES, 0.0)
        self._steps = 0
        # These tuples are replaced as a whole, because another thread reads them.
        self._own: tuple[tuple[float, float], ...] = ()
        self._seconds: tuple[float, ...] = ()
        # The longest of the latest steps, and of the _REMEMBERED steps before those.
        self._longest_s, self._longest_before_s = 0.0, 0.0

    def enter(self, place: str, step: int) -> None:
        """Records that the loop is now at a place of a step.

        Args:
          place: one of `PLACES`.
          step: number of the step.
        """
        now, (before, _, begun_s, *_) = self._clock(), self._mark
        spent = self._spent
        spent[before] += now - begun_s
        if place == "order" and spent["program"]:
            self._steps += 1
            if self._steps > FIRST_STEPS:
                own = spent["samples"], spent["script"]
                self._own = (*self._own[1 - _RECENT :], own)
                self._take(sum(spent.values()))
        if place == "order":
            self._spent = dict.fromkeys(PLACES, 0.0)
        self._mark = (place, step, now, threading.get_ident())

    def _take(self, seconds: float) -> None:
        """Records the time of a step."""
        self._seconds = (*self._seconds[1 - _RECENT :], seconds)
        if self._steps % _REMEMBERED == 0:
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
        self._longest_s = max(self._longest_s, seconds)

    def note_done(
        self, step: int, position: int, batch: int, loss: float | None
    ) -> None:
        """Records the results of the last step.

        Args:
          step: number of steps done.
          position: number of samples consumed.
          batch: samples of the step.
          loss: the last loss that the loop has copied to the host; None: no loss yet.
        """
        self._done = {"done": step, "position": position, "batch": batch, "loss": loss}

    def data(self) -> dict[str, Any]:
        """The contents of a heartbeat: the place, times, and the task that runs."""
        mark = self._mark
        place, step, begun_s, ident = mark
        for_s = self._clock() - begun_s
        seconds, own = self._seconds, self._own
        found: dict[str, Any] = {
            "place": place,
            "step": step,
            "for_s": round(for_s, 3),
            "steps": self._steps,
            "program": self.program,
            "sent_bytes": self.sent_bytes,
            **self._done,
        }
        if seconds and own:
            samples, script = zip(*own, strict=True)
            found |= {
                "step_s": statistics.median(seconds),
                "longest_s": max(self._longest_s, self._longest_before_s),
                "samples_s": statistics.median(samples),
                "script_s": statistics.median(script),
                "measured": len(own),
            }
        if place == "program" and self.tasks is not None:
            with contextlib.suppress(Exception):  # no error may stop the heartbeats
                found["task"] = self.tasks()
        spent_s = time.process_time() if place == "program" else _thread_s(ident)
        before, then_s, spent_then_s = self._found
        now = self._clock()
        if before is not mark:
            self._found = (mark, now, spent_s)
        elif for_s > _LOOK_S:
            found["compiles"] = any(map(_compiles, _working(ident)))
            found["frame"] = _user_frame(ident)
            found["busy"] = (spent_s - spent_then_s) / max(now - then_s, 1e-9)
        return found


def _thread_s(ident: int) -> float:
    """CPU seconds of a thread; 0: there is no thread, or it has ended."""
    if not ident:
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return 0.0


def _frames() -> Mapping[int, FrameType]:
    """The innermost frame of each thread, by Python's documented function."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]


def _working(ident: int) -> Iterator[FrameType]:
    """The innermost frames of a thread, and of the threads that work for the loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for key, frame in _frames().items():
        if key == ident or names.get(key, "").startswith(_HELPERS):
            yield frame


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiles(frame: FrameType) -> bool:
    """Whether a thread compiles, traces or plans."""
    files = (x.f_code.co_filename for x in _outwards(frame))
    return any(part in file for file in files for part in _COMPILES)


def _user_frame(ident: int) -> str:
    """A thread's innermost frame, in the user's files if it has such a frame."""
    frames = list(_outwards(_frames().get(ident)))
    own = [x for x in frames if not x.f_code.co_filename.startswith(_OTHERS)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    name = os.path.basename(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def stacks_text() -> str:
    """The Python stacks of all other threads of this process, the main thread first."""
    own, main = threading.get_ident(), threading.main_thread().ident
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = _frames()
    order = sorted(frames.keys() - {own}, key=lambda k: (k != main, k))
    parts: list[str] = []
    for key in order:
        thread = threads.get(key)
        name = "no thread of Python's" if thread is None else thread.name
        stack = "".join(traceback.format_stack(frames[key]))
        parts.append(f"thread {name}, the innermost call last:\n{stack}")
    return "\n".join(parts)
