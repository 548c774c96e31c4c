"""Tests tables of reshardings against the resharding of each pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.cluster import Cluster
from autopar.cost.combining import GATHERS, SUMS
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import Axes, Layout
from autopar.planner.search import candidate_meshes

CLUSTERS = ("2x4:h100", "2x3x4:v5p", "8:cpu")


def drawn_layout(data: st.DataObject, rank: int, axes: list[int]) -> Layout:
    """Some of the axes, in any order, on any of the dimensions."""
    found: list[Axes] = [()] * rank
    for axis in data.draw(st.permutations(axes)):
        place = data.draw(st.integers(-1, rank - 1))
        if place >= 0:
            found[place] = (*found[place], axis)
    return tuple(found)


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(CLUSTERS), st.integers(0, 4), st.data())
def test_a_table_holds_what_each_pair_takes(
    text: str, rank: int, data: st.DataObject
) -> None:
    cluster = Cluster.parse(text)
    pricer = Pricer(cluster, candidate_meshes(cluster)[-1])
    axes = list(range(len(pricer.sizes)))
    starts = list[tuple[Layout, Axes]]()
    for _ in range(data.draw(st.integers(1, 5))):
        partial = tuple(a for a in axes if data.draw(st.booleans()))
        rest = [a for a in axes if a not in partial]
        starts.append((drawn_layout(data, rank, rest), partial))
    targets = [drawn_layout(data, rank, axes) for _ in range(3)]
    reduction = data.draw(st.sampled_from(["sum", "max"]))
    together = data.draw(st.sampled_from([SUMS, GATHERS, frozenset[str]()]))
    share = data.draw(st.sampled_from([1.0, 0.5]))
    rest = reduction, 1e6, together, share
    found = pricer.reshard_matrix(starts, targets, *rest)
    each = [
        [pricer.reshard_s(start, target, partial, *rest) for target in targets]
        for start, partial in starts
    ]
    np.testing.assert_allclose(found, each, rtol=1e-12)
