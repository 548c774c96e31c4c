"""Tests clusters after devices and hosts have left, returned or joined."""

import dataclasses

import jax
import numpy as np
import pytest
from cluster_strategies import any_clusters, built, small_clusters
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, ClusterError, CollectiveFit
from autopar.cluster.membership import largest_cluster
from autopar.cost.collectives import collective_s

EIGHT = Cluster.parse("8x8:h100")


class TestWithout:
    @settings(deadline=None)
    @given(st.data(), small_clusters(12), st.sampled_from(["devices", "hosts"]))
    def test_is_the_largest_regular_cluster(self, data, cluster, prefer):
        lost = data.draw(st.sets(st.sampled_from(cluster.ids), min_size=1))
        left = [i for i in cluster.ids if i not in lost]
        assume(left)

        found = cluster.without(devices=sorted(lost), prefer=prefer)

        shape, ids = largest_cluster(cluster.device, cluster.levels, left, prefer)
        assert tuple(level.size for level in found.levels) == shape
        assert found.ids == ids
        idle = [cluster.device_names.index(name) for name in found.idle]
        assert sorted([*found.ids, *idle]) == left

    @settings(deadline=None)
    @given(st.data(), small_clusters(12))
    def test_one_after_the_other_is_all_at_once(self, data, cluster):
        """Idle devices count again."""
        lost = data.draw(st.lists(st.sampled_from(cluster.ids), unique=True))
        assume(0 < len(lost) < cluster.num_devices)
        found = cluster
        for device in lost:
            found = found.without(devices=[device])
        assert found == cluster.without(devices=lost)

    def test_names_numbers_and_both(self):
        named = EIGHT.without("host3", "host0/device1")
        assert named == EIGHT.without(devices=[1], hosts=[3])
        assert named == EIGHT.without("host3", devices=[1])
        assert named.num_devices == 49

    def test_the_first_device_may_be_the_one(self):
        found = Cluster.parse("2x2:cpu").without("host0/device0", prefer="hosts")
        assert found.ids == (1, 2)
        assert found.device_names == ("host0/device1", "host1/device0")
        assert found.idle == ("host1/device1",)

    def test_a_pod(self):
        found = Cluster.parse("2x2x2:h100").without("pod0")
        assert found.hosts == ("pod1/host0", "pod1/host1")

    def test_plans_for_what_is_left_have_meshes(self):
        found = EIGHT.without("host0")
        assert found.default_mesh().sizes == (7, 8)
        assert found.memory_bytes == EIGHT.memory_bytes

    @settings(deadline=None)
    @given(any_clusters)
    def test_no_device_is_left(self, cluster):
        names = [*cluster.device_names, *cluster.idle]
        with pytest.raises(ClusterError, match="no device is left of"):
            cluster.without(*names)

    @pytest.mark.parametrize(
        ("names", "options", "said"),
        [
            (
                ["host9"],
                {},
                r"'host9' is not in the cluster; known are host0, .*Example",
            ),
            (["host3", "host3"], {}, "'host3', or a part of it, is named twice"),
            (["host3", "host3/device1"], {}, "'host3/device1', or a part of it"),
            (["host3/device1", "host3"], {}, "'host3', or a part of it, is named"),
            (["host0"], {"hosts": [0]}, "'host0', or a part of it, is named twice"),
            (
                [],
                {"devices": [64]},
                r"no device 64; the devices are 0, 1, 2, 3, ..., 63",
            ),
            ([], {"hosts": [8]}, "no host 8; they are 0 to 7"),
            ([], {"prefer": "pods"}, "prefer='pods' is unknown: it is one of"),
        ],
    )
    def test_errors(self, names, options, said):
        with pytest.raises(ClusterError, match=said):
            EIGHT.without(*names, **options)

    def test_what_has_left_is_unknown(self):
        left = EIGHT.without("host3")
        with pytest.raises(ClusterError, match="'host3' is not in the cluster"):
            left.without("host3")
        with pytest.raises(ClusterError, match="no device 24"):
            left.without(devices=[24])


