"""Tests which sums a program states, and that their steps end in the right layout."""

from __future__ import annotations

import pytest

from autopar.layouts.assignment import Way, kept_slices, written_sums
from autopar.layouts.layout import Layout, ReshardStep, reshard_steps
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


def sliced(*layouts: Layout) -> Way:
    steps = list[ReshardStep]()
    before = WHOLE
    for layout in layouts:
        steps += reshard_steps(before, layout, (), "", SIZES)
        before = layout
    return tuple(steps), False


def test_the_sum_ends_in_the_slices_that_all_readers_keep() -> None:
    steps = reshard_steps(WHOLE, WHOLE, (0, 1), "sum", SIZES)
    half: Layout = ((0,), ())
    ways = {sliced(half), sliced(half, ((0,), (1,)))}

    kept = kept_slices(ways, (0, 1))

    assert kept == half
    assert written_sums(WHOLE, steps, kept) == (
        Sum((0,), 0, half),
        Sum((1,), None, half),
    )


@pytest.mark.parametrize(
    "ways",
    [
        set[Way](),  # nobody reads
        {sliced()},  # one reads the whole
        {sliced(((0,), ())), sliced()},
        {sliced(((0,), ())), sliced(((), (0,)))},  # two read different slices
        {(sliced(((0,), ()))[0], True)},  # one starts anew
        {sliced(((2,), ()))},  # a slice over an axis that is none of the sum's
    ],
)
def test_what_readers_do_not_keep_alike_stays_whole(ways: set[Way]) -> None:
    steps = reshard_steps(WHOLE, WHOLE, (0, 1), "sum", SIZES)

    assert kept_slices(ways, (0, 1)) is None
    assert written_sums(WHOLE, steps, None) == (Sum((0, 1), None, WHOLE),)


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
