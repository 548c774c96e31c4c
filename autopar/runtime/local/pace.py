"""Measures what steps and outer steps take, so that `Auto` may choose their numbers."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import jax

from autopar.runtime.world import Channel

# Steps that are measured, after the first ones, which compile.
_FIRST, _STEPS = 2, 5


class Pace:
    """Measures the first steps and outer steps of this process in a training.

    The device waits for each of them meanwhile. The first outer step of each fragment
    compiles, so the second one is measured.
    """

    def __init__(
        self, fragments: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Starts without measurements.

        Args:
          fragments: number of fragments.
          clock: returns the present time in seconds.
        """
        self._clock = clock
        self._begin_s = 0.0
        self._steps: list[float] = []
        self._outer: list[list[float]] = [[] for _ in range(fragments)]

    def begin(self, arrays: Any) -> None:
        """Begins to measure, once the given arrays are computed."""
        jax.block_until_ready(arrays)
        self._begin_s = self._clock()

    def _elapsed_s(self, arrays: Any) -> float:
        jax.block_until_ready(arrays)
        return self._clock() - self._begin_s

    def end_step(self, arrays: Any) -> None:
        """Ends a step, which has computed these arrays."""
        self._steps.append(self._elapsed_s(arrays))

    def end_outer(self, fragment: int, arrays: Any) -> None:
        """Ends an outer step of a fragment, which has computed these arrays."""
        self._outer[fragment].append(self._elapsed_s(arrays))

    @property
    def is_complete(self) -> bool:
        """Whether all is measured; equal steps are complete in all processes."""
        enough = len(self._steps) >= _FIRST + _STEPS
        return enough and all(len(found) >= 2 for found in self._outer)

    def slowest_s(self, channel: Channel) -> tuple[float, list[float]]:
        """Seconds of a step, and of an outer step of each fragment.

        They are those of the slowest process, and equal in all.

        Args:
          channel: between the processes, all of which call this.
        """
        own = statistics.median(self._steps[_FIRST:])
        found = [own, *(seconds[-1] for seconds in self._outer)]
        form = f"<{len(found)}d"
        told = channel.gather(struct.pack(form, *found))
        step, *outer = map(
            max, zip(*(struct.unpack(form, x) for x in told), strict=True)
        )
        return step, outer
