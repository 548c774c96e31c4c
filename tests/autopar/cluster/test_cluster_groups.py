"""Clusters of unequal devices."""

import copy
import dataclasses
import pickle

import pytest
from cluster_strategies import GROUPABLE, grouped_clusters, link
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, ClusterError
from autopar.cluster.data import split_text

TEXT = "4x8:h100+2x8:a100"
BOTH = Cluster.parse(TEXT)


class TestParse:
    def test_groups(self):
        assert [str(group) for group in BOTH.groups] == [
            "4x8:h100 (group0)",
            "2x8:a100 (group1)",
        ]
        assert BOTH.num_devices == 48
        assert str(BOTH) == TEXT
        assert BOTH.groups[1].device.name == "a100"

    def test_one_group_is_a_plain_cluster(self):
        assert Cluster.parse("4x8:h100").groups == ()
        assert Cluster.parse("4x8:h100").between is None

    def test_equal_groups_stay_groups(self):
        twice = Cluster.parse("2x8:h100+2x8:h100")
        assert len(twice.groups) == 2
        assert twice != Cluster.parse("4x8:h100")
        assert str(twice) == "2x8:h100+2x8:h100"

    @given(st.lists(st.sampled_from(GROUPABLE), min_size=2, max_size=4))
    def test_round_trip(self, groups):
        text = "+".join(map(str, groups))
        assert str(Cluster.parse(text)) == text
        assert Cluster.parse(text) == Cluster(groups=tuple(groups))

    def test_options_belong_to_a_group(self):
        text = "2x4:h100,network=1e+11B/s+2x4:a100,memory=40GB"
        cluster = Cluster.parse(text)
        assert cluster.groups[0].levels[0].link.bandwidth_bytes_per_s == 1e11
        assert cluster.groups[1].memory_bytes == 40_000_000_000
        assert Cluster.parse(str(cluster)) == cluster

    @pytest.mark.parametrize(
        ("text", "groups"),
        [
            ("8:h100,efficiency=5e-1", ["8:h100,efficiency=5e-1"]),
            ("8:h100,efficiency=0.1e+0", ["8:h100,efficiency=0.1e+0"]),
            ("4x4:v5e+2x2:v5e", ["4x4:v5e", "2x2:v5e"]),
            ("8+8", ["8", "8"]),
            ("8+", ["8", ""]),
        ],
    )
    def test_plus_signs(self, text, groups):
        assert split_text(text) == groups

    def test_bad_groups(self):
        with pytest.raises(ClusterError, match="'' is not a shape"):
            Cluster.parse("8:h100+")
        with pytest.raises(ClusterError, match="unknown device 'h1'"):
            Cluster.parse("8:h100+8:h1")


class TestBetween:
    def test_is_as_slow_as_the_slowest(self):
        networks = [group.levels[0].link for group in BOTH.groups]
        assert BOTH.between.bandwidth_bytes_per_s == min(
            network.bandwidth_bytes_per_s for network in networks
        )
        slow = Cluster.parse("2x4:h100+2x4:t4").between
        assert slow.latency_s == 30e-6

    def test_of_single_hosts_is_the_preset_network(self):
        assert Cluster.parse("8:h100+8:a100").between == BOTH.between

    def test_is_unknown_for_a_torus(self):
        with pytest.raises(
            ClusterError, match=r"out of group 1 \(4x4:v5e.*\[between\]"
        ):
            Cluster.parse("8:h100+4x4:v5e")

    def test_given(self):
        groups = (Cluster.parse("8:h100"), Cluster.parse("4x4:v5e"))
        cluster = Cluster(groups=groups, between=link())
        assert cluster.between == link()
        assert str(cluster).startswith("8:h100+4x4:v5e (custom ")
        assert Cluster.from_data(cluster.to_data()) == cluster

    def test_that_is_no_default_is_said(self):
        changed = Cluster(groups=BOTH.groups, between=link())
        assert str(changed) == f"{TEXT} (custom {changed.fingerprint()[:8]})"
        assert changed.fingerprint() != BOTH.fingerprint()


class TestRefusals:
    @pytest.mark.parametrize(
        ("read", "what"),
        [
            (lambda c: c.device, "device"),
            (lambda c: c.levels, "levels"),
            (lambda c: c.memory_bytes, "device"),
            (lambda c: c.mesh_shapes(), "levels"),
            (lambda c: c.default_mesh(), "levels"),
            (lambda c: c.partition([(1, 8)]), "levels"),
            (lambda c: dataclasses.replace(c, levels=()), "device"),
        ],
    )
    def test_what_needs_equal_devices(self, read, what):
        said = (
            rf"cluster.{what} needs equal devices, and 4x8:h100\+2x8:a100 has groups "
            r"of unequal ones: plan one group at a time, cluster.groups\[0\] to "
            r"cluster.groups\[1\]"
        )
        with pytest.raises(ClusterError, match=said):
            read(BOTH)

    def test_a_group_is_planned_like_any_cluster(self):
        group, alone = BOTH.groups[1], Cluster.parse("2x8:a100")
        assert group.mesh_shapes() == alone.mesh_shapes()
        assert group.device == alone.device

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({}, "give device= and levels=, or groups="),
            ({"device": GROUPABLE[0].device}, "give device= and levels="),
            ({"groups": GROUPABLE[:2], "device": GROUPABLE[0].device}, "or groups="),
            ({"groups": GROUPABLE[:1]}, "one group of equal devices needs no groups="),
            ({"groups": (BOTH, GROUPABLE[0])}, "group 0 is itself of groups"),
            ({"groups": (BOTH.groups[0],) * 2}, "different names and devices"),
            ({"groups": GROUPABLE[:2], "between": link("ring")}, "is a switch"),
        ],
    )
    def test_bad_groups(self, given, said):
        with pytest.raises(ClusterError, match=said):
            Cluster(**given)

    def test_between_needs_groups(self):
        with pytest.raises(ClusterError, match="between= is a link between groups="):
            dataclasses.replace(GROUPABLE[0], between=link())


