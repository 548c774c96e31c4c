"""The weights at which the least of some planes is highest: a linear program.

Maximise ``h`` over weights ``w`` between 0 and 1, such that

    h <= heights[i] + slopes[i] @ w    for each plane i       (under_plane)
    sum of w over the members of g <= 1  for each group g     (once)
"""

from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.ilp.highs import solve_without_integrality
from autopar_solver.ilp.program import IntegerProgram


def highest_minimum(
    heights: Sequence[float] | np.ndarray, slopes: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Returns the weights at which the least of some planes is highest.

    Args:
        heights: ``[planes]``, of each plane without weights; none is negative.
        slopes: ``[planes, weights]``, of each plane along each weight.
        groups: ``[groups, weights]``, true for the members of each group.

    Returns:
        ``[weights]``, one set of them where several are as good.

    Raises:
        InputError: there is no plane, a height is negative, or the arrays do not fit
            together.

    >>> highest_minimum([1.0, 3.0], np.array([[2.0], [-2.0]]), np.array([[True]]))
    array([0.5])
    """
    base = np.asarray(heights, np.float64)
    planes, weights = slopes.shape
    if len(base) != planes or groups.shape[1] != weights or not planes:
        raise InputError(
            f"highest_minimum: {len(base)} heights, slopes {slopes.shape} and groups "
            f"{groups.shape} do not fit together; give a row of slopes for each "
            "height, one at least, and a column for each weight."
        )
    if base.min() < 0:
        raise InputError(f"highest_minimum: a height is negative: {base.min():g}.")
    answer = solve_without_integrality(_program(base, slopes, groups))
    assert answer is not None  # no weights at all are possible
    return answer[0][:weights]


def _program(
    base: np.ndarray, slopes: np.ndarray, groups: np.ndarray
) -> IntegerProgram:
    """The program over the weights and, last, the height; in units of the highest."""
    planes, weights = slopes.shape
    scale = base.max() or 1.0
    under = np.hstack([-slopes / scale, np.full((planes, 1), 1.0 / scale)])
    once = np.hstack([groups.astype(np.float64), np.zeros((len(groups), 1))])
    matrix = np.vstack([under, once])
    rows, size = matrix.shape
    return IntegerProgram(
        costs=np.append(np.zeros(weights), -1.0),
        most=np.append(np.ones(weights), np.inf),
        num_binary=0,
        starts=np.arange(rows + 1) * size,
        columns=np.tile(np.arange(size), rows),
        values=matrix.ravel(),
        lower=np.full(rows, -np.inf),
        upper=np.append(base / scale, np.ones(len(groups))),
        names=(
            *(f"under_plane_{i}" for i in range(planes)),
            *(f"once_{g}" for g in range(len(groups))),
        ),
    )