class TestRuntime:
    def test_a_mesh_lies_on_the_devices_that_are_left(self):
        """Positions are indices of `jax.devices()`."""
        devices = jax.devices()
        cluster = Cluster.local(8).without(devices=[0, 3])
        grid = np.array([devices[i] for i in cluster.ids]).reshape(
            cluster.default_mesh().sizes
        )
        assert {device.id for device in grid.flat} == {1, 2, 4, 5, 6, 7}

    def test_stages_lie_on_devices_of_their_own(self):
        stages = Cluster.local(8).partition([(2,), (2,), (4,)])
        held = [jax.devices()[i].id for stage in stages for i in stage.ids]
        assert sorted(held) == list(range(8))

    def test_forgetting_the_place_gives_interchangeable_clusters(self):
        """One plan does for stages that differ in their place only."""
        first, second = Cluster.parse("2x4:h100").partition([(1, 4), (1, 4)])
        assert first.fingerprint() != second.fingerprint()
        bare = [dataclasses.replace(part, members=None) for part in (first, second)]
        assert bare[0] == bare[1] == Cluster.parse("1x4:h100")


class TestWithHosts:
    @settings(deadline=None)
    @given(st.data(), small_clusters(12), st.sampled_from(["devices", "hosts"]))
    def test_is_the_largest_regular_cluster(self, data, cluster, prefer):
        """Over what was there, idle or not, and the hosts that came back."""
        lost = data.draw(st.sets(st.sampled_from(cluster.ids), min_size=1))
        assume(len(lost) < cluster.num_devices)
        names = dict(zip(cluster.ids, cluster.device_names, strict=True))
        back = names[data.draw(st.sampled_from(sorted(lost)))].rpartition("/")[0]

        found = cluster.without(devices=sorted(lost)).with_hosts(back, prefer)

        there = [
            i for i in names if i not in lost or names[i].rpartition("/")[0] == back
        ]
        shape, ids = largest_cluster(cluster.device, cluster.levels, there, prefer)
        assert tuple(level.size for level in found.levels) == shape
        assert found.ids == ids
        assert len(found.ids) + len(found.idle) == len(there)

    def test_hosts_join_one_by_one(self):
        cluster = Cluster.parse("1x4:cpu")
        for hosts in range(2, 6):
            cluster = cluster.with_hosts(1)
            assert cluster == Cluster.parse(f"{hosts}x4:cpu")

    def test_a_host_joins_while_another_is_broken(self):
        found = Cluster.parse("2x4:h100").without("host1/device0").with_hosts(1)
        assert [level.size for level in found.levels] == [3, 3]
        assert found.hosts == ("host0", "host1", "host2")
        assert found.idle == ("host0/device3", "host2/device3")
        assert found.with_hosts("host1") == Cluster.parse("3x4:h100")

    @settings(deadline=None)
    @given(st.data(), small_clusters(12))
    def test_who_comes_back_is_where_it_was(self, data, cluster):
        lost = data.draw(st.sets(st.sampled_from(cluster.ids), min_size=1))
        assume(len(lost) < cluster.num_devices)
        hosts = {cluster.device_names[i].rpartition("/")[0] for i in lost}
        assert (
            cluster.without(devices=sorted(lost)).with_hosts(sorted(hosts)) == cluster
        )

    @given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
    def test_new_hosts_come_last(self, hosts, devices, more):
        cluster = Cluster.parse(f"{hosts}x{devices}:h100")
        assert cluster.with_hosts(more) == Cluster.parse(
            f"{hosts + more}x{devices}:h100"
        )

    def test_a_number_takes_those_that_left_first(self):
        found = EIGHT.without("host2", "host5")
        assert found.with_hosts(1).hosts == EIGHT.without("host5").hosts
        assert found.with_hosts(2) == EIGHT
        assert found.with_hosts(3) == Cluster.parse("9x8:h100")

    def test_new_names(self):
        found = EIGHT.with_hosts(["node-a", "node-b"])
        assert found.hosts[-3:] == ("host7", "node-a", "node-b")
        assert found.ids == tuple(range(80))
        assert EIGHT.with_hosts("host8") == Cluster.parse("9x8:h100")

    def test_a_host_that_lost_a_device_is_repaired(self):
        found = EIGHT.without("host1/device1", prefer="hosts")
        assert found.num_devices == 56
        assert found.with_hosts("host1") == EIGHT

    def test_new_pods(self):
        cluster = Cluster.parse("2x2x4:h100")
        assert cluster.with_hosts(2) == Cluster.parse("3x2x4:h100")
        with pytest.raises(ClusterError, match="a new pod has 2 hosts; add a multiple"):
            cluster.with_hosts(1)

    def test_a_torus_is_whole_again(self):
        cluster = Cluster.parse("16x16:v5e")
        lost = cluster.without("x3")
        assert lost.levels[0].link.topology == "line"
        assert lost.with_hosts(1) == cluster

    @pytest.mark.parametrize("text", ["8:h100", "4x4:v5e"])
    def test_no_switch_between_hosts(self, text):
        with pytest.raises(ClusterError, match=r"no new host can join.*Describe"):
            Cluster.parse(text).with_hosts(1)

    @pytest.mark.parametrize(
        ("hosts", "said"),
        [
            (0, "cannot add 0 hosts; give 1 or more"),
            ([], "name at least one host"),
            ("host3", "'host3' and all its devices are there already"),
            (["new", "new"], "a host is named twice: new, new"),
            ("host0/device1", "not those of other parts"),
        ],
    )
    def test_errors(self, hosts, said):
        with pytest.raises(ClusterError, match=said):
            EIGHT.with_hosts(hosts)

    def test_unknown_preference(self):
        with pytest.raises(ClusterError, match="prefer='pods' is unknown"):
            EIGHT.with_hosts(1, prefer="pods")

    def test_a_slice_takes_back_hosts_of_the_whole(self):
        half = built((4, "switch"), (2, "switch")).slice((2, 2), offset=4)
        assert half.with_hosts("host0").ids == (0, 1, 4, 5, 6, 7)


