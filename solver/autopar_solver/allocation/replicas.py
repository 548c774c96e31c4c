"""How many microbatches each of several unequal replicas runs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from autopar_errors import InputError


def deal_out(seconds: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """Deals microbatches out so that the last replica ends as early as can be.

    Each replica gets one; every other goes to the replica that would end first with
    one more. For seconds that do not decrease this is the least of the largest
    (T. Ibaraki, N. Katoh, "Resource Allocation Problems: Algorithmic Approaches", 1988,
    the minimax problem with separable objectives).

    Args:
      seconds: of each replica, those of 1, 2, 3 ... microbatches, not decreasing; as
        many as it may have at most.
      count: how many microbatches there are.

    Returns the number of each replica.

    Raises:
      InputError: there are too few for each replica to have one, or too many for
        what they may have; or seconds decrease.

    >>> deal_out([[1, 2, 3, 4], [2, 4, 6, 8]], 3)
    (2, 1)
    >>> deal_out([[1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8, 10, 12, 14, 16]], 12)
    (8, 4)
    """
    if any(b < a for row in seconds for a, b in itertools.pairwise(row)):
        raise InputError("deal_out: seconds must not decrease with microbatches.")
    most = sum(len(row) for row in seconds)
    if not (len(seconds) <= count <= most and all(seconds)):
        raise InputError(
            f"deal_out: {count} microbatches for {len(seconds)} replicas, which may "
            f"have {most} together and need one each."
        )
    counts = [1] * len(seconds)
    ahead = [(row[1], k) for k, row in enumerate(seconds) if len(row) > 1]
    heapq.heapify(ahead)
    for _ in range(count - len(seconds)):
        _, k = heapq.heappop(ahead)
        counts[k] += 1
        if counts[k] < len(seconds[k]):
            heapq.heappush(ahead, (seconds[k][counts[k]], k))
    return tuple(counts)
