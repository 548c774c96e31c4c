"""The compiler's combiners: they join collectives into one message.

XLA joins collectives of one kind over the same groups of devices, of one element
type and in one computation, where none needs the result of another
(``xla/service/collective_combiner_utils.h``, ``all_reduce_combiner.cc``,
``all_gather_combiner.cc`` and ``reduce_scatter_combiner.cc`` in openxla/xla). Then a
message pays the latency of its link once, however many arrays it carries.

`autopar.steps.independence` finds the collectives that need no other's result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from autopar.cluster.specs import Calibration

SUMS = frozenset({"all_reduce", "reduce_scatter"})
GATHERS = frozenset({"all_gather"})
ALONE = frozenset[str]()

# Kind and mesh axes: collectives of one group may share a message.
Group = tuple[str, tuple[int, ...]]
# Computation (the last operator of the innermost loop or branch), the barrier that it
# is behind (its equation; `FREE`: none; `NORMS`; or
# `UPDATED`), and element type.
Place = tuple[int, int, str]
# Behind no barrier.
FREE = -1
# Sums of the update, made of scattered sums of gradients.
NORMS = -2
# Gathers of what the update makes, which need the gathers of the passes.
UPDATED = -3


@dataclasses.dataclass(frozen=True, slots=True)
class Combiner:
    """The collectives that one compiler joins, and the limits of a message.

    Attributes:
      kinds: of collectives.
      most_bytes: of the results of one message; a larger array travels alone.
      most_arrays: in one message.
    """

    kinds: frozenset[str]
    most_bytes: float
    most_arrays: int

    def bytes_of_messages(self, sizes: Iterable[float]) -> list[float]:
        """The bytes of the message that each array travels in.

        Arrays are taken in order; one that would make a message too large begins
        the next (``CombineInstructionsByKey`` in the first of the files above).

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
        """The places of the arrays that travel together; see `bytes_of_messages`."""
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


# Joins nothing: every collective travels alone.
NO_COMBINER = Combiner(frozenset(), 0.0, 1)


@functools.lru_cache(maxsize=64)
def combiner_of(calibration: Calibration) -> Combiner:
    """The combiner of a kind of device."""
    return Combiner(
        frozenset(calibration.combined_kinds),
        calibration.combined_bytes,
        calibration.combined_arrays,
    )
