"""Tests slices and partitions against their rules, by hand and by brute force."""

import itertools
import math
from collections import Counter

import pytest
from cluster_strategies import built, small_clusters
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, ClusterError
from autopar.cluster import slices as slices_module


def sizes(cluster):
    return tuple(level.size for level in cluster.levels)


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def offsets(cluster, shape):
    return list(slices_module.offsets(cluster.levels, shape))


class TestShapes:
    @given(st.integers(2, 8), st.integers(1, 8))
    def test_two_levels_have_the_submeshes_of_alpa(self, hosts, devices):
        cluster = Cluster.parse(f"{hosts}x{devices}:h100")
        inside = [(1, d) for d in divisors(devices)]
        whole = [(h, devices) for h in range(2, hosts + 1)]
        assert [sizes(part) for part, _ in cluster.slices()] == inside + whole

    @given(st.integers(1, 16))
    def test_one_host(self, devices):
        cluster = Cluster.parse(f"{devices}:h100")
        expected = [(d,) for d in divisors(devices)]
        assert [sizes(part) for part, _ in cluster.slices()] == expected

    def test_three_levels(self):
        """Devices of a host, hosts of a pod by divisors, pods in any number."""
        found = {sizes(part): n for part, n in Cluster.parse("3x4x2:a100").slices()}
        assert found == {
            (1, 1, 1): 24,
            (1, 1, 2): 12,
            (1, 2, 2): 6,
            (1, 4, 2): 3,
            (2, 4, 2): 1,
            (3, 4, 2): 1,
        }

    def test_one_pod_is_cut_as_hosts_are(self):
        found = [sizes(part) for part, _ in Cluster.parse("1x3x2:a100").slices()]
        assert found == [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2)]

    @given(st.integers(1, 8), st.integers(1, 8))
    def test_torus_has_blocks_that_divide_it(self, x, y):
        found = {sizes(part) for part, _ in Cluster.parse(f"{x}x{y}:v5e").slices()}
        assert found == set(itertools.product(divisors(x), divisors(y)))

    def test_hosts_of_tori(self):
        """Blocks of one torus, or whole tori."""
        cluster = built((2, "switch"), (2, "ring"), (2, "ring"))
        found = {sizes(part) for part, _ in cluster.slices()}
        blocks = {(1, x, y) for x in (1, 2) for y in (1, 2)}
        assert found == blocks | {(2, 2, 2)}

    @settings(deadline=None)
    @given(small_clusters(24))
    def test_the_last_is_the_cluster_itself(self, cluster):
        assert cluster.slices()[-1] == (cluster, 1)

    @settings(deadline=None)
    @given(small_clusters(24))
    def test_count_side_by_side(self, cluster):
        """As many as fit when each takes the first place that is free."""
        for part, count in cluster.slices():
            shape, taken, found = sizes(part), set(), 0
            for offset in offsets(cluster, shape):
                ids = set(cluster.slice(shape, offset).ids)
                if not ids & taken:
                    taken |= ids
                    found += 1
            assert found == count


class TestSlice:
    @settings(deadline=None)
    @given(small_clusters(24))
    def test_holds_the_devices_of_an_aligned_block(self, cluster):
        grid = sizes(cluster)
        cells = list(itertools.product(*map(range, grid)))
        for shape in slices_module.shapes(cluster.levels):
            for offset in offsets(cluster, shape):
                part = cluster.slice(shape, offset)
                assert sizes(part) == shape
                corner = cells[offset]
                expected = [
                    i
                    for i, cell in enumerate(cells)
                    if all(
                        a <= c < a + s
                        for a, c, s in zip(corner, cell, shape, strict=True)
                    )
                ]
                assert list(part.ids) == expected
                assert part.device_names == tuple(
                    cluster.device_names[i] for i in expected
                )

    def test_slice_of_a_slice(self):
        host = Cluster.parse("4x8:h100").slice((1, 8), offset=16)
        part = host.slice((1, 2), offset=4)
        assert part.ids == (20, 21)
        assert part == Cluster.parse("4x8:h100").slice((1, 2), offset=20)
        assert part.hosts == ("host2",)

    def test_switches_keep_their_links(self):
        cluster = Cluster.parse("4x8:h100")
        part = cluster.slice((2, 8))
        assert part.levels[0].link == cluster.levels[0].link
        assert part.levels[1] == cluster.levels[1]

    def test_a_cut_ring_is_a_line_of_half_the_bandwidth(self):
        cluster = Cluster.parse("16x16:v5e")
        x, y = cluster.slice((8, 16)).levels
        whole = cluster.levels[0].link.bandwidth_bytes_per_s
        assert (x.link.topology, x.link.bandwidth_bytes_per_s) == ("line", whole / 2)
        assert y == cluster.levels[1]

    @pytest.mark.parametrize(
        ("shape", "said"),
        [
            ((1, 3), r"shape 1x3: the links of 4x8 allow 1x1, 1x2, 1x4, 1x8, 2x8, "),
            ((2, 4), "no slice has the shape 2x4"),
            ((5, 8), "no slice has the shape 5x8"),
            ((0, 8), "no slice has the shape 0x8"),
            ((8,), "no slice has the shape 8:"),
        ],
    )
    def test_shapes_that_the_links_do_not_allow(self, shape, said):
        with pytest.raises(ClusterError, match=said):
            Cluster.parse("4x8:h100").slice(shape)

    @pytest.mark.parametrize("offset", [-1, 1, 32, 6])
    def test_offsets_that_are_not_aligned(self, offset):
        with pytest.raises(ClusterError, match="they begin at 0, 4, 8, 12, 16, 20, 24"):
            Cluster.parse("4x8:h100").slice((1, 4), offset=offset)


