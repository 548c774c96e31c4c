"""The time limit of a whole search for a plan (the option ``planning_seconds``).

The limit counts seconds of a clock on the wall, so that it also bounds work other than
the solver's. The search asks between two pieces of work whether the limit is over.

- If a plan is known, the search then ends with it: `stop_if_over` raises
  `OutOfTimeError`, and the nearest caller that holds a plan catches the error.
- If no plan is known, the search goes on to the first plan. Each problem then gets only
  `LATE_S` seconds, and each search only the first mesh that has a plan.

Without the option nothing here reads a clock.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import time
from collections.abc import Callable, Generator

# Time limit of the solver for a problem that begins after the limit, in seconds.
LATE_S = 0.5
# The most names of untried proposals that a plan lists.
_NAMED = 8


class OutOfTimeError(Exception):
    """The time limit is over, and a plan is known; it never leaves the planner."""


@dataclasses.dataclass
class _Deadline:
    """The limit of a search, and what the search did because of it.

    Attributes:
      seconds: the limit.
      clock: returns the time in seconds.
      end_s: time of the clock at which the limit is over.
      has_plan: whether a plan of the whole step is known.
      untried: names of what was not tried, in order, each once.
    """

    seconds: float
    clock: Callable[[], float]
    end_s: float
    has_plan: bool = False
    untried: dict[str, None] = dataclasses.field(default_factory=dict[str, None])


_DEADLINE: contextvars.ContextVar[_Deadline | None] = contextvars.ContextVar(
    "autopar_deadline", default=None
)


@contextlib.contextmanager
def deadline(
    seconds: float | None, clock: Callable[[], float] = time.monotonic
) -> Generator[None]:
    """Limits the searches in the ``with`` block; inside another limit it does nothing.

    Args:
      seconds: the limit of all searches together; None: no limit.
      clock: returns the time in seconds.
    """
    if seconds is None or _DEADLINE.get() is not None:
        yield
        return
    token = _DEADLINE.set(_Deadline(seconds, clock, clock() + seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


@contextlib.contextmanager
def new_search() -> Generator[Callable[[], str]]:
    """A search that knows no plan yet, in which nothing was left out.

    Yields a function that returns the names of what was not tried; '' if the search
    was not cut short.
    """
    known = _DEADLINE.get()
    if known is not None:
        known.has_plan = False
        known.untried.clear()
    yield _untried_text


def left_s() -> float:
    """Returns the seconds that are left; infinity without a limit."""
    known = _DEADLINE.get()
    return math.inf if known is None else known.end_s - known.clock()


def is_over() -> bool:
    """Whether the limit is over."""
    return left_s() <= 0.0


def end_text() -> str:
    """Returns the option that ended the search, as text; '' if none did."""
    known = _DEADLINE.get()
    return f"planning_seconds={known.seconds:g}" if known and is_over() else ""


def keep_plan() -> None:
    """Says that a plan of the whole step is known."""
    known = _DEADLINE.get()
    if known is not None:
        known.has_plan = True


def leave_untried(what: str) -> None:
    """Notes that something is not tried, because the limit is over."""
    known = _DEADLINE.get()
    if known is not None:
        known.untried[what] = None


def stop_if_over(what: str) -> None:
    """Raises `OutOfTimeError` if the limit is over and a plan is known.

    Args:
      what: name of the work that would come next; it is noted as not tried.
    """
    known = _DEADLINE.get()
    if known is not None and known.has_plan and is_over():
        leave_untried(what)
        raise OutOfTimeError(what)


def limited_s(seconds: float | None) -> float | None:
    """Returns the time limit of a problem, which also ends with the whole limit.

    Args:
      seconds: the problem's own limit; None: none.
    """
    rest_s = left_s()
    if rest_s == math.inf:
        return seconds
    own_s = math.inf if seconds is None else seconds
    return max(min(own_s, rest_s), min(own_s, LATE_S))


def timer_for(seconds: float | None) -> Callable[[], float]:
    """Returns the timer of a problem with a limit from `limited_s`.

    The limit of a problem counts CPU seconds of the thread. The timer also runs out if
    the whole limit is over, or `LATE_S` later than now for a problem that began late.
    """
    known = _DEADLINE.get()
    if known is None or seconds is None:
        return time.thread_time
    begin_s = time.thread_time()
    end_s = max(known.end_s, known.clock() + seconds)
    clock, limit_s = known.clock, seconds

    def elapsed_s() -> float:
        return max(time.thread_time() - begin_s, limit_s - (end_s - clock()))

    return elapsed_s


def _untried_text() -> str:
    known = _DEADLINE.get()
    if known is None or not known.untried:
        return ""
    names = list(known.untried)
    more = len(names) - _NAMED
    text = "; ".join(names[:_NAMED])
    return f"{text}; and {more} more" if more > 0 else text
