"""Which sums a program writes down, and that their steps lead where they should."""

from __future__ import annotations

import pytest

from autopar.layouts.assignment import written_sums
from autopar.layouts.layout import Layout, reshard_steps
from autopar_passes.sums.finish import Sum

SIZES = (2, 4, 2)
WHOLE: Layout = ((), ())


@pytest.mark.parametrize(
    ("target", "partial"),
    [
        (WHOLE, (1,)),  # an all-reduce
        (((), (1,)), (1,)),  # one axis
        (((1,), ()), (0,)),  # the split is none of the sum's
    ],
)
def test_what_a_compiler_finds_is_left_to_it(
    target: Layout, partial: tuple[int, ...]
) -> None:
    steps = reshard_steps(WHOLE, target, partial, "sum", SIZES)

    assert written_sums(WHOLE, steps) == ()


def test_a_split_over_a_part_of_the_axes_is_written() -> None:
    target: Layout = ((1,), ())

    steps = reshard_steps(WHOLE, target, (0, 1), "sum", SIZES)

    assert written_sums(WHOLE, steps) == (Sum((1,), 0, target), Sum((0,), None, target))


def test_a_split_in_two_dimensions_is_written() -> None:
    target: Layout = ((1,), (0,))

    steps = reshard_steps(WHOLE, target, (0, 1), "sum", SIZES)

    assert written_sums(WHOLE, steps) == (
        Sum((1,), 0, ((1,), ())),
        Sum((0,), 1, ((1,), (0,))),
    )


def test_a_split_of_one_dimension_is_written_axis_by_axis() -> None:
    target: Layout = ((), (1, 0))

    steps = reshard_steps(WHOLE, target, (0, 1), "sum", SIZES)

    assert written_sums(WHOLE, steps) == (
        Sum((1,), 1, ((), (1,))),
        Sum((0,), 1, target),
    )


def test_what_moves_behind_the_sum_is_not_of_it() -> None:
    start: Layout = ((), (2,))
    target: Layout = ((1, 2), (0,))

    steps = reshard_steps(start, target, (0, 1), "sum", SIZES)

    kinds = [s.kind for s in steps]
    assert kinds == ["reduce_scatter", "all_reduce", "all_to_all", "slice"]
    assert [s.axes for s in written_sums(start, steps)] == [(1,), (0,)]


def test_a_sum_over_two_axes_is_one_collective() -> None:
    steps = reshard_steps(WHOLE, ((1,), ()), (0, 1), "all", SIZES)

    assert written_sums(WHOLE, steps) == (Sum((0, 1), None, WHOLE),)
