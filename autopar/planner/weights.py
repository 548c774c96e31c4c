"""Weights of work and communication that may overlap, in the layout problem.

The forward and the backward pass are each cut into segments. Communication that may
overlap with work has a *window*: the segments in which it may run. The window of a
gather goes from the start of the pass to the segment of its reader. The window of a
gradient's sum goes from the segment in which the gradient is complete to the end of the
update.

A *stretch* is a sequence of segments that begins at the start of a pass or ends at its
end. Communication is *exposed* if it does not overlap with work. The seconds of exposed
communication of a stretch have two lower bounds: 0, and the communication whose windows
lie within the stretch minus the work in the stretch (the interval bound of preemptive
scheduling on one machine, Horn 1974).

Each stretch gets a weight, a number from 0 to 1. Adding the second bounds, times these
weights, to the seconds of work gives a sum over single decisions, which the solver can
minimise. If the weights of each pass add up to at most 1, the least sum is a lower
bound of the step of every plan. The weights of stretches determine a weight for each
*kind* of seconds: those of work, gathers and sums in each segment.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from autopar.cluster.specs import Calibration
from autopar.cost.codecs import Prices
from autopar.cost.combining import Group
from autopar.cost.overlap import Timeline
from autopar.steps.positions import SEGMENTS, Positions
from autopar_solver import highest_minimum

# Maps each group of devices to the bytes of its largest message.
Messages = tuple[tuple[Group, float], ...]

# The number of kinds of work: one for each segment of both passes, and one for the
# update. The number of kinds of gathers: one for each segment of both passes. The kinds
# of sums are the segments of the backward pass.
_WORK, _GATHERS = 2 * SEGMENTS + 1, 2 * SEGMENTS
KINDS = _WORK + _GATHERS + SEGMENTS


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The factor by which the problem multiplies seconds of each kind.

    Seconds that belong to no kind have weight 1.

    Attributes:
      work: weights of work in each segment of the forward pass and of the backward
        pass, and in the update.
      gathers: weights of gathers whose reader is in each segment of both passes.
      sums: weights of sums whose operand is complete in each segment of the backward
        pass.
    """

    work: tuple[float, ...]
    gathers: tuple[float, ...]
    sums: tuple[float, ...]

    @property
    def kinds(self) -> np.ndarray:
        """All weights, float64 ``[KINDS]``."""
        return np.array((*self.work, *self.gathers, *self.sums))

    @property
    def works(self) -> bool:
        """Whether all work has weight 1."""
        return min(self.work) == 1.0

    def with_least(self, least: float) -> Weights:
        """Returns weights from ``least`` to 1: a weight ``w`` becomes
        ``least + (1 - least) * w``.
        """
        return _of_kinds(least + (1.0 - least) * self.kinds)


def _of_kinds(kinds: np.ndarray) -> Weights:
    """Makes weights from an array of all kinds; the inverse of `Weights.kinds`."""
    work, gathers, sums = np.split(kinds, (_WORK, _WORK + _GATHERS))
    return Weights(tuple(work), tuple(gathers), tuple(sums))


def partly(gathers: float, sums: float) -> Weights:
    """Weights of 1 for all work, and given weights for gathers and for sums."""
    return Weights((1.0,) * _WORK, (gathers,) * _GATHERS, (sums,) * SEGMENTS)