class TestDevicesThatComeBack:
    def test_to_where_they_were(self) -> None:
        whole = Cluster.parse("2x4:h100")
        less = whole.without(devices=(1, 6))
        assert {*less.with_devices((1,)).ids} == {0, 1, 2, 4, 5, 7}
        assert less.with_devices((1, 6)).ids == whole.ids

    def test_of_groups(self) -> None:
        whole = Cluster.parse("2x2:h100+1x4:a100")
        assert whole.without(devices=(5,)).with_devices((5,)).ids == whole.ids

    @pytest.mark.parametrize(
        ("devices", "text"),
        [
            ((0,), "there already"),
            ((8,), "not devices"),
            ((1, 1), "different"),
            ((), "different"),
        ],
    )
    def test_refused(self, devices: tuple[int, ...], text: str) -> None:
        with pytest.raises(ClusterError, match=text):
            Cluster.parse("2x4:h100").without(devices=(1,)).with_devices(devices)


def mesh_axes(cluster):
    """The axes of a mesh with one axis for each level."""
    return cluster.default_mesh().axes


class TestMeasuredLinks:
    @pytest.mark.parametrize("text", ["2x4:h100", "2x4:b200", "8:cpu", "2x4:a100"])
    def test_a_slower_link_costs_more(self, text: str) -> None:
        """Also where tables of measurements would say otherwise."""
        cluster = Cluster.parse(text)
        for level in cluster.levels:
            rate = level.link.bandwidth_bytes_per_s / 10
            slow = cluster.with_link(level.name, bandwidth_bytes_per_s=rate)
            before, after = (
                collective_s("all_reduce", 1 << 26, c.default_mesh().axes)
                for c in (cluster, slow)
            )
            assert after > 1.2 * before

    def test_a_profile_is_scaled(self) -> None:
        fit = CollectiveFit(
            kind="all_reduce", group_size=4, latency_s=1e-4, s_per_byte=1e-9
        )
        cluster = Cluster.parse("4:cpu")
        link = dataclasses.replace(cluster.levels[0].link, measured=(fit,))
        level = dataclasses.replace(cluster.levels[0], link=link)
        cluster = dataclasses.replace(cluster, levels=(level,))
        half = link.bandwidth_bytes_per_s / 2
        slow = cluster.with_link(level.name, bandwidth_bytes_per_s=half)
        (found,) = slow.levels[0].link.measured
        assert (found.s_per_byte, found.latency_s) == (2e-9, 1e-4)

    def test_of_groups(self) -> None:
        groups = Cluster.parse("2x2:h100+1x4:a100")
        slow = groups.with_link("between", latency_s=1.0)
        assert slow.between is not None
        assert slow.between.latency_s == 1.0
        name = f"group0/{groups.groups[0].levels[0].name}"
        slow = groups.with_link(name, bandwidth_bytes_per_s=5.0)
        assert slow.groups[0].levels[0].link.bandwidth_bytes_per_s == 5.0
        assert slow.groups[1] == groups.groups[1]

    @pytest.mark.parametrize("level", ["rack", "group0", "group9/host", ""])
    def test_unknown(self, level: str) -> None:
        for text in ("2x4:h100", "2x2:h100+1x4:a100"):
            with pytest.raises(ClusterError, match="no level"):
                Cluster.parse(text).with_link(level, latency_s=1.0)


