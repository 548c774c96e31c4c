"""What operators are charged for sums that may be taken as one."""

import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from autopar.steps.sums import Shared, charged


@st.composite
def additions(draw: st.DrawFn) -> tuple[Shared, list[float]]:
    """Sums of values 0 to n - 1, added up in pairs in any order, and their factors."""
    leaves = draw(st.integers(2, 5))
    left = list(range(leaves))
    summed: dict[int, tuple[int, ...]] = {v: (v,) for v in left}
    made: list[tuple[int, int]] = []
    while len(left) > 1:
        one, other = (left.pop(draw(st.integers(0, len(left) - 1))) for _ in range(2))
        value = leaves + len(made)
        summed[value] = summed[one] + summed[other]
        made.append((value, value))
        left.append(value)
        if draw(st.booleans()):
            break
    count = {v: len(summed[value]) for _, value in made for v in summed[value]}
    factors = [draw(st.floats(0, 1)) for _ in range(leaves + len(made))]
    return Shared(summed, count, tuple(made)), factors


def costs(known: Shared, factors: Sequence[float]) -> dict[frozenset[int], float]:
    """What a step pays for each set of sums, by the sets that may be joined."""
    out = {frozenset({v}): factors[v] for v in known.count}
    out |= {frozenset(known.summed[made]): factors[op] for op, made in known.additions}
    return out


@given(additions())
def test_no_way_to_join_sums_costs_less_than_what_is_charged(
    given_: tuple[Shared, list[float]],
) -> None:
    known, factors = given_
    # Each value is made by the operator of the same number.
    found = charged({v: v for v in known.count}, known, factors)
    paid = costs(known, factors)
    for number in range(1, len(paid) + 1):
        for sets in itertools.combinations(paid, number):
            joined = [v for s in sets for v in s]
            if sorted(joined) == sorted(known.count):  # each sum is taken once
                least = sum(paid[s] for s in sets)
                assert sum(found.values()) <= least * (1 + 1e-9) + 1e-12
    for sums, cost in paid.items():
        assert sum(found[v] for v in sums) <= cost * (1 + 1e-9) + 1e-12


@given(st.integers(2, 6), st.floats(0.1, 1))
def test_equal_factors_are_charged_in_equal_parts(number: int, factor: float) -> None:
    leaves = tuple(range(number))
    known = Shared({number: leaves}, dict.fromkeys(leaves, number), ((number, number),))
    found = charged({v: v for v in leaves}, known, [factor] * (number + 1))
    assert list(found.values()) == pytest.approx([factor / number] * number)


def test_what_one_may_not_be_charged_the_other_is() -> None:
    known = Shared({2: (0, 1)}, {0: 2, 1: 2}, ((2, 2),))
    found = charged({0: 0, 1: 1}, known, [0.2, 1.0, 1.0])
    assert found == {0: 0.2, 1: pytest.approx(0.8)}
    assert math.isclose(sum(found.values()), 1.0)
