"""The compiler's combiners, which join several collectives into one message.

XLA joins collectives of one kind over the same groups of devices, of one element type
and in one computation, if none needs the result of another
(``xla/service/collective_combiner_utils.h``, ``all_reduce_combiner.cc``,
``all_gather_combiner.cc`` and ``reduce_scatter_combiner.cc`` in openxla/xla). Each
message costs the latency of its link once, however many arrays it carries.

`autopar.steps.independence` finds the collectives that need no result of another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from autopar.cluster.specs import Calibration
from autopar.layouts.assignment import Assignment

SUMS = frozenset({"all_reduce", "reduce_scatter"})
GATHERS = frozenset({"all_gather"})
ALONE = frozenset[str]()

# Kind and mesh axes of a collective. Collectives of one group may share a message.
Group = tuple[str, tuple[int, ...]]
# The place of a collective in the program: its computation (given by the last operator
# of the innermost loop or branch), its barrier, and its element type. Only collectives
# with the same place may share a message. The barrier is the equation of the
# optimization barrier after which the collective runs, or one of the values `FREE`,
# `NORMS` and `UPDATED`.
Place = tuple[int, int, str]
# In place of a barrier: the collective runs after no barrier.
FREE = -1
# In place of a barrier: the collective sums a norm in the update. It needs scattered
# sums of gradients.
NORMS = -2
# In place of a barrier: the collective gathers a result of the update. It comes after
# the gathers of the forward and backward passes.
UPDATED = -3


@dataclasses.dataclass(frozen=True, slots=True)
class Combiner:
    """The collectives that one compiler joins, and the limits of a message.

    Attributes:
      kinds: the kinds of collectives that the compiler joins.
      most_bytes: the largest number of bytes of results in one message. A larger array
        has a separate message.
      most_arrays: the largest number of arrays in one message.
    """

    kinds: frozenset[str]
    most_bytes: float
    most_arrays: int

    def bytes_of_messages(self, sizes: Iterable[float]) -> list[float]:
        """For each array, the bytes of the message that carries it.

        Arrays are taken in order. An array that would make a message too large begins
        the next message (``CombineInstructionsByKey`` in
        ``xla/service/collective_combiner_utils.h``).

        >>> from autopar.cluster.specs import CALIBRATIONS
        >>> combiner = combiner_of(CALIBRATIONS["gpu"])
        >>> combiner.bytes_of_messages([10e6, 20e6, 10e6, 40e6, 5e6])
        [30000000.0, 30000000.0, 15000000.0, 40000000.0, 15000000.0]
        """
        known = list(sizes)
        out = [0.0] * len(known)
        for message in self.messages(known):
            nbytes = sum(known[place] for place in message)
            for place in message:
                out[place] = nbytes
        return out

    def messages(self, sizes: Sequence[float]) -> list[list[int]]:
        """The indices of the arrays in each message; see `bytes_of_messages`."""
        together: list[list[int]] = [[]]
        alone: list[list[int]] = []
        total = 0.0
        for place, size in enumerate(sizes):
            if size > self.most_bytes:
                alone.append([place])
                continue
            total += size
            if total > self.most_bytes or len(together[-1]) == self.most_arrays:
                together.append([])
                total = size
            together[-1].append(place)
        return [m for m in (*together, *alone) if m]


# A combiner that joins nothing: every collective is a separate message.
NO_COMBINER = Combiner(frozenset(), 0.0, 1)


@functools.lru_cache(maxsize=64)
def combiner_of(calibration: Calibration) -> Combiner:
    """The combiner of a device's compiler."""
    return Combiner(
        frozenset(calibration.combined_kinds),
        calibration.combined_bytes,
        calibration.combined_arrays,
    )


def is_moved(assignment: Assignment, value: int, computation: int) -> bool:
    """Whether XLA's GPU compiler moves a sum into the next iteration of its loop.

    It moves only sums that the program writes as collectives: the compiler turns other
    partial results into sums after it has moved sums (jax 0.10.2).

    Args:
      assignment: strategies as layouts.
      value: the sum.
      computation: the last operator of the computation that runs the sum.
    """
    return computation < len(assignment.graph.operators) and bool(
        assignment.sums(value)
    )
