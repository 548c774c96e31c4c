"""How much seconds count in a problem that may run beside others.

A pass is cut into segments. Communication that nothing waits for has a window: gathers
from the start of the pass to the segment of their reader, sums from the segment in
which they are complete to the end of the update. So a stretch of segments, from the
start of a pass or to its end, exposes at least the communication whose windows lie
within, less the work there (the interval bound of preemptive scheduling on one machine,
Horn 1974), and at least nothing.

Weights of stretches make that a sum over decisions. For weights of which those of a
pass add up to at most 1, the least sum is a lower bound of the time of every plan.
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

# Bytes of the largest message of each group.
Messages = tuple[tuple[Group, float], ...]

# Kinds of seconds, each by segment: work of both passes and of the update, gathers of
# both passes, and sums.
_WORK, _GATHERS = 2 * SEGMENTS + 1, 2 * SEGMENTS
KINDS = _WORK + _GATHERS + SEGMENTS


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """How much seconds of each kind count, those of no kind being 1.

    Attributes:
      work: of each segment of the forward pass and of the backward pass, and of the
        update.
      gathers: ahead of readers in each segment of both passes.
      sums: that are complete in each segment of the backward pass.
    """

    work: tuple[float, ...]
    gathers: tuple[float, ...]
    sums: tuple[float, ...]

    @property
    def kinds(self) -> np.ndarray:
        """All of them; float64 ``[KINDS]``."""
        return np.array((*self.work, *self.gathers, *self.sums))

    @property
    def works(self) -> bool:
        """Whether all work counts."""
        return min(self.work) == 1.0

    def with_least(self, least: float) -> Weights:
        """The same where what is hidden still counts at least so much."""
        return _of_kinds(least + (1.0 - least) * self.kinds)


def _of_kinds(kinds: np.ndarray) -> Weights:
    """The weights of all kinds; see `Weights.kinds`."""
    work, gathers, sums = np.split(kinds, (_WORK, _WORK + _GATHERS))
    return Weights(tuple(work), tuple(gathers), tuple(sums))


def partly(gathers: float, sums: float) -> Weights:
    """Weights of communication that may be hidden, where all work counts."""
    return Weights((1.0,) * _WORK, (gathers,) * _GATHERS, (sums,) * SEGMENTS)


# Everything counts; what may be hidden is.
WHOLE, HIDDEN = partly(1.0, 1.0), partly(0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class CommunicationWay:
    """How the communication of a problem counts.

    Attributes:
      weights: of what may be hidden.
      messages: bytes of messages by group, of which each array pays its part; an array
        of another group has its own message. None: one may hold all that may be joined.
      small: whether small state stays whole (`autopar.planner.problem.small_state`).
      prices: with them gradients may be sent by codecs.
    """

    weights: Weights
    messages: Messages | None = None
    small: bool = False
    prices: Prices | None = None

    @property
    def name(self) -> str:
        """What people read of it."""
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
        """Whether the least cost may bound the time of every plan."""
        plain = self.messages is None and self.prices is None
        whole = not self.small and plain
        return whole and (self.weights == HIDDEN or not self.weights.works)


def in_kinds(
    work: np.ndarray | float, gathers: np.ndarray | float, sums: np.ndarray | float
) -> np.ndarray:
    """Seconds, or parts of them, of all kinds.

    Args:
      work: ``[2 * SEGMENTS + 1, ...]``.
      gathers: ``[2 * SEGMENTS, ...]``.
      sums: ``[SEGMENTS, ...]``.
    """
    return np.concatenate(
        [
            np.broadcast_to(seconds, (count, *np.shape(seconds)[1:]))
            for seconds, count in (
                (work, _WORK),
                (gathers, _GATHERS),
                (sums, SEGMENTS),
            )
        ]
    )


def lower_seconds(
    weights: Weights, seconds: np.ndarray, parts: np.ndarray
) -> np.ndarray:
    """Seconds of which parts are of some kinds; what is infinite stays so."""
    factor = 1.0 - float((1.0 - weights.kinds) @ parts)
    if factor == 1.0:
        return seconds
    finite = np.isfinite(seconds)
    return np.where(finite, factor * np.where(finite, seconds, 0.0), seconds)


@functools.cache
def _stretches() -> tuple[np.ndarray, np.ndarray]:
    """The stretches.

    Returns:
      Of each, whether the seconds of each kind must lie in it, or work of each segment
      is there, bool ``[stretches, KINDS]``; and whether it is of each pass, bool
      ``[2, stretches]``.
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
    """No weight on any stretch; float64 ``[stretches]``."""
    return np.zeros(len(_stretches()[0]))


def highest(planes: Sequence[Plane], share: float) -> tuple[np.ndarray, float]:
    """Weights of stretches at which the least of some planes is highest, and that.

    Args:
      planes: of plans.
      share: part of the work that communication may run beside.
    """
    base = np.array([plane.base_s for plane in planes])
    slopes = np.array([plane.slopes(share) for plane in planes])
    _, passes = _stretches()
    found = highest_minimum(base, slopes, passes)
    return found, float((base + slopes @ found).min())


def weights_of(stretches: np.ndarray, known: Calibration) -> Weights:
    """The weights of a problem at weights of stretches; see `nowhere`.

    Args:
      stretches: float64 ``[stretches]``.
      known: how communication runs beside work.
    """
    inside, _ = _stretches()
    counted = np.minimum((stretches @ inside).round(4), 1.0)
    if not known.whole_messages:
        counted[_WORK - 1] = 0.0
    counted[:_WORK] = 1.0 - known.overlap * counted[:_WORK]
    return _of_kinds(counted)


@dataclasses.dataclass(frozen=True, eq=False)
class Plane:
    """The least time of a plan, as a linear function of weights of stretches.

    Attributes:
      base_s: seconds where everything is hidden that may be.
      kinds: seconds of each kind, as far as they decide what is exposed.
    """

    base_s: float
    kinds: np.ndarray

    def slopes(self, share: float) -> np.ndarray:
        """Seconds that each stretch exposes, or less than none."""
        signs = np.concatenate([np.full(_WORK, -share), np.ones(KINDS - _WORK)])
        inside, _ = _stretches()
        return inside @ (signs * self.kinds)


def plane_of(
    places: Positions, seconds: float, passes: Sequence[Timeline], known: Calibration
) -> Plane:
    """The plane of a plan.

    Args:
      places: positions of operators.
      seconds: of a step of it.
      passes: its work and communication.
      known: how communication runs beside work.
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
