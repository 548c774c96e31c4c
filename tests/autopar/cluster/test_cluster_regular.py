"""Tests the largest regular cluster against all sets of devices."""

import itertools
import math

from cluster_strategies import built, small_clusters
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.cluster import Cluster
from autopar.cluster.membership import largest_cluster


def is_run(found, size, wraps):
    """Whether coordinates are neighbours, also across wrap-around links."""
    starts = range(size) if wraps else range(size - len(found) + 1)
    return any(
        found == {(start + i) % size for i in range(len(found))} for start in starts
    )


def torus_depth(levels):
    torus = itertools.takewhile(lambda level: level.link.topology != "switch", levels)
    return max(1, len(list(torus)))


def shape_of(cells, levels):
    """The shape of a set of coordinates; None if the set is not regular."""
    if not levels:
        return ()
    depth = torus_depth(levels)
    outer = {cell[:depth] for cell in cells}
    sides = [{at[i] for at in outer} for i in range(depth)]
    if len(outer) < math.prod(map(len, sides)):
        return None
    for side, level in zip(sides, levels, strict=False):
        topology = level.link.topology
        if topology != "switch" and not is_run(side, level.size, topology == "ring"):
            return None
    inner = {
        shape_of([cell[depth:] for cell in cells if cell[:depth] == at], levels[depth:])
        for at in outer
    }
    (one,) = inner if len(inner) == 1 else (None,)
    return None if one is None else (*map(len, sides), *one)


def coordinates(levels):
    return list(itertools.product(*(range(level.size) for level in levels)))


def every_shape(cluster, there):
    """The shapes of all regular sets of the remaining devices."""
    cells = [coordinates(cluster.levels)[position] for position in there]
    found = set()
    for count in range(1, len(cells) + 1):
        for some in itertools.combinations(cells, count):
            found.add(shape_of(some, cluster.levels))
    return found - {None}


@settings(max_examples=examples(80), deadline=None)
@given(st.data(), small_clusters(), st.sampled_from(["devices", "hosts"]))
def test_matches_brute_force(data, cluster, prefer):
    ids = range(cluster.num_devices)
    there = sorted(data.draw(st.sets(st.sampled_from(ids), min_size=1)))

    shape, positions = largest_cluster(cluster.device, cluster.levels, there, prefer)

    cells = [coordinates(cluster.levels)[position] for position in positions]
    assert shape_of(cells, cluster.levels) == shape
    assert set(positions) <= set(there)
    assert len(set(positions)) == len(positions) == math.prod(shape)
    shapes = every_shape(cluster, there)
    most = max(map(math.prod, shapes))
    assert math.prod(shape) == most
    best = [s for s in shapes if math.prod(s) == most]
    hosts = [math.prod(s[:-1]) for s in best]
    in_host = [s[-1] for s in best]
    if prefer == "hosts":
        assert math.prod(shape[:-1]) == max(hosts)
    else:
        assert shape[-1] == max(in_host)


@settings(max_examples=examples(50), deadline=None)
@given(small_clusters(most_devices=16))
def test_nothing_lost_changes_nothing(cluster):
    ids = range(cluster.num_devices)
    shape, positions = largest_cluster(cluster.device, cluster.levels, ids, "devices")
    assert shape == tuple(level.size for level in cluster.levels)
    assert positions == tuple(ids)


def test_devices_or_hosts_where_both_are_as_many():
    """8 hosts of 8 less one device: 7 hosts of 8, or 8 hosts of 7."""
    cluster = Cluster.parse("8x8:h100")
    there = [i for i in range(64) if i != 9]
    shape, positions = largest_cluster(cluster.device, cluster.levels, there, "devices")
    assert shape == (7, 8)
    assert positions == (*range(8), *range(16, 64))
    shape, positions = largest_cluster(cluster.device, cluster.levels, there, "hosts")
    assert shape == (8, 7)
    assert positions[7:14] == (8, 10, 11, 12, 13, 14, 15)


def test_a_ring_goes_on_around_the_gap():
    cluster = built((6, "ring"))
    shape, positions = largest_cluster(
        cluster.device, cluster.levels, [0, 1, 3, 4, 5], "hosts"
    )
    assert (shape, positions) == ((5,), (3, 4, 5, 0, 1))


def test_a_line_does_not():
    cluster = built((6, "line"))
    shape, positions = largest_cluster(
        cluster.device, cluster.levels, [0, 1, 3, 4, 5], "hosts"
    )
    assert (shape, positions) == ((3,), (3, 4, 5))


def test_a_preset_dimension_without_wrap_around_is_a_line():
    """v5e joins the ends of dimensions of 16 only."""
    for size, expected in ((16, 15), (8, 6)):
        cluster = Cluster.parse(f"{size}:v5e")
        there = [i for i in range(size) if i != 1]
        shape, _ = largest_cluster(cluster.device, cluster.levels, there, "devices")
        assert shape == (expected,)