class TestPartition:
    @settings(deadline=None)
    @given(st.data(), small_clusters(24))
    def test_of_shapes_that_fit(self, data, cluster):
        """Shapes cut off a cluster at random: in any order they fit again."""
        shapes = slices_module.shapes(cluster.levels)
        left, chosen = set(range(cluster.num_devices)), []
        while left:
            first = min(left)
            fitting = [
                shape
                for shape in shapes
                if first in offsets(cluster, shape)
                and left.issuperset(slices_module.block(cluster.levels, shape, first))
            ]
            shape = data.draw(st.sampled_from(fitting))
            left -= set(slices_module.block(cluster.levels, shape, first))
            chosen.append(shape)
        asked = data.draw(st.permutations(chosen))

        found = cluster.partition(asked)

        assert [sizes(part) for part in found] == list(asked)
        held = Counter(i for part in found for i in part.ids)
        assert held == Counter(cluster.ids)

    @settings(deadline=None)
    @given(st.data(), small_clusters(6))
    def test_is_found_where_there_is_one(self, data, cluster):
        """Against trying every place of every slice."""
        shapes, left, asked = (
            slices_module.shapes(cluster.levels),
            cluster.num_devices,
            [],
        )
        while left:
            fitting = [shape for shape in shapes if math.prod(shape) <= left]
            asked.append(data.draw(st.sampled_from(fitting)))
            left -= math.prod(asked[-1])
        possible = any(
            len({i for part in choice for i in part}) == cluster.num_devices
            for choice in itertools.product(
                *(
                    [
                        slices_module.block(cluster.levels, shape, offset)
                        for offset in offsets(cluster, shape)
                    ]
                    for shape in asked
                )
            )
        )
        if possible:
            held = [i for part in cluster.partition(asked) for i in part.ids]
            assert sorted(held) == list(cluster.ids)
        else:
            with pytest.raises(ClusterError, match="do not fit side by side"):
                cluster.partition(asked)

    def test_equal_shapes_in_order(self):
        parts = Cluster.parse("4x2:h100").partition([(1, 2)] * 4)
        assert [part.ids for part in parts] == [(0, 1), (2, 3), (4, 5), (6, 7)]

    def test_stages_of_several_sizes(self):
        parts = Cluster.parse("6x4:h100").partition([(1, 4), (4, 4), (1, 2), (1, 2)])
        assert [part.num_devices for part in parts] == [4, 16, 2, 2]

    def test_goes_back_from_a_dead_end(self):
        """The first row cannot hold both pairs: no square would be left."""
        cluster = built((2, "line"), (4, "line"))
        parts = cluster.partition([(1, 2), (2, 2), (1, 2)])
        assert sorted(i for part in parts for i in part.ids) == list(range(8))

    def test_as_many_stages_as_devices(self):
        parts = Cluster.parse("150x8:h100").partition([(1, 1)] * 1200)
        assert parts[-1].ids == (1199,)

    def test_parts_of_a_part(self):
        half = Cluster.parse("4x2:h100").slice((2, 2), offset=4)
        assert [p.ids for p in half.partition([(1, 2)] * 2)] == [(4, 5), (6, 7)]

    def test_too_few_devices(self):
        said = "1x2, 1x2 are 4 devices, and the cluster has 8"
        with pytest.raises(ClusterError, match=said):
            Cluster.parse("4x2:h100").partition([(1, 2), (1, 2)])

    def test_that_cannot_be_laid(self):
        """A row and a column of a torus cross."""
        cluster = built((3, "line"), (3, "line"))
        assert cluster.partition([(1, 3), (1, 3), (1, 1), (1, 1), (1, 1)])
        said = "1x3, 3x1, 1x1, 1x1, 1x1 do not fit side by side in 3x3"
        with pytest.raises(ClusterError, match=said):
            cluster.partition([(1, 3), (3, 1), (1, 1), (1, 1), (1, 1)])

    def test_unknown_shape(self):
        with pytest.raises(ClusterError, match="no slice has the shape 3x1"):
            Cluster.parse("4x2:h100").partition([(3, 1), (1, 2)])
