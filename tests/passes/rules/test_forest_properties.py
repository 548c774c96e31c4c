"""Tests factors under union and split against enumerated indices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.rules.shardy import FactorForest

checked = settings(max_examples=examples(60), deadline=None, derandomize=True)
REDUCTIONS = ("sum", "max", "min")


@st.composite
def factorisations(draw: st.DrawFn, count: int) -> list[list[int]]:
    """Several factorisations of one size."""
    primes = draw(st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=4))
    out: list[list[int]] = []
    for _ in range(count):
        cuts = draw(st.lists(st.booleans(), min_size=len(primes), max_size=len(primes)))
        factors = [1]
        for prime, cut in zip(draw(st.permutations(primes)), cuts, strict=True):
            if cut and factors[-1] > 1:
                factors.append(prime)
            else:
                factors[-1] *= prime
        out.append(factors)
    return out


def digits(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The index in each factor of an element of a dimension, major to minor."""
    out: list[int] = []
    for size in reversed(sizes):
        out.append(index % size)
        index //= size
    return tuple(reversed(out))


@given(factorisations(2))
@checked
def test_united_dimensions_have_the_same_leaves(factors: list[list[int]]) -> None:
    """Where one side splits a whole dimension, an element has the same digits."""
    forest = FactorForest()
    whole, parts = [math.prod(factors[0])], factors[1]
    left, right = [[forest.new(s) for s in sizes] for sizes in (whole, parts)]

    forest.unite(left, right)

    leaves = [leaf for f in left for leaf in forest.leaves(f)]
    assert leaves == [leaf for f in right for leaf in forest.leaves(f)]
    sizes = [forest.size(leaf) for leaf in leaves]
    assert sizes == parts
    for index in range(whole[0]):
        assert sum(
            d * math.prod(sizes[k + 1 :]) for k, d in enumerate(digits(index, sizes))
        ) == (index)


@given(factorisations(3))
@checked
def test_a_dimension_that_is_split_twice(factors: list[list[int]]) -> None:
    """Two equal splits are one; two that do not nest block all of their factors."""
    forest = FactorForest()
    dim = forest.new(math.prod(factors[0]))
    first, second = [[forest.new(s) for s in sizes] for sizes in factors[1:]]

    forest.unite([dim], first)
    forest.unite([dim], second)

    blocked = [forest.is_blocked(leaf) for f in second for leaf in forest.leaves(f)]
    if factors[1] == factors[2]:
        leaves = [leaf for f in first for leaf in forest.leaves(f)]
        assert leaves == [leaf for f in second for leaf in forest.leaves(f)]
        assert not any(blocked)
    elif len(factors[2]) > 1 and len(factors[1]) > 1:
        assert all(blocked)


@given(factorisations(2), st.data())
@checked
def test_sizes_survive_all_operations(
    factors: list[list[int]], data: st.DataObject
) -> None:
    """The leaves of a factor multiply to its size, whatever is said of others."""
    forest = FactorForest()
    pool = [forest.new(s) for sizes in factors for s in sizes]
    pool += [forest.new(math.prod(factors[0])) for _ in range(2)]
    sizes = [forest.size(f) for f in pool]

    for _ in range(data.draw(st.integers(1, 5))):
        one, other = (data.draw(st.sampled_from(pool)) for _ in range(2))
        match data.draw(st.sampled_from(["unite", "split", "block", "reduce"])):
            case "unite" if forest.size(one) == forest.size(other):
                forest.unite([one], [other])
            case "split":
                forest.unite([pool[-1]], pool[: len(factors[0])])
            case "block":
                forest.block(one)
            case _:
                forest.reduce(one, data.draw(st.sampled_from(REDUCTIONS)))

    for factor, size in zip(pool, sizes, strict=True):
        assert forest.size(factor) == size
        leaves = forest.leaves(factor)
        assert math.prod(forest.size(leaf) for leaf in leaves) == size


@given(st.permutations(range(5)), st.integers(0, 4), st.booleans())
@checked
def test_the_order_of_unions_does_not_matter(
    order: list[int], marked: int, block: bool
) -> None:
    """A chain of unions shares one mark, wherever it was put and in any order."""
    forest = FactorForest()
    factors = [forest.new(4) for _ in range(6)]
    if block:
        forest.block(factors[marked])
    else:
        forest.reduce(factors[marked], "sum")

    for k in order:
        forest.unite([factors[k]], [factors[k + 1]])

    assert len({forest.find(f) for f in factors}) == 1
    assert {forest.is_blocked(f) for f in factors} == {block}
    assert {forest.reduction(f) for f in factors} == {"" if block else "sum"}


@given(factorisations(1), st.sampled_from(REDUCTIONS), st.booleans())
@checked
def test_marks_reach_the_parts_before_and_after_a_split(
    factors: list[list[int]], kind: str, before: bool
) -> None:
    forest = FactorForest()
    whole = forest.new(math.prod(factors[0]))
    parts = [forest.new(s) for s in factors[0]]

    if before:
        forest.reduce(whole, kind)
    forest.unite([whole], parts)
    if not before:
        forest.reduce(whole, kind)

    assert {forest.reduction(leaf) for leaf in forest.leaves(whole)} == {kind}
    assert not any(forest.is_blocked(leaf) for leaf in forest.leaves(whole))


def test_two_reductions_of_one_factor_block_it() -> None:
    for first, second in itertools.permutations(REDUCTIONS, 2):
        forest = FactorForest()
        one, other = forest.new(4), forest.new(4)
        forest.reduce(one, first)
        forest.reduce(other, second)
        forest.unite([one], [other])

        assert forest.is_blocked(one)
        assert forest.is_blocked(other)


def test_digits_of_an_index() -> None:
    assert digits(23, [2, 3, 4]) == (1, 2, 3)