# WHOLE counts all communication in full. HIDDEN counts no communication that may
# overlap with work.
WHOLE, HIDDEN = partly(1.0, 1.0), partly(0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class CommunicationWay:
    """How a problem counts the seconds of communication.

    Attributes:
      weights: weights of seconds that may overlap with other seconds.
      messages: bytes of the message that arrays of a group share. Each array pays for
        a fraction of the message's latency, in proportion to its bytes. An array of a
        group that is not listed has its own message. None: all arrays that may share a
        message do so.
      small: whether small state stays unsharded
        (`autopar.planner.problem.small_state`).
      prices: the prices of a codec's error and of the links, with which gradients may
        be sent by codecs; None: no codecs.
    """

    weights: Weights
    messages: Messages | None = None
    small: bool = False
    prices: Prices | None = None

    @property
    def name(self) -> str:
        """Name of the way in reports."""
        some = self.weights
        text = f"solver: gathers {some.gathers[0]:.2g}, sums {some.sums[0]:.2g}"
        if not some.works:
            text = "solver: bound"
        elif some == HIDDEN:
            text = "solver: all hidden"
        if self.messages is not None:
            text += ", messages of a plan" if self.messages else ", messages apart"
        text += ", small state whole" if self.small else ""
        return text + (", with codecs" if self.prices is not None else "")

    @property
    def bounds(self) -> bool:
        """Whether the problem's least cost may be a lower bound of every plan."""
        plain = self.messages is None and self.prices is None
        whole = not self.small and plain
        return whole and (self.weights == HIDDEN or not self.weights.works)


def in_kinds(
    work: np.ndarray | float, gathers: np.ndarray | float, sums: np.ndarray | float
) -> np.ndarray:
    """Concatenates the seconds of all kinds, or fractions of them, to one array.

    Args:
      work: ``[2 * SEGMENTS + 1, ...]``.
      gathers: ``[2 * SEGMENTS, ...]``.
      sums: ``[SEGMENTS, ...]``.
    """
    return np.concatenate(
        [
            np.broadcast_to(seconds, (count, *np.shape(seconds)[1:]))
            for seconds, count in ((work, _WORK), (gathers, _GATHERS), (sums, SEGMENTS))
        ]
    )


def lower_seconds(
    weights: Weights, seconds: np.ndarray, parts: np.ndarray
) -> np.ndarray:
    """Multiplies seconds by weights, given which fraction of them is of each kind.

    Infinite seconds stay infinite.
    """
    factor = 1.0 - float((1.0 - weights.kinds) @ parts)
    if factor == 1.0:
        return seconds
    finite = np.isfinite(seconds)
    return np.where(finite, factor * np.where(finite, seconds, 0.0), seconds)


@functools.cache
def _stretches() -> tuple[np.ndarray, np.ndarray]:
    """Returns the stretches, as two arrays.

    Returns:
      The first array states for each stretch which kinds of seconds have their window
      or work in it, bool ``[stretches, KINDS]``. The second array states for each pass
      which stretches belong to it, bool ``[2, stretches]``.
    """
    index = np.arange(SEGMENTS)
    rows: list[np.ndarray] = []
    passes: list[int] = []
    for number in range(2):
        spans = [(0, end) for end in range(1, SEGMENTS + 1)]
        spans += [(start, SEGMENTS) for start in range(1, SEGMENTS)] if number else []
        for start, end in spans:
            inside = (index >= start) & (index < end)
            none = np.zeros(SEGMENTS, bool)
            last = bool(number) and end == SEGMENTS
            own = inside, inside if not start else none
            work, gathers = (
                np.concatenate([none, x] if number else [x, none]) for x in own
            )
            sums = inside if last else none
            rows.append(np.concatenate([work, [last], gathers, sums]))
            passes.append(number)
    return np.array(rows), np.array([[p == n for p in passes] for n in range(2)])


def nowhere() -> np.ndarray:
    """Zero weights of all stretches, float64 ``[stretches]``."""
    return np.zeros(len(_stretches()[0]))


def highest(planes: Sequence[Plane], share: float) -> tuple[np.ndarray, float]:
    """Returns the stretches' weights at which the least value of all planes is largest.

    Args:
      planes: the planes of the plans that are known so far.
      share: the fraction of work that communication may overlap with.

    Returns:
      The weights, float64 ``[stretches]``, and the minimum there, in seconds.
    """
    base = np.array([plane.base_s for plane in planes])
    slopes = np.array([plane.slopes(share) for plane in planes])
    _, passes = _stretches()
    found = highest_minimum(base, slopes, passes)
    return found, float((base + slopes @ found).min())


def weights_of(stretches: np.ndarray, known: Calibration) -> Weights:
    """Returns the weights of a problem for given weights of stretches; see `nowhere`.

    Args:
      stretches: float64 ``[stretches]``.
      known: measurements of how communication and work overlap.
    """
    inside, _ = _stretches()
    counted = np.minimum((stretches @ inside).round(4), 1.0)
    if not known.whole_messages:
        counted[_WORK - 1] = 0.0
    counted[:_WORK] = 1.0 - known.overlap * counted[:_WORK]
    return _of_kinds(counted)


@dataclasses.dataclass(frozen=True, eq=False)
class Plane:
    """A lower bound of one plan's step, as a linear function of stretches' weights.

    Attributes:
      base_s: seconds of a step in which all communication that can be hidden is hidden.
      kinds: seconds of each kind that affect the exposed communication.
    """

    base_s: float
    kinds: np.ndarray

    def slopes(self, share: float) -> np.ndarray:
        """Communication minus work of each stretch, in seconds; may be negative."""
        signs = np.concatenate([np.full(_WORK, -share), np.ones(KINDS - _WORK)])
        inside, _ = _stretches()
        return inside @ (signs * self.kinds)


def plane_of(
    places: Positions, seconds: float, passes: Sequence[Timeline], known: Calibration
) -> Plane:
    """Returns the plane of a plan.

    Args:
      places: the segment of each operator.
      seconds: seconds of a step under the plan.
      passes: work and communication of the plan's passes.
      known: measurements of how communication and work overlap.
    """
    rest, share = 1.0 - known.contention, known.overlap
    exposed_s = sum(one.exposed_s(share) for one in passes)
    forward, backward = (
        [places.by_segment(n, x) for x in (one.work, one.gathers, one.sums)]
        for n, one in enumerate(passes)
    )
    kinds = in_kinds(
        np.concatenate([forward[0], backward[0], [passes[1].after_s]]),
        np.concatenate([forward[1], backward[1]]),
        backward[2],
    )
    return Plane(seconds - rest * exposed_s, rest * kinds)
