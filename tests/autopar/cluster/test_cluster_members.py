"""Tests names and positions of devices, and texts of clusters."""

import itertools
import re

import pytest
from cluster_strategies import built, equal_clusters, small_clusters
from hypothesis import given, settings

from autopar.cluster import Cluster, ClusterError, Members
from autopar.cluster.members import everything, list_names

# Plans are kept by fingerprint: those of clusters that say nothing new stay.
FINGERPRINTS = [
    ("8x8:h100", "ff3e2d718bd5784a"),
    ("8:h100", "99445032804d57c0"),
    ("2x4x8:a100", "a01bd28a12c247b5"),
    ("16x16:v5e", "117e5181f4f0dfaf"),
    ("16x4:v5e", "9772359886d92062"),
    ("1:t4", "f4ba729a00885735"),
    ("2x4:h100,memory=40GB,network=100Gb/s", "d547657ca9b136db"),
]


@pytest.mark.parametrize(("text", "fingerprint"), FINGERPRINTS)
def test_whole_clusters_keep_their_fingerprints(text, fingerprint):
    assert Cluster.parse(text).fingerprint() == fingerprint


class TestNames:
    @given(small_clusters(24))
    def test_one_for_each_device_row_major(self, cluster):
        grid = [
            [f"{level.name}{i}" for i in range(level.size)] for level in cluster.levels
        ]
        paths = ["/".join(path) for path in itertools.product(*grid)]
        prefix = "host0/" if len(cluster.levels) == 1 else ""
        assert cluster.device_names == tuple(prefix + path for path in paths)
        assert cluster.ids == tuple(range(cluster.num_devices))
        assert cluster.idle == ()

    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("2x8:h100", ("host0", "host1")),
            ("2x2x8:h100", ("pod0/host0", "pod0/host1", "pod1/host0", "pod1/host1")),
            ("8:h100", ("host0",)),
            ("2x8:v5e", ("x0", "x1")),
        ],
    )
    def test_hosts(self, text, hosts):
        assert Cluster.parse(text).hosts == hosts

    @settings(deadline=None)
    @given(equal_clusters)
    def test_names_and_ids_go_together(self, cluster):
        whole = cluster.members.whole if cluster.members else cluster.levels
        names = everything(whole).names(cluster.ids)
        assert cluster.device_names == names
        assert len(set(names)) == cluster.num_devices

    def test_of_a_block(self):
        blocks = everything(Cluster.parse("2x3x4:h100").levels).blocks()
        assert blocks["pod1"] == range(12, 24)
        assert blocks["pod1/host0"] == range(12, 16)
        assert blocks["pod1/host0/device3"] == range(15, 16)
        assert len(blocks) == 2 + 6 + 24

    def test_few_and_many(self):
        assert list_names(["a"] * 12) == ", ".join("a" * 12)
        assert (
            list_names([str(i) for i in range(20)]) == "0, 1, 2, 3, ..., 19 (20 in all)"
        )


class TestHostNames:
    TEXT = 'hosts = ["alpha","beta"]\n\n'

    def named(self, tmp_path, text=TEXT):
        path = tmp_path / "cluster.toml"
        path.write_text(text + Cluster.parse("2x4:h100").to_toml())
        return Cluster.from_toml(path)

    def test_from_toml(self, tmp_path):
        cluster = self.named(tmp_path)
        assert cluster.hosts == ("alpha", "beta")
        assert cluster.device_names[5] == "beta/device1"
        assert cluster.to_toml().startswith(self.TEXT + "[device]\n")
        assert cluster.fingerprint() != Cluster.parse("2x4:h100").fingerprint()
        assert str(cluster) == f"2x4:h100 (custom {cluster.fingerprint()[:8]})"

    def test_stay_with_the_hosts(self, tmp_path):
        cluster = self.named(tmp_path)
        assert cluster.without("alpha").hosts == ("beta",)
        assert cluster.slice((1, 2), offset=6).device_names[0] == "beta/device2"
        assert cluster.with_hosts(1).hosts == ("alpha", "beta", "host2")
        assert cluster.without("beta").with_hosts("gamma").hosts == ("alpha", "gamma")

    @pytest.mark.parametrize(
        ("hosts", "said"),
        [
            ('["a"]', "1 names for 2 hosts"),
            ('["a", "a"]', "must be different.*a, a"),
            ('["a", ""]', "not empty"),
            ('["a", "a/device1"]', "not those of other parts"),
        ],
    )
    def test_bad_names(self, tmp_path, hosts, said):
        with pytest.raises(ClusterError, match=said):
            self.named(tmp_path, f"hosts = {hosts}\n")


class TestText:
    @pytest.mark.parametrize(
        ("cluster", "text"),
        [
            (
                Cluster.parse("4x8:h100").slice((1, 2), 4),
                "1x2:h100 (devices 4-5 of 4x8)",
            ),
            (
                Cluster.parse("2x2:h100").without("host0/device1"),
                "1x2:h100 (devices 2-3 of 2x2, 1 idle)",
            ),
            (
                Cluster.parse("4x2:h100").without("host1"),
                "3x2:h100 (devices 0-1, 4-7 of 4x2)",
            ),
        ],
    )
    def test_says_which_devices(self, cluster, text):
        assert str(cluster) == text

    def test_of_a_cut_torus(self):
        text = str(Cluster.parse("16:v5e").without("host0/x0"))
        assert re.fullmatch(r"15:v5e \(custom \w{8}, devices 1-15 of 16\)", text)

    def test_repr_is_one_line(self):
        assert repr(Cluster.parse("1:cpu")) == "<Cluster 1:cpu, 1 device>"
        cluster = Cluster.parse("2x4:h100").slice((1, 2))
        assert repr(cluster) == "<Cluster 1x2:h100 (devices 0-1 of 2x4), 2 devices>"


class TestMembers:
    def members(self, **changes):
        cluster = built((2, "switch"), (2, "switch"))
        return Members(**{"whole": cluster.levels, "positions": (0, 1)} | changes)

    def test_that_say_nothing_are_none(self):
        cluster = built((2, "switch"), (2, "switch"))
        whole = everything(cluster.levels)
        made = Cluster(device=cluster.device, levels=cluster.levels, members=whole)
        assert made == cluster
        assert made.members is None
        assert cluster.slice((2, 2)) == cluster

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"positions": (0, 0)}, r"positions \[0, 0\].*must be different"),
            ({"positions": (0, 4)}, "from 0 to 3"),
            ({"positions": (-1,)}, "from 0 to 3"),
            ({"idle": (1,)}, r"idle \[1\] must be different"),
            ({"start": -1}, "start=-1 must be 0 or more"),
            ({"group": "a/b"}, "group='a/b' have no '/'"),
        ],
    )
    def test_bad(self, changes, said):
        with pytest.raises(ClusterError, match=said):
            self.members(**changes)

    def test_of_another_cluster(self):
        cluster = built((2, "switch"), (2, "switch"))
        with pytest.raises(ClusterError, match="2 positions, and the levels have 4"):
            Cluster(
                device=cluster.device, levels=cluster.levels, members=self.members()
            )
        other = built((1, "switch"), (1, "switch"), (2, "switch"))
        with pytest.raises(ClusterError, match="are no part of host=2 device=2"):
            Cluster(device=other.device, levels=other.levels, members=self.members())
