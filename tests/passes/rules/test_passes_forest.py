"""Factors under union and split."""

from autopar_passes.rules.shardy import FactorForest


def test_a_reshape_splits_a_factor_for_every_value_that_has_it() -> None:
    forest = FactorForest()
    whole, other = forest.new(32), forest.new(32)
    forest.unite([whole], [other])
    major, minor = forest.new(4), forest.new(8)

    forest.unite([whole], [major, minor])

    assert [forest.size(f) for f in forest.leaves(other)] == [4, 8]
    assert forest.leaves(whole) == forest.leaves(other) == (major, minor)


def test_splits_that_do_not_nest_are_blocked() -> None:
    forest = FactorForest()
    dim = forest.new(12)
    forest.unite([dim], [forest.new(3), forest.new(4)])

    forest.unite([dim], [forest.new(4), forest.new(3)])

    assert all(forest.is_blocked(leaf) for leaf in forest.leaves(dim))


def test_blocking_survives_union_and_split() -> None:
    forest = FactorForest()
    a, b = forest.new(8), forest.new(8)
    forest.block(a)
    forest.unite([b], [a])
    forest.unite([b], [forest.new(2), forest.new(4)])

    assert all(forest.is_blocked(leaf) for leaf in forest.leaves(b))


def test_two_kinds_of_reduction_block() -> None:
    forest = FactorForest()
    a = forest.new(8)
    forest.reduce(a, "sum")
    assert not forest.is_blocked(a)

    forest.reduce(a, "max")

    assert forest.is_blocked(a)


def test_reductions_of_united_factors_must_agree() -> None:
    forest = FactorForest()
    a, b = forest.new(8), forest.new(8)
    forest.reduce(a, "sum")
    forest.reduce(b, "min")

    forest.unite([a], [b])

    assert forest.is_blocked(a)


def test_a_reduction_reaches_the_parts_of_a_split() -> None:
    forest = FactorForest()
    a = forest.new(8)
    forest.reduce(a, "sum")

    forest.unite([forest.new(2), forest.new(4)], [a])

    assert [forest.reduction(leaf) for leaf in forest.leaves(a)] == ["sum", "sum"]
