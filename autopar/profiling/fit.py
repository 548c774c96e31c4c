"""Least squares on relative errors, with coefficients that are never negative."""

import math
from collections.abc import Sequence

from autopar.cluster.specs import CollectiveFit


def relative_rms(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Root mean square of ``predicted / measured - 1``."""
    pairs = zip(predicted, measured, strict=True)
    return math.sqrt(sum((p / m - 1) ** 2 for p, m in pairs) / len(measured))


def fit_slope(sizes: Sequence[float], times_s: Sequence[float]) -> float:
    """The b that minimises ``sum((b n / t - 1)^2)``."""
    ratios = [n / t for n, t in zip(sizes, times_s, strict=True)]
    return sum(ratios) / sum(r * r for r in ratios)


def fit_line(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """The (a, b), none negative, that minimise ``sum(((a + b n) / t - 1)^2)``.

    >>> fit_line([10, 20, 40], [3.0, 5.0, 9.0])
    (1.0, 0.2)
    """
    inverse = [1 / t for t in times_s]
    ratios = [n / t for n, t in zip(sizes, times_s, strict=True)]
    # The normal equations of the two columns 1/t and n/t against ones.
    s11, s1 = sum(x * x for x in inverse), sum(inverse)
    s22, s2 = sum(x * x for x in ratios), sum(ratios)
    s12 = sum(x * y for x, y in zip(inverse, ratios, strict=True))
    determinant = s11 * s22 - s12 * s12
    if determinant > 1e-12 * s11 * s22:
        a = (s1 * s22 - s2 * s12) / determinant
        b = (s2 * s11 - s1 * s12) / determinant
        if a >= 0 and b >= 0:
            return round_off(a), round_off(b)
    # The best of the two edges of the feasible quadrant.
    constant, slope = s1 / s11, s2 / s22
    if s1 * constant > s2 * slope:
        return round_off(constant), 0.0
    return 0.0, round_off(slope)


def round_off(value: float) -> float:
    """Six significant digits: more than any timing has."""
    return float(f"{value:.6g}")


def _candidate(
    kind: str, group_size: int, points: Sequence[tuple[float, float]], split: int
) -> CollectiveFit:
    """A line through the first `split` points, a floor through the others."""
    sizes, times_s = zip(*points, strict=True)
    latency_s, slope = fit_line(sizes[:split], times_s[:split])
    rest = points[split:]
    floor = round_off(fit_slope(*zip(*rest, strict=True))) if rest else 0.0
    bare = CollectiveFit(
        kind=kind,
        group_size=group_size,
        latency_s=latency_s,
        s_per_byte=slope,
        large_s_per_byte=floor,
    )
    error = relative_rms([bare.seconds(n) for n in sizes], times_s)
    return CollectiveFit(
        kind=kind,
        group_size=group_size,
        latency_s=latency_s,
        s_per_byte=slope,
        large_s_per_byte=floor,
        relative_error=round_off(error),
    )


def fit_collective(
    kind: str, group_size: int, points: Sequence[tuple[float, float]]
) -> CollectiveFit:
    """The best fit of a line, or of a line with a floor for large sizes.

    Args:
      kind: the collective.
      group_size: devices of a group.
      points: (nbytes, seconds), at least two.
    """
    ordered = sorted(points)
    splits = range(min(3, len(ordered)), len(ordered) + 1)
    fits = [_candidate(kind, group_size, ordered, split) for split in splits]
    return min(reversed(fits), key=lambda fit: fit.relative_error)
