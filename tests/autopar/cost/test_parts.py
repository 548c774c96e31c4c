"""Tests exposed messages of a part against a simulation."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.overlap import Part
from autopar_passes.graph.roles import Role

SIZE = 6
Seconds = Sequence[float]
seconds = st.lists(st.integers(0, 6), min_size=SIZE, max_size=SIZE)


def part(
    work: Seconds,
    gathers: Seconds | None = None,
    sums: Seconds | None = None,
    update: Seconds | None = None,
    needs: Sequence[int] | None = None,
) -> Part:
    """A part in which products of gradients run in program order."""
    nothing = [0.0] * SIZE
    return Part(
        (Role.BACKWARD, SIZE),
        np.array(work, float),
        np.array(work, float),
        np.array(gathers or nothing, float),
        np.array(sums or nothing, float),
        np.array(update or nothing, float),
        np.array([SIZE] * SIZE if needs is None else needs),
    )


@given(seconds, seconds)
def test_a_gather_starts_where_the_one_before_is_waited_for(
    work: list[int], gathers: list[int]
) -> None:
    """The next to be read is sent, and no other; it begins when that before is read."""
    clock = sent = 0.0
    for own, moved in zip(work, gathers, strict=True):
        if moved:
            clock = max(clock, sent + moved)
            sent = clock
        clock += own

    found = part(work, gathers=gathers).exposed_s(1.0)
    assert found == pytest.approx(clock - sum(work))


@given(seconds, seconds, seconds, st.data())
def test_sums_run_beside_the_update_of_others(
    work: list[int], sums: list[int], update: list[int], data: st.DataObject
) -> None:
    """An update waits for the last sum that it needs; the others go first."""
    there = [k for k, s in enumerate(sums) if s]
    needs = [data.draw(st.sampled_from([-1, *there])) for _ in range(SIZE)]
    clock = link = 0.0
    ends = {-1: 0.0}
    for place, (own, sent) in enumerate(zip(work, sums, strict=True)):
        clock += own
        if sent:
            link = max(link, clock) + sent
            ends[place] = link
    for need, own in sorted(zip(needs, update, strict=True)):
        # What takes no time waits for nothing.
        clock = max(clock, ends[need]) + own if own else clock
    clock = max(clock, link)

    found = part(work, sums=sums, update=update, needs=needs).exposed_s(1.0)
    assert found == pytest.approx(clock - sum(work) - sum(update))


def test_without_overlap_everything_is_exposed() -> None:
    found = part([5.0] * SIZE, gathers=[1.0] * SIZE, sums=[2.0] * SIZE)

    assert found.exposed_s(0.0) == 3.0 * SIZE


def test_the_update_covers_a_sum_of_the_first_operator() -> None:
    rest = [0.0] * (SIZE - 1)
    needs = [-1, *[SIZE] * (SIZE - 1)]
    found = part([1.0, *rest], sums=[3.0, *rest], update=[2.0, *rest], needs=needs)

    assert found.exposed_s(1.0) == 1.0


@given(seconds, seconds, st.integers(0, 40))
def test_sums_of_the_iteration_before_run_beside_the_whole_iteration(
    work: list[int], gathers: list[int], moved: int
) -> None:
    """They have the time of the work that hides no gather."""
    plain = part(work, gathers=gathers)
    exposed_s = plain.exposed_s(1.0)
    free_s = sum(work) - (sum(gathers) - exposed_s)

    found = dataclasses.replace(plain, pipelined_s=float(moved)).exposed_s(1.0)
    assert found == pytest.approx(exposed_s + max(0.0, moved - free_s))
