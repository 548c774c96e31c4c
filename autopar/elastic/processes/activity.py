"""What a worker does now, as its heartbeats say it; the stacks of its threads.

The training loop marks where it is. The thread of the link reads the marks, so that a
loop that hangs, in a collective too, is still described. Nothing here imports JAX.
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

# Where a loop may be, in the order of a step: it asks whether the step may start, reads
# samples, is inside the compiled program, keeps the state, saves, and is back in the
# script. Behind the last step it waits for the others.
PLACES = ("order", "samples", "program", "after", "save", "script", "finish")
# Steps of a world that count for no statistics: they compile and connect.
FIRST_STEPS = 3
# So many steps are in a median; the longest is of these last ones, at least.
_RECENT, _REMEMBERED = 20, 1000
# A loop that has been at a place for so long is looked at more closely.
_LOOK_S = 2.0
# Modules of which one is on the stack of a thread that compiles, traces or plans.
_COMPILES = (
    "jax/_src/compiler.py",
    "jax/_src/interpreters/mlir.py",
    "jax/_src/interpreters/partial_eval.py",
    "autopar/planner/",
    "autopar/runtime/compiler.py",
)
# Threads that work for the loop, by the beginning of their names.
_HELPERS = ("step_", "stage_", "waits for others")
# Files of Python, of installed packages and of autopar are not the user's own.
_OTHERS = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{pathlib.Path(__file__).parents[2]}/",
    "<",
)


class Activity:
    """The place of a training loop, and how long its steps take.

    One thread marks, another one reads.

    Attributes:
      program: name of the step that is compiled.
      tasks: says which task of a step of stages this process is in; None: there is one
        stage.
      sent_bytes: bytes that a device sends in a step, as the plan predicts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The loop has not begun.

        Args:
          clock: seconds now.
        """
        self._clock = clock
        self.program = ""
        self.tasks: Callable[[], Mapping[str, Any]] | None = None
        self.sent_bytes: float | None = None
        self._done: Mapping[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a world: what its steps take is measured anew."""
        self._mark: tuple[str, int, float, int] = ("order", -1, self._clock(), 0)
        # The mark that the last heartbeat found, when, and the seconds of a CPU then.
        self._found = (self._mark, 0.0, 0.0)
        self._spent: dict[str, float] = dict.fromkeys(PLACES, 0.0)
        self._steps = 0
        # Replaced as a whole, as another thread reads them.
        self._own: tuple[tuple[float, float], ...] = ()
        self._seconds: tuple[float, ...] = ()
        # The longest step of the last ones, and of as many before them.
        self._longest_s, self._longest_before_s = 0.0, 0.0

    def enter(self, place: str, step: int) -> None:
        """The loop is at a place of a step from now on.

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
        """Takes the time of a step."""
        self._seconds = (*self._seconds[1 - _RECENT :], seconds)
        if self._steps % _REMEMBERED == 0:
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
        self._longest_s = max(self._longest_s, seconds)

    def done(self, step: int, position: int, batch: int, loss: float | None) -> None:
        """Takes what is known of the last step.

        Args:
          step: number of steps done.
          position: number of samples consumed.
          batch: samples of the step.
          loss: the last one that the loop has brought to the host; None: none.
        """
        self._done = {"done": step, "position": position, "batch": batch, "loss": loss}

    def data(self) -> dict[str, Any]:
        """What a heartbeat says: `PLACES`, seconds, and what the loop waits for."""
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
            with contextlib.suppress(Exception):  # who looks must not end the beats
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
    """Seconds for which a thread has had a CPU; 0: there is none, or it has ended."""
    if not ident:
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return 0.0


def _frames() -> Mapping[int, FrameType]:
    """The innermost frame of each thread; the documented way to have them."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]


def _working(ident: int) -> Iterator[FrameType]:
    """The innermost frames of a thread, and of those that work for the loop."""
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
    """The innermost frame of a thread in the user's own files; else the innermost."""
    frames = list(_outwards(_frames().get(ident)))
    own = [x for x in frames if not x.f_code.co_filename.startswith(_OTHERS)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    name = os.path.basename(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def stacks_text() -> str:
    """The Python stacks of all other threads of this process, the main one first."""
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