class TestSpeeds:
    """Parts of a cluster that compute at other speeds."""

    def test_a_slow_host_is_a_group_in_its_place(self) -> None:
        whole = Cluster.parse("4x2:cpu,network=1Gb/s")
        found = whole.with_speeds([1, 0.5, 1, 1])
        assert [group.num_devices for group in found.groups] == [2, 2, 4]
        assert found.ids == whole.ids
        assert found.between == whole.levels[0].link
        fast, slow, _ = found.groups
        assert fast.device == whole.device
        for dtype in ("float32", "bfloat16"):
            assert slow.device.peak(dtype) == 0.5 * whole.device.peak(dtype)
        assert slow.device.vector_peak == 0.5 * whole.device.vector_peak
        assert slow.device.kernel_latency_s == 2 * whole.device.kernel_latency_s
        assert slow.device.memory_bytes == whole.device.memory_bytes
        assert Cluster.from_data(found.to_data()) == found

    def test_equal_speeds_make_no_groups(self) -> None:
        whole = Cluster.parse("4x2:cpu")
        assert whole.with_speeds([1, 1]) == whole
        half = whole.with_speeds([0.5] * 4)
        assert half.levels == whole.levels
        assert half.device == whole.device.at_speed(0.5)

    def test_a_flat_cluster_is_cut_into_blocks(self) -> None:
        found = Cluster.parse("8:cpu").with_speeds([1, 1, 0.25, 1])
        assert [group.num_devices for group in found.groups] == [4, 2, 2]

    @pytest.mark.parametrize("speeds", [[], [1, 1, 1], [1, 0, 1, 1], [1] * 8])
    def test_wrong_speeds_are_refused(self, speeds: list[float]) -> None:
        with pytest.raises(ClusterError):
            Cluster.parse("4x2:cpu").with_speeds(speeds)

    def test_groups_and_parts_of_clusters_are_refused(self) -> None:
        whole = Cluster.parse("4x2:cpu")
        for cluster in (whole.without("host0"), Cluster.parse("2x2:cpu+2x2:h100")):
            with pytest.raises(ClusterError, match="equal devices"):
                cluster.with_speeds([1, 0.5])
