"""Tests the steps between two layouts: each is elementary, and none is wasted."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
from hypothesis import example, given, settings
from property_tests import examples

from autopar.cost.collectives import collective_bytes
from autopar.layouts.layout import (
    Axes,
    Layout,
    ReshardStep,
    assignments,
    axes_of,
    reshard_steps,
    shards,
)

MESHES = ((8,), (2, 4), (2, 2, 2), (4, 2, 3))


@st.composite
def layouts(draw: st.DrawFn, axes: tuple[int, ...], rank: int) -> Layout:
    order = draw(st.permutations(axes))
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis in order:
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
    return tuple(tuple(d) for d in dims)


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[Layout, Layout, Axes, tuple[int, ...]]:
    sizes = draw(st.sampled_from(MESHES))
    rank = draw(st.integers(1, 3))
    axes = tuple(range(len(sizes)))
    start = draw(layouts(axes, rank))
    free = tuple(a for a in axes if a not in axes_of(start))
    partial = tuple(a for a in free if draw(st.booleans()))
    return start, draw(layouts(axes, rank)), partial, sizes


def is_elementary(before: Layout, step: ReshardStep) -> bool:
    """Whether one collective of this kind has exactly this effect."""
    after = step.layout
    pairs = list(zip(before, after, strict=True))
    changed = [(b, a) for b, a in pairs if b != a]
    match step.kind:
        case "slice":
            grown = all(a[: len(b)] == b for b, a in pairs)
            added = axes_of(after) - axes_of(before)
            return grown and added == set(step.axes) and len(added) > 0
        case "all_gather":
            ((b, a),) = changed
            return a + step.axes == b
        case "all_reduce":
            return not changed
        case "reduce_scatter":
            ((b, a),) = changed
            return b + step.axes == a and len(step.axes) == 1
        case "all_to_all":
            (axis,) = step.axes
            gone = [(b, a) for b, a in changed if b == (*a, axis)]
            come = [(b, a) for b, a in changed if a == (*b, axis)]
            return len(changed) == 2 and len(gone) == len(come) == 1
    return False


def sent_bytes(steps: tuple[ReshardStep, ...], sizes: tuple[int, ...]) -> float:
    return sum(
        collective_bytes(s.kind, s.fraction, math.prod(sizes[a] for a in s.axes))
        for s in steps
        if s.kind != "slice"
    )


@given(reshardings(), st.sampled_from(("sum", "max", "all")))
@settings(max_examples=examples(400), deadline=None, derandomize=True)
def test_every_step_is_one_collective_and_the_last_is_the_target(
    case: tuple[Layout, Layout, Axes, tuple[int, ...]], reduction: str
) -> None:
    start, target, partial, sizes = case

    steps = reshard_steps(start, target, partial, reduction, sizes)

    reduced: list[int] = []
    before = start
    for step in steps:
        assert is_elementary(before, step), (before, step)
        used = [a for d in step.layout for a in d]
        assert len(used) == len(set(used))
        if step.kind in ("all_reduce", "reduce_scatter"):
            reduced.extend(step.axes)
        else:
            assert sorted(reduced) == sorted(partial), "a partial value was moved"
        before = step.layout
    assert before == target
    assert sorted(reduced) == sorted(partial)
    assert reduction == "sum" or all(s.kind != "reduce_scatter" for s in steps)


@given(reshardings())
@settings(max_examples=examples(400), deadline=None, derandomize=True)
def test_never_sends_more_than_gathering_everything(
    case: tuple[Layout, Layout, Axes, tuple[int, ...]],
) -> None:
    start, target, partial, sizes = case
    rank = len(start)
    whole = reshard_steps(start, ((),) * rank, partial, "all", sizes)

    steps = reshard_steps(start, target, partial, "sum", sizes)

    assert sent_bytes(steps, sizes) <= sent_bytes(whole, sizes) + 1e-9


@given(reshardings())
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_charges_the_array_at_the_size_it_has(
    case: tuple[Layout, Layout, Axes, tuple[int, ...]],
) -> None:
    """Gathers are charged what a device gets, the others what it puts in."""
    start, target, partial, sizes = case
    before = start
    for step in reshard_steps(start, target, partial, "sum", sizes):
        at = step.layout if step.kind == "all_gather" else before
        want = 0.0 if step.kind == "slice" else 1.0 / shards(at, sizes)
        assert math.isclose(step.fraction, want)
        before = step.layout


def test_a_wanted_reduction_is_scattered() -> None:
    (step,) = reshard_steps(((), ()), ((0,), ()), (0,), "sum", (8,))

    assert (step.kind, step.axes, step.fraction) == ("reduce_scatter", (0,), 1.0)


def test_a_maximum_is_never_scattered() -> None:
    steps = reshard_steps(((), ()), ((0,), ()), (0,), "max", (8,))

    assert [s.kind for s in steps] == ["all_reduce", "slice"]


def test_two_axes_scatter_one_after_the_other() -> None:
    steps = reshard_steps(((), ()), ((1,), (0,)), (0, 1), "sum", (2, 4))

    assert [s.kind for s in steps] == ["reduce_scatter", "reduce_scatter"]
    assert math.isclose(sum(s.fraction for s in steps), 1.0 + 1.0 / 4)


def test_slices_cost_nothing() -> None:
    (step,) = reshard_steps(((), ()), ((0,), (1,)), (), "", (2, 4))

    assert step.kind == "slice"
    assert step.fraction == 0.0


def test_an_axis_moves_by_all_to_all() -> None:
    (step,) = reshard_steps(((0,), ()), ((), (0,)), (), "", (8,))

    assert (step.kind, step.fraction) == ("all_to_all", 1.0 / 8)


@given(
    st.lists(st.sampled_from((2, 3, 4, 8, 16)), max_size=3),
    st.sampled_from(MESHES),
    st.booleans(),
)
@example([], (8,), True)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_assignments_are_all_even_ones_once(
    factors: list[int], sizes: tuple[int, ...], orders: bool
) -> None:
    found = assignments(tuple(factors), sizes, orders=orders)

    assert found[0] == ((),) * len(factors)
    assert len(set(found)) == len(found)
    want = 0
    for choice in itertools.product(range(-1, len(factors)), repeat=len(sizes)):
        groups = [
            [a for a, f in enumerate(choice) if f == k] for k in range(len(factors))
        ]
        if all(
            size % math.prod(sizes[a] for a in g) == 0
            for size, g in zip(factors, groups, strict=True)
        ):
            want += math.prod(math.factorial(len(g)) for g in groups) if orders else 1
    assert len(found) == want
