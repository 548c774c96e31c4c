"""Sums of piecewise polynomials, for costs as functions of the batch.

The time of a step is a sum of thousands of terms. Each is a polynomial of the batch
between its bends: a roofline bends where memory takes over, a collective where
another algorithm does. `PieceSum` adds them once, so that a query looks up one
polynomial.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from autopar_errors import InputError

# Coefficients of 1, x, x^2 and x^3: seconds.
Polynomial = tuple[float, float, float, float]
ZERO: Polynomial = (0.0, 0.0, 0.0, 0.0)
DEGREE = 3
_NEGLIGIBLE = 1e-60


def monomial(value: float, degree: int) -> Polynomial:
    """``value * x ** degree``.

    >>> monomial(2.0, 1)
    (0.0, 2.0, 0.0, 0.0)
    """
    if not 0 <= degree <= DEGREE:
        raise InputError(f"degree must be 0 to {DEGREE}, got {degree}.")
    coefficients = [0.0] * (DEGREE + 1)
    coefficients[degree] = value
    a, b, c, d = coefficients
    return (a, b, c, d)


def plus(p: Polynomial, q: Polynomial) -> Polynomial:
    """The sum of two polynomials."""
    return (p[0] + q[0], p[1] + q[1], p[2] + q[2], p[3] + q[3])


def times(p: Polynomial, factor: float) -> Polynomial:
    """A polynomial times a number."""
    return (p[0] * factor, p[1] * factor, p[2] * factor, p[3] * factor)


def value_at(p: Polynomial, x: float) -> float:
    """The value of a polynomial."""
    return p[0] + x * (p[1] + x * (p[2] + x * p[3]))


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A piecewise polynomial of x > 0: (from, polynomial), in order, the first at 0."""

    pieces: tuple[tuple[float, Polynomial], ...]

    def at(self, x: float) -> Polynomial:
        """The polynomial that holds at a point."""
        k = bisect.bisect_right([start for start, _ in self.pieces], x)
        return self.pieces[max(0, k - 1)][1]

    def scaled(self, factor: float) -> Pieces:
        """All values times a number."""
        return Pieces(tuple((s, times(p, factor)) for s, p in self.pieces))


def constant(value: float) -> Pieces:
    """A value that does not depend on x."""
    return Pieces(((0.0, monomial(value, 0)),))


def polynomial(p: Polynomial) -> Pieces:
    """One polynomial everywhere."""
    return Pieces(((0.0, p),))


def largest(p: Polynomial, q: Polynomial) -> Pieces:
    """The larger of two polynomials at each x > 0.

    >>> largest((0.0, 2.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)).pieces
    ((0.0, (1.0, 1.0, 0.0, 0.0)), (1.0, (0.0, 2.0, 0.0, 0.0)))
    """
    difference = plus(p, times(q, -1.0))
    bends = [0.0, *positive_roots(difference)]
    out: list[tuple[float, Polynomial]] = []
    for start, end in zip(bends, [*bends[1:], 2 * bends[-1] + 2.0], strict=True):
        above = value_at(difference, (start + end) / 2) >= 0
        chosen = p if above else q
        if not out or out[-1][1] != chosen:
            out.append((start, chosen))
    return Pieces(tuple(out))


def positive_roots(p: Polynomial) -> list[float]:
    """The positive real roots of a polynomial, in order."""
    if not (p[2] or p[3]):
        return [-p[0] / p[1]] if p[1] and -p[0] / p[1] > 0 else []
    found = np.array(p[::-1])
    # Coefficients that no batch can make count would overflow the others.
    found[np.abs(found) < _NEGLIGIBLE * np.abs(found).max()] = 0.0
    roots = np.roots(np.trim_zeros(found, "f"))
    # Roots that lie together are found off the real line, by the root of the rounding.
    real = roots[np.abs(roots.imag) < 1e-4 * (1 + np.abs(roots))].real
    return sorted({float(r) for r in real if r > 0})


@dataclasses.dataclass(frozen=True, slots=True)
class PieceSum:
    """A sum of piecewise polynomials; a query takes about a microsecond.

    Attributes:
      starts: where each piece starts, in order.
      polynomials: of each piece.
    """

    starts: tuple[float, ...]
    polynomials: tuple[Polynomial, ...]

    def __call__(self, x: float) -> float:
        """The sum at x > 0."""
        k = bisect.bisect_right(self.starts, x) - 1
        return value_at(self.polynomials[k if k > 0 else 0], x)


def added(terms: Iterable[Pieces]) -> PieceSum:
    """Adds piecewise polynomials."""
    base = np.zeros(DEGREE + 1)
    bends: dict[float, np.ndarray] = {}
    for term in terms:
        before = np.array(term.pieces[0][1])
        base += before
        for start, p in term.pieces[1:]:
            after = np.array(p)
            bends[start] = bends.get(start, 0.0) + after - before
            before = after
    starts, current = [0.0], base
    polynomials: list[Sequence[float]] = [tuple(base.tolist())]
    for start in sorted(bends):
        current = current + bends[start]
        starts.append(start)
        polynomials.append(tuple(current.tolist()))
    return PieceSum(tuple(starts), tuple((p[0], p[1], p[2], p[3]) for p in polynomials))
