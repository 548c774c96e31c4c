"""Lanes: threads of a process that each exchange with the same thread of the others.

What processes exchange is matched by number: each must make the same calls in the same
order. Two threads of a process cannot keep an order between them, so what is done
beside the steps has a lane of its own, with its own numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator

_LANE: contextvars.ContextVar[str] = contextvars.ContextVar("autopar_lane", default="")


@contextlib.contextmanager
def within(name: str) -> Generator[None]:
    """Lets this thread exchange in a lane.

    Args:
      name: of the lane: the same in all processes, and of no other lane, as the numbers
        of one that was left go on.
    """
    token = _LANE.set(name)
    try:
        yield
    finally:
        _LANE.reset(token)


def current() -> str:
    """The lane of this thread; '' is that of the steps."""
    return _LANE.get()