class TestDevices:
    def test_positions_and_names_go_on(self):
        assert BOTH.ids == tuple(range(48))
        assert BOTH.groups[1].ids == tuple(range(32, 48))
        assert BOTH.device_names[32] == "group1/host0/device0"
        assert BOTH.hosts[3:5] == ("group0/host3", "group1/host0")

    @settings(deadline=None)
    @given(grouped_clusters)
    def test_groups_share_nothing(self, cluster):
        assert len(set(cluster.ids)) == len(cluster.ids) == cluster.num_devices
        assert len(set(cluster.device_names)) == cluster.num_devices
        for group in cluster.groups:
            assert set(group.ids) <= set(cluster.ids)

    def test_slices_are_those_of_the_groups(self):
        expected = [
            (part, count) for group in BOTH.groups for part, count in group.slices()
        ]
        assert list(BOTH.slices()) == expected

    def test_slice(self):
        part = BOTH.slice((1, 4), offset=36)
        assert part.ids == (36, 37, 38, 39)
        assert part.device_names[0] == "group1/host0/device4"
        assert part == BOTH.groups[1].slice((1, 4), offset=4)
        with pytest.raises(
            ClusterError, match="count from device 32, the first of grou"
        ):
            BOTH.slice((1, 4), offset=33)
        with pytest.raises(ClusterError, match="no device 48: the groups have 48"):
            BOTH.slice((1, 4), offset=48)

    def test_without(self):
        found = BOTH.without("group0/host1", "group1/host0/device2")
        assert [group.num_devices for group in found.groups] == [24, 14]
        assert found.ids[:9] == (0, 1, 2, 3, 4, 5, 6, 7, 16)
        assert found.idle == ("group1/host1/device7",)
        assert found == BOTH.without(hosts=[1], devices=[34])

    @settings(deadline=None)
    @given(st.data(), grouped_clusters)
    def test_each_group_shrinks_on_its_own(self, data, cluster):
        """What a group loses is no matter of the others."""
        lost = data.draw(st.sets(st.sampled_from(cluster.device_names)))
        assume(len(lost) < cluster.num_devices)
        left = cluster.without(*sorted(lost))
        expected = []
        for group in cluster.groups or (cluster,):
            mine = sorted(lost.intersection(group.device_names))
            if len(mine) < group.num_devices:
                expected.append(group.without(*mine))
            elif group.idle:
                return  # the idle ones take over
        assert left.ids == sum((group.ids for group in expected), ())
        assert left.idle == sum((group.idle for group in expected), ())

    def test_without_a_group(self):
        left = BOTH.without("group0")
        assert left == BOTH.groups[1]
        assert left.levels[0].size == 2
        three = Cluster.parse(f"{TEXT}+1x4:t4").without("group0")
        assert three.device_names[0] == "group1/host0/device0"
        assert three.ids == tuple(range(32, 52))

    def test_with_hosts(self):
        assert BOTH.without("group0/host1").with_hosts("group0/host1") == BOTH
        grown = BOTH.with_hosts(["group0/host4", "group1/host2"])
        assert grown == Cluster.parse("5x8:h100+3x8:a100")
        assert grown.groups[1].ids[0] == 40

    def test_the_last_group_grows_under_its_name(self):
        left = BOTH.without("group0")
        assert left.with_hosts(1).hosts[-1] == "group1/host2"
        assert left.with_hosts("group1/new").hosts[-1] == "group1/new"
        with pytest.raises(ClusterError, match=r"host2 join no group.*'group1/'"):
            left.with_hosts("host2")

    @pytest.mark.parametrize(
        ("hosts", "said"),
        [
            (1, r"which group.*with_hosts\('group0/host4'\)"),
            ("host4", "host4 join no group; .* group0, group1, such as 'group0/host4'"),
            ("group1/host0", "'group1/host0' and all its devices are there"),
        ],
    )
    def test_with_hosts_errors(self, hosts, said):
        with pytest.raises(ClusterError, match=said):
            BOTH.with_hosts(hosts)


class TestValue:
    @settings(deadline=None)
    @given(grouped_clusters)
    def test_copies_are_equal(self, cluster):
        for made in (pickle.loads(pickle.dumps(cluster)), copy.deepcopy(cluster)):
            assert made == cluster
            assert hash(made) == hash(cluster)
        assert cluster != 1

    def test_repr(self):
        assert repr(BOTH) == f"<Cluster {BOTH}, {BOTH.num_devices} devices>"

    def test_toml(self, tmp_path):
        path = tmp_path / "cluster.toml"
        path.write_text(
            '[[group]]\n[group.device]\npreset = "h100"\n[[group.level]]\n'
            'name = "device"\nsize = 8\nlatency_s = 2e-6\n'
            "bandwidth_bytes_per_s = 360e9\n"
            '[[group]]\nhosts = ["old"]\n[group.device]\npreset = "v100"\n'
            '[[group.level]]\nname = "device"\nsize = 4\nlatency_s = 2e-6\n'
            "bandwidth_bytes_per_s = 120e9\n"
            "[between]\nlatency_s = 1e-5\nbandwidth_bytes_per_s = 1e9\n"
        )
        cluster = Cluster.parse(str(path))
        assert [group.num_devices for group in cluster.groups] == [8, 4]
        assert cluster.hosts == ("group0/host0", "group1/old")
        assert cluster.between.bandwidth_bytes_per_s == 1e9
