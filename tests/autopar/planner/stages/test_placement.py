"""Tests of `autopar.planner.stages.submeshes`."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.stages.submeshes import place


def test_stages_lie_in_their_order() -> None:
    cluster = Cluster.parse("2x4:h100")
    found = place(cluster, [(0, (1, 2)), (0, (1, 2)), (0, (1, 4))])
    assert found == [(0, 1), (2, 3), (4, 5, 6, 7)]


def test_large_stages_are_placed_first_where_there_is_no_room() -> None:
    """Two devices, then four, then two: the four begin at a host."""
    cluster = Cluster.parse("2x4:h100")
    found = place(cluster, [(0, (1, 2)), (0, (1, 4)), (0, (1, 2))])
    assert found == [(0, 1), (4, 5, 6, 7), (2, 3)]


def test_whole_hosts_need_not_divide_the_hosts() -> None:
    cluster = Cluster.parse("5x2:h100")
    found = place(cluster, [(0, (3, 2)), (0, (2, 2))])
    assert found == [tuple(range(6)), tuple(range(6, 10))]


def test_groups_of_unequal_devices_count_through() -> None:
    cluster = Cluster.parse("1x4:h100+1x4:a100")
    found = place(cluster, [(1, (1, 4)), (0, (1, 2)), (0, (1, 2))])
    assert found == [(4, 5, 6, 7), (0, 1), (2, 3)]


def test_blocks_of_a_torus() -> None:
    found = place(Cluster.parse("4x4:v5e"), [(0, (2, 2))] * 4)
    assert sorted(sum(found, ())) == list(range(16))
    assert found[0] == (0, 1, 4, 5)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="do not fit beside each other"):
        place(Cluster.parse("1x4:h100"), [(0, (1, 4)), (0, (1, 2))])
