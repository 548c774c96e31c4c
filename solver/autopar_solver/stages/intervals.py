"""Minimises a sum and a maximum together by cutting the maximum's range.

``least(peak)`` is the least sum over choices whose maximum is at most ``peak``, or a
bound of it; it falls as ``peak`` grows. Choices with their maximum in an interval
``(low, high]`` come to no less than ``least(high) + low``. The interval of least bound
is halved until no bound is left below what is known.
"""

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    """The least sum under a limit, and the maximum of a choice that has it.

    Without such a choice, ``peak`` is the limit itself.
    """

    value: float
    peak: float


class Interval(NamedTuple):
    """Choices whose maximum is above ``low`` and at most ``high`` are bounded."""

    bound: float
    low: float
    high: float
    value: float


def cut_intervals(
    least: Callable[[float], Answer],
    low: float,
    high: float,
    cutoff: Callable[[], float],
    most: int,
    beside: int = 0,
) -> tuple[float, list[Interval]]:
    """Bounds all choices with a maximum above ``low``.

    Args:
        least: the least sum under a limit; ``inf`` if there is no choice.
        low: every choice's maximum is at least this.
        high: choices with a larger one do not matter.
        cutoff: bounds above it do not matter; it may fall.
        most: how many limits to try.
        beside: how many of them once a choice is known that has the bound: they no
            longer raise it, but may come upon other choices.

    Returns:
        A bound of the sum and the maximum, and the intervals that are still below the
        cutoff. The bound is at most the cutoff, where nothing is below it.
    """
    open_ = list[Interval]()
    closed = math.inf

    def add(answer: Answer, low: float, high: float) -> None:
        """Choices in ``[answer.peak, high]`` are done; those below are open."""
        nonlocal closed
        if answer.value == math.inf:
            return
        if answer.peak < high or answer.peak <= low:
            closed = min(closed, answer.value + max(answer.peak, low))
        top = min(answer.peak, high)
        if top > low:
            interval = Interval(answer.value + low, low, top, answer.value)
            heapq.heappush(open_, interval)

    add(least(high), low, high)
    for _ in range(most):
        if not open_ or open_[0].bound >= cutoff():
            break
        if open_[0].bound >= closed:
            beside -= 1
            if beside < 0:
                break
        bound, low, high, value = heapq.heappop(open_)
        middle = (low + high) / 2
        if not low < middle < high:
            closed = min(closed, bound)
            continue
        heapq.heappush(open_, Interval(value + middle, middle, high, value))
        add(least(middle), low, middle)
    left = [interval for interval in open_ if interval.bound < cutoff()]
    bound = min([closed, cutoff(), *(interval.bound for interval in left)])
    return bound, left
