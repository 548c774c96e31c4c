"""Piecewise polynomials against the functions that they stand for."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import LinkSpec, MeshAxis
from autopar.cluster.specs import KINDS, CollectiveFit
from autopar.cost.collectives import collective_pieces, collective_s
from autopar.cost.pieces import (
    Pieces,
    Polynomial,
    added,
    constant,
    largest,
    monomial,
    plus,
    polynomial,
    positive_roots,
    times,
    value_at,
)

numbers = st.floats(0.0, 1e3)
points = st.floats(1e-3, 1e3)
polynomials = st.tuples(numbers, numbers, numbers, numbers)


def at(pieces: Pieces, x: float) -> float:
    return value_at(pieces.at(x), x)


@given(polynomials, polynomials, points)
def test_the_largest_of_two(p: Polynomial, q: Polynomial, x: float) -> None:
    want = max(value_at(p, x), value_at(q, x))
    assert at(largest(p, q), x) == pytest.approx(want, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(polynomials, polynomials), max_size=8), points)
def test_sums_of_largest(pairs: list[tuple[Polynomial, Polynomial]], x: float) -> None:
    found = added(largest(p, q) for p, q in pairs)
    want = sum(max(value_at(p, x), value_at(q, x)) for p, q in pairs)
    assert found(x) == pytest.approx(want, rel=1e-6, abs=1e-6)


@given(polynomials, polynomials, points, st.floats(0, 10))
def test_arithmetic(p: Polynomial, q: Polynomial, x: float, factor: float) -> None:
    assert value_at(plus(p, q), x) == pytest.approx(value_at(p, x) + value_at(q, x))
    assert value_at(times(p, factor), x) == pytest.approx(factor * value_at(p, x))
    doubled = largest(p, q).scaled(2.0)
    assert at(doubled, x) == pytest.approx(2.0 * at(largest(p, q), x))


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=3, unique=True))
def test_roots_are_found(roots: list[float]) -> None:
    coefficients = np.poly(sorted(roots))[::-1]
    padded = [*coefficients.tolist(), 0.0, 0.0, 0.0][:4]
    found = positive_roots((padded[0], padded[1], padded[2], padded[3]))
    for root in roots:
        assert any(math.isclose(root, f, rel_tol=1e-2) for f in found)


def test_constants_have_no_bend() -> None:
    assert constant(3.0).pieces == ((0.0, (3.0, 0.0, 0.0, 0.0)),)
    assert added([constant(1.0), polynomial(monomial(2.0, 1))])(4.0) == 9.0
    assert added([])(4.0) == 0.0
    assert positive_roots((1.0, 0.0, 0.0, 0.0)) == []


def test_coefficients_next_to_nothing_do_not_hide_a_root() -> None:
    found = largest((0.0, 0.0, 1.0, 1.1e-266), (1.0, 0.0, 0.0, 0.0))
    assert value_at(found.at(0.5), 0.5) == 1.0
    assert value_at(found.at(3.0), 3.0) == pytest.approx(9.0)


def test_powers_beyond_a_cube_are_refused() -> None:
    with pytest.raises(ValueError, match="degree must be 0 to 3, got 4"):
        monomial(1.0, 4)


def some_axes(draw: random.Random) -> tuple[MeshAxis, ...]:
    """One to three axes on one or more levels, some of them measured."""
    out: list[MeshAxis] = []
    for level in range(draw.randint(1, 3)):
        size = draw.choice([2, 3, 4, 8])
        fits = tuple(
            CollectiveFit(
                kind=kind,
                group_size=size,
                latency_s=draw.uniform(0, 1e-4),
                s_per_byte=draw.uniform(1e-12, 1e-9),
                large_s_per_byte=draw.choice([0.0, draw.uniform(1e-12, 2e-9)]),
            )
            for kind in KINDS
            if draw.random() < 0.3
        )
        link = LinkSpec(
            latency_s=draw.uniform(0, 1e-4),
            bandwidth_bytes_per_s=draw.uniform(1e8, 1e12),
            topology=draw.choice(["switch", "ring", "line"]),
            measured=fits,
        )
        out.append(MeshAxis(name=f"a{level}", size=size, link=link, level=level))
    return tuple(out)


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_straight_between_their_bends(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(40):
        axes = some_axes(draw)
        pieces = collective_pieces(kind, axes)
        starts = [start for start, _, _ in pieces]
        assert starts == sorted(starts)
        assert starts[0] == 0.0
        for size in [10 ** draw.uniform(0, 11) for _ in range(12)]:
            _, latency, slope = [p for p in pieces if p[0] <= size][-1]
            want = collective_s(kind, size, axes)
            assert latency + slope * size == pytest.approx(want, rel=1e-9)
