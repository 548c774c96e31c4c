"""What a worker process is doing now, and the stacks of its threads.

Heartbeats send both to the supervisor.

The training loop records its *place*, the part of a step that it is in. Another thread
(`autopar.elastic.processes.link`) sends this record to the supervisor, which can tell
from it where a loop hangs, for example in a collective. This module does not import
JAX.
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

# The places where a training loop can be, in the order of a step: it asks the
# supervisor whether the step may start, reads samples, runs the compiled program, keeps
# a copy of the state, saves a checkpoint, and returns to the user's script. After the
# last step it waits for the other processes.
PLACES = ("order", "samples", "program", "after", "save", "script", "finish")
# The first steps after a change of processes are not timed, because they compile
# programs and open connections.
FIRST_STEPS = 3
# The usual seconds of a step are the median of `_RECENT` steps. The longest are the
# maximum over at least `_REMEMBERED` steps.
_RECENT, _REMEMBERED = 20, 1000
# If a loop is at one place for this many seconds, the stack of its thread is examined.
_LOOK_S = 2.0
# If one of these modules is on a thread's stack, the thread compiles, traces or plans.
_COMPILES = (
    "jax/_src/compiler.py",
    "jax/_src/interpreters/mlir.py",
    "jax/_src/interpreters/partial_eval.py",
    "autopar/planner/",
    "autopar/runtime/compiler.py",
)
# Prefixes of the names of the threads that do work of the training loop.
_HELPERS = ("step_", "stage_", "waits for others")
# Prefixes of paths that do not belong to the user's code: Python, installed packages
# and autopar.
_OTHERS = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{pathlib.Path(__file__).parents[2]}/",
    "<",
)


class Activity:
    """Records where in a step a training loop is, and how long its steps take.

    One thread writes the place, and another thread reads it.

    Attributes:
      program: name of the compiled step.
      tasks: returns the pipeline task that this process is running; None if the plan
        has only one pipeline stage.
      sent_bytes: bytes that a device sends in a step, as predicted by the plan.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts before the loop has begun.

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
        """Forgets all step times, because a new set of processes trains together."""
        self._mark: tuple[str, int, float, int] = ("order", -1, self._clock(), 0)
        # At the last heartbeat: the place, the time, and the CPU seconds of the loop's
        # thread.
        self._found = (self._mark, 0.0, 0.0)
        self._spent: dict[str, float] = dict.fromkeys(PLACES, 0.0)
        self._steps = 0
        # Each of these tuples is replaced by a new tuple and never changed, because
        # another thread reads it.
        self._own: tuple[tuple[float, float], ...] = ()
        self._seconds: tuple[float, ...] = ()
        # The longest seconds of a step among the latest steps, and among the
        # _REMEMBERED steps before them.
        self._longest_s, self._longest_before_s = 0.0, 0.0

    def enter(self, place: str, step: int) -> None:
        """Records that the loop is now at a given place of a step.

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
        """Records the progress after a step.

        Args:
          step: number of steps done.
          position: number of samples consumed.
          batch: samples of the step.
          loss: the last loss that the loop has copied from a device; None: no loss yet.
        """
        self._done = {"done": step, "position": position, "batch": batch, "loss": loss}

    def data(self) -> dict[str, Any]:
        """The contents of a heartbeat: place, step times, and running pipeline task."""
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
            with contextlib.suppress(Exception):  # heartbeats must go on
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
    """CPU seconds that a thread has used; 0 if there is no such thread."""
    if not ident:
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return 0.0


def _frames() -> Mapping[int, FrameType]:
    """The innermost Python frame of each thread, by thread identifier."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]


def _working(ident: int) -> Iterator[FrameType]:
    """The innermost frames of a thread and of the threads that work for it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for key, frame in _frames().items():
        if key == ident or names.get(key, "").startswith(_HELPERS):
            yield frame


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiles(frame: FrameType) -> bool:
    """Whether the thread of a frame is compiling, tracing or planning."""
    files = (x.f_code.co_filename for x in _outwards(frame))
    return any(part in file for file in files for part in _COMPILES)


def _user_frame(ident: int) -> str:
    """The innermost frame of a thread in the user's code.

    If no frame of the thread is in the user's code, the result is its innermost frame.
    """
    frames = list(_outwards(_frames().get(ident)))
    own = [x for x in frames if not x.f_code.co_filename.startswith(_OTHERS)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    name = os.path.basename(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def stacks_text() -> str:
    """Python stacks of all threads but the calling one, main thread first, as text."""
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
