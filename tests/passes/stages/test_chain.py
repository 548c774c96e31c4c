"""Tests of `autopar_passes.stages.layers`."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.stages.layers import chain_cost, cut_chain


@st.composite
def chains(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    units = draw(st.integers(1, 7))
    numbers = st.lists(st.integers(0, 9), min_size=units, max_size=units)
    work, crossing = (np.array(draw(numbers), float) for _ in range(2))
    return work, crossing, draw(st.integers(1, units))


@given(chains())
@settings(max_examples=examples(200), deadline=None)
def test_no_other_cut_costs_less(chain: tuple[np.ndarray, np.ndarray, int]) -> None:
    """The cost is that of the best of all cuts."""
    work, crossing, stretches = chain
    found = cut_chain(work, crossing, stretches)
    every = [
        chain_cost(work, crossing, (0, *cuts))
        for cuts in itertools.combinations(range(1, len(work)), stretches - 1)
    ]
    assert len(found) == stretches
    assert list(found) == sorted(set(found))
    assert chain_cost(work, crossing, found) == pytest.approx(min(every))


def test_a_cheap_boundary_is_worth_some_imbalance() -> None:
    """Work says to cut in the middle, bytes say one unit later."""
    crossing = np.array([0.0, 9.0, 9.0, 9.0, 1.0, 9.0])
    assert cut_chain(np.ones(6), crossing, 2) == (0, 4)
    assert cut_chain(np.ones(6), np.ones(6), 2) == (0, 3)


def test_more_stretches_than_units_are_refused() -> None:
    with pytest.raises(ValueError, match="2 units make 1 to 2 stretches, not 3"):
        cut_chain(np.ones(2), np.ones(2), 3)
