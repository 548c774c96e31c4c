"""Times as piecewise linear functions of a size.

`lowest`, `highest` and `total` combine several curves into one. Computing a time is
therefore one look-up, for any number of algorithms and links.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

Line = tuple[float, float]
"""(latency_s, s_per_byte)."""
Piece = tuple[float, float, float]
"""(the size at which the piece starts, latency_s, s_per_byte)."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimeCurve:
    """Seconds as a piecewise linear function of a size in bytes.

    Attributes:
      starts: the size at which each piece starts, in ascending order; the first is 0.
      lines: latency and slope of each piece.
    """

    starts: tuple[float, ...]
    lines: tuple[Line, ...]

    def seconds(self, nbytes: float) -> float:
        """The time at one size."""
        latency, slope = self.lines[bisect.bisect_right(self.starts, nbytes) - 1]
        return latency + slope * nbytes

    def seconds_at(self, nbytes: np.ndarray) -> np.ndarray:
        """The times at an array of sizes, as an array of the same shape."""
        latency, slope = np.array(self.lines).T
        at = np.searchsorted(self.starts, nbytes, side="right") - 1
        return latency[at] + slope[at] * nbytes

    @property
    def s_per_byte(self) -> float:
        """The least seconds per byte, over all sizes."""
        bends = [self.seconds(start) / start for start in self.starts if start > 0]
        return min([self.lines[-1][1], *bends])

    def least_s_per_byte(self, low: float, high: float) -> float:
        """The least seconds per byte, over sizes from ``low`` to ``high``.

        >>> through([10.0, 20.0], [1.0, 1.0]).least_s_per_byte(5.0, 15.0)
        0.06666666666666667

        Args:
          low: a size in bytes, above 0.
          high: a size in bytes, at least ``low``; it may be infinite.
        """
        sizes = [low, *(s for s in self.starts if low < s < high)]
        found = [self.seconds(s) / s for s in sizes]
        last = self.seconds(high) / high if high < math.inf else self.lines[-1][1]
        return min(last, *found)

    def seeing(self, part: float) -> TimeCurve:
        """The curve of a phase that carries only the fraction ``part`` of the bytes.

        >>> line(1.0, 2.0).seeing(0.25).seconds(8.0)
        5.0
        """
        return TimeCurve(
            tuple(start / part for start in self.starts),
            tuple((latency, slope * part) for latency, slope in self.lines),
        )


def line(latency_s: float, s_per_byte: float) -> TimeCurve:
    """One straight line."""
    return TimeCurve((0.0,), ((latency_s, s_per_byte),))


def through(sizes: Sequence[float], seconds: Sequence[float]) -> TimeCurve:
    """The curve through knots: constant before the first knot, linear after the last.

    >>> curve = through([10.0, 20.0, 40.0], [1.0, 1.0, 3.0])
    >>> [curve.seconds(size) for size in (1.0, 20.0, 30.0, 50.0)]
    [1.0, 1.0, 2.0, 4.0]

    Args:
      sizes: sizes of the knots in bytes, ascending; at least two.
      seconds: seconds at the knots.
    """
    starts: list[float] = [0.0]
    lines: list[Line] = [(seconds[0], 0.0)]
    for k in range(len(sizes) - 1):
        slope = (seconds[k + 1] - seconds[k]) / (sizes[k + 1] - sizes[k])
        starts.append(sizes[k])
        lines.append((seconds[k] - slope * sizes[k], slope))
    return TimeCurve(tuple(starts), tuple(lines))


def lowest(curves: Sequence[TimeCurve]) -> TimeCurve:
    """The minimum of curves at every size: the fastest of several algorithms."""
    return _combine_curves(curves, _lowest)


def highest(curves: Sequence[TimeCurve]) -> TimeCurve:
    """The maximum of curves at every size: the time of phases that overlap."""
    return _combine_curves(curves, _highest)


def total(curves: Sequence[TimeCurve]) -> TimeCurve:
    """The sum of curves at every size: the time of phases in sequence."""
    return _combine_curves(curves, _sum)


_ROUNDING = 1e-9
Combine = Callable[[Sequence[Line], float, float], list[Piece]]


def _combine_curves(curves: Sequence[TimeCurve], combine: Combine) -> TimeCurve:
    if len(curves) == 1:
        return curves[0]
    starts = sorted({start for curve in curves for start in curve.starts})
    pieces: list[Piece] = []
    for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
        lines = [
            curve.lines[bisect.bisect_right(curve.starts, start) - 1]
            for curve in curves
        ]
        pieces.extend(combine(lines, start, end))
    kept = pieces[:1]
    for piece in pieces[1:]:
        if not np.allclose(piece[1:], kept[-1][1:], rtol=1e-12, atol=0.0):
            kept.append(piece)
    return TimeCurve(tuple(p[0] for p in kept), tuple((p[1], p[2]) for p in kept))


def _sum(lines: Sequence[Line], start: float, end: float) -> list[Piece]:
    del end
    return [(start, sum(a for a, _ in lines), sum(b for _, b in lines))]


def _highest(lines: Sequence[Line], start: float, end: float) -> list[Piece]:
    negated = _lowest([(-a, -b) for a, b in lines], start, end)
    return [(at, -a, -b) for at, a, b in negated]


def _lowest(lines: Sequence[Line], start: float, end: float) -> list[Piece]:
    """The minimum of lines between two sizes, as pieces.

    Where two lines cross at the start of a piece, rounding may place their crossing
    slightly before the start. The flatter line is used nevertheless.
    """
    best = min(lines, key=lambda line: (line[0] + line[1] * start, line[1]))
    out: list[Piece] = [(start, *best)]
    while True:
        # Only a flatter line can fall below the current line.
        crossings = [
            ((best[0] - other[0]) / (other[1] - best[1]), other[1], other)
            for other in lines
            if other[1] < best[1]
        ]
        since = out[-1][0]
        ahead = [c for c in crossings if since * (1 - _ROUNDING) <= c[0] < end]
        if not ahead:
            return out
        at, _, best = min(ahead)
        if at <= since:
            out.pop()
        out.append((max(at, since), *best))
