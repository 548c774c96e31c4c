"""Tests that the maximum of the minimum of planes is that of the best corner."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar_solver import highest_minimum


@st.composite
def planes(draw):
    """Draws heights and slopes of planes, and weights in two groups."""
    count, weights = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heights = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    row = st.lists(st.integers(-5, 5), min_size=weights, max_size=weights)
    slopes = draw(st.lists(row, min_size=count, max_size=count))
    members = draw(st.lists(st.integers(0, 1), min_size=weights, max_size=weights))
    groups = np.array([[member == g for member in members] for g in range(2)])
    return np.array(heights, float), np.array(slopes, float), groups


def lowest(heights, slopes, weights):
    return (heights + slopes @ weights).min()


def possible(groups, weights):
    inside = (weights >= -1e-7).all() and (weights <= 1 + 1e-7).all()
    return inside and (groups @ weights <= 1 + 1e-7).all()


def best_corner(heights, slopes, groups):
    """The maximum over all corners, the points where enough constraints are tight."""
    size = slopes.shape[1]
    # Rows of (weights, height) @ row = right side.
    rows = [(np.append(-s, 1.0), h) for s, h in zip(slopes, heights, strict=True)]
    rows += [(np.append(g.astype(float), 0.0), 1.0) for g in groups]
    for k in range(size):
        unit = np.eye(size + 1)[k]
        rows += [(unit, 0.0), (unit, 1.0)]
    best = -np.inf
    for tight in itertools.combinations(rows, size + 1):
        matrix = np.array([row for row, _ in tight])
        if abs(np.linalg.det(matrix)) < 1e-9:
            continue
        corner = np.linalg.solve(matrix, np.array([right for _, right in tight]))
        if possible(groups, corner[:size]):
            best = max(best, lowest(heights, slopes, corner[:size]))
    return best


@given(planes())
def test_no_corner_is_higher(given_planes):
    heights, slopes, groups = given_planes
    weights = highest_minimum(heights, slopes, groups)

    assert possible(groups, weights)
    best = best_corner(heights, slopes, groups)
    assert lowest(heights, slopes, weights) == pytest.approx(best, abs=1e-6)


def test_the_scale_does_not_matter():
    """Seconds of a step may be microseconds or minutes."""
    heights, groups = np.array([1.0, 3.0]), np.array([[True]])
    slopes = np.array([[2.0], [-2.0]])
    for scale in (1e-6, 1.0, 1e4):
        found = highest_minimum(scale * heights, scale * slopes, groups)
        assert found == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("heights", "shape", "message"),
    [
        ([1.0], (2, 1), "do not fit together"),
        ([], (0, 1), "do not fit together"),
        ([1.0], (1, 2), "do not fit together"),
        ([-1.0], (1, 1), "a height is negative: -1"),
    ],
)
def test_what_cannot_be_is_said(heights, shape, message):
    with pytest.raises(ValueError, match=message):
        highest_minimum(heights, np.zeros(shape), np.ones((1, 1), bool))
