"""What a step is worth in seconds where the learning rate falls with the steps.

Schedules count steps, so a step at a large rate is spent once. With ``gain`` the part
of a dense step's progress that a level makes, ``pace`` its seconds of a step, and
``rate`` the learning rate, a training that ends at step K has made::

    progress = sum over steps k of rate(k) gain(k)        in    sum of pace(k)  seconds

For the least seconds for some progress, each step takes the level with the largest
``worth rate(k) gain - pace``, ``worth`` being the seconds that are paid for a unit of
progress. Where K is free, the last step breaks even, so that with ``best`` the largest
``gain / pace`` of a level::

    worth = 1 / (rate(K) best)                            (Pontryagin's principle)
    price = max over levels of  gain falls / best - pace,   falls = rate(k) / rate(K)

The level that is then largest is that with the largest ``gain / (pace + price)``: the
steps left are worth ``price`` seconds each. With a rate that stays it is 0, and levels
are compared by progress per second. Where it falls levels with a larger gain are worth
their slower steps, for the rate at which the rest would have to be caught up is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar_errors import InputError


def check_rate(rate: Callable[[int], Any], steps: int) -> None:
    """Raises `InputError` unless the rate of the last step is positive."""
    if steps < 1:
        raise InputError(
            f"GraVAC: rate needs the number of steps it is for, got steps={steps}; "
            "say steps=10_000 for a training that may end after so many."
        )
    last = float(rate(steps))
    if not (math.isfinite(last) and last > 0.0):
        raise InputError(
            f"GraVAC: rate({steps}) must be positive, got {last}. Steps at "
            "a rate of 0 make no progress; state a smaller number of steps, by which "
            "the training may have reached what it is for."
        )


def falls_by(rate: Callable[[int], Any], step: int, steps: int) -> float:
    """The rate of a step over that of the last one, at least 1.

    >>> falls_by(lambda k: 1.0 / (1 + k), 1, 9)
    5.0
    """
    return max(1.0, float(rate(min(step, steps))) / float(rate(steps)))


def step_price_s(levels: Sequence[tuple[float, float]], falls: float) -> float:
    """What a step is worth beside its own seconds; see the module.

    Args:
      levels: the gain and the seconds of a step of each.
      falls: rate of this step over that of the last one.

    >>> step_price_s([(0.9, 3.0), (0.6, 1.0)], 1.0)
    0.0
    >>> step_price_s([(0.9, 3.0), (0.6, 1.0)], 4.0)
    3.0
    """
    best = max((gain / pace for gain, pace in levels), default=0.0)
    if best <= 0.0:
        return 0.0
    return max(0.0, *(gain * falls / best - pace for gain, pace in levels))
