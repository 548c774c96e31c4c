"""What is left of a job, from jobs of the same program that have ended.

Gittins' index is the best rate of ends by work: the largest share of jobs that end in
the next so much work, over the work that they take until then or until their end.
Serving jobs by this index makes the mean completion time least where only the
distribution of their work is known (Gittins, 1979). Here its inverse stands for the
work that is left. A job that has outlived the short ones has more left than a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sureness(wholes: Sequence[float]) -> float:
    """How much a prediction from jobs that ended says of another, 0 to 1.

    ``1 / (1 + v)`` with ``v`` the squared coefficient of variation of their work: the
    share that the mean has in the mean square. It is 1 where all have the same work.

    Args:
      wholes: the whole work of jobs that ended; fewer than two say nothing of it, for
        which 1 is returned.

    >>> sureness([10.0, 10.0, 10.0])
    1.0
    >>> sureness([0.0, 20.0])
    0.5
    """
    work = np.asarray(wholes, float)
    square = float(np.mean(work**2)) if len(work) > 1 else 0.0
    return float(np.mean(work)) ** 2 / square if square > 0 else 1.0


def gittins_left(wholes: Sequence[float], done: float) -> float:
    """The inverse of Gittins' index, in units of work.

    Args:
      wholes: the whole work of jobs that ended, at least one.
      done: the work that a job has done. One that has done more than all of them has
        as much left as it has done.

    >>> gittins_left([10.0, 1000.0], 0.0)
    20.0
    >>> gittins_left([10.0, 1000.0], 10.0)
    990.0
    """
    longer = np.sort(np.asarray(wholes, float))
    longer = longer[longer > done] - done
    if not len(longer):
        return done
    ended = np.arange(1, len(longer) + 1)
    # Until the k-th ends, k jobs worked to their ends and the others as long as it.
    worked = np.cumsum(longer) + longer * (len(longer) - ended)
    return float((worked / ended).min())


def mean_left(wholes: Sequence[float], done: float) -> float:
    """The mean of what is left, in units of work.

    Args:
      wholes: as for `gittins_left`, with the same answer for one that has done more.
      done: the work that a job has done.

    >>> mean_left([10.0, 1000.0], 0.0)
    505.0
    """
    longer = [work - done for work in wholes if work > done]
    return sum(longer) / len(longer) if longer else done
