"""Tests repeated runs against a search over all starts and periods."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.graph.build import repeated_classes

checked = settings(max_examples=examples(80), deadline=None, derandomize=True)


def longest_saving(codes: list[int], min_length: int = 2) -> int:
    """The most operators that a run with one period can save, over all positions."""
    best = 0
    for period in range(min_length, len(codes) // 2 + 1):
        saved, start = 0, 0
        while start + 2 * period <= len(codes):
            stop = start + period
            while stop < len(codes) and codes[stop] == codes[stop - period]:
                stop += 1
            if stop - start >= 2 * period:
                saved += stop - start - period
                start = stop
            else:
                start += 1
        best = max(best, saved)
    return best


def runs_of(classes: np.ndarray) -> list[tuple[int, int, int]]:
    """The runs (start, stop, period) that a result must consist of."""
    out: list[tuple[int, int, int]] = []
    k = 0
    while k < len(classes):
        shared = np.flatnonzero(classes == k)
        period = int(shared[1] - k) if len(shared) > 1 else 0
        stop = k + 1
        while period and stop < len(classes) and k <= classes[stop] < k + period:
            stop += 1
        if period:
            out.append((k, stop, period))
        k = stop
    return out


@given(st.lists(st.integers(0, 3), max_size=40))
@checked
def test_classes_are_made_of_periodic_runs(codes: list[int]) -> None:
    classes = repeated_classes(codes)

    covered: set[int] = set()
    for start, stop, period in runs_of(classes):
        assert stop - start >= 2 * period
        for k in range(start, stop):
            assert classes[k] == start + (k - start) % period
            assert codes[k] == codes[int(classes[k])]
        covered |= set(range(start, stop))
    assert all(classes[k] == k for k in range(len(codes)) if k not in covered)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
@checked
def test_no_more_is_saved_than_repeats(codes: list[int]) -> None:
    saved = len(codes) - len(set(repeated_classes(codes).tolist()))

    assert saved == 0 or longest_saving(codes) > 0
    assert saved <= len(codes) - len(set(codes))


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True),
    st.integers(2, 6),
    st.integers(0, 6),
)
@checked
def test_one_run_is_saved_as_brute_force_saves_it(
    layer: list[int], times: int, around: int
) -> None:
    edge = list(range(100, 100 + around))
    codes = edge + layer * times + [c + 100 for c in edge]

    saved = len(codes) - len(set(repeated_classes(codes).tolist()))

    assert saved == longest_saving(codes) == len(layer) * (times - 1)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(2, 5))
@checked
def test_names_of_the_operators_do_not_matter(codes: list[int], scale: int) -> None:
    renamed = [f"operator {scale * c}" for c in codes]

    assert repeated_classes(codes).tolist() == repeated_classes(renamed).tolist()


@pytest.mark.parametrize("min_length", [2, 3, 4])
def test_a_layer_has_a_least_length(min_length: int) -> None:
    classes = repeated_classes([1, 2, 3] * 4, min_length=min_length)

    count = len(set(classes.tolist()))
    assert count == (3 if min_length <= 3 else 12)
