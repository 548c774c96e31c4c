"""Tests clusters as data and as TOML: no value is lost, wrong values are refused."""

import dataclasses
import json
import pathlib
import tempfile

import pytest
from cluster_strategies import any_clusters
from hypothesis import given, settings

from autopar.cluster import Cluster, ClusterError


@settings(deadline=None)
@given(any_clusters)
def test_round_trip_through_json(cluster):
    data = cluster.to_data()
    read = Cluster.from_data(json.loads(json.dumps(data)))
    assert read == cluster
    assert read.to_data() == data
    assert repr(read) == repr(cluster)


@settings(deadline=None)
@given(any_clusters)
def test_round_trip_through_toml(cluster):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "cluster.toml"
        path.write_text(cluster.to_toml(), encoding="utf-8")
        read = Cluster.from_toml(path)
    assert read == cluster
    assert read.fingerprint() == cluster.fingerprint()


def test_every_control_character_is_escaped(tmp_path):
    """JSON writes DEL as it is, which TOML forbids."""
    device = dataclasses.replace(
        Cluster.parse("8:h100").device,
        name="".join(map(chr, [*range(32), 127, 34, 92])),
    )
    cluster = dataclasses.replace(Cluster.parse("8:h100"), device=device)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml(), encoding="utf-8")
    assert Cluster.from_toml(path) == cluster


@settings(deadline=None)
@given(any_clusters)
def test_parts_are_told_apart(cluster):
    parts = [part for part, _ in cluster.slices()]
    fingerprints = {part.fingerprint() for part in parts}
    assert len(fingerprints) == len(set(parts))


def test_whole_clusters_hold_only_devices_and_levels():
    assert list(Cluster.parse("2x4:h100").to_data()) == ["device", "level"]


def test_a_part_holds_the_levels_of_the_whole_where_they_differ():
    cluster = Cluster.parse("2x4:h100")
    data = cluster.slice((1, 2), offset=2).to_data()
    assert data["members"]["positions"] == [2, 3]
    assert data["members"]["level"] == cluster.to_data()["level"]


def test_groups_are_written_as_they_would_be_alone():
    cluster = Cluster.parse("2x4:h100+2x4:a100")
    alone = [Cluster.parse(text).to_data() for text in ("2x4:h100", "2x4:a100")]
    assert cluster.to_data() == {
        "group": alone,
        "between": {"latency_s": 8e-6, "bandwidth_bytes_per_s": 22.5e9},
    }


def test_a_group_that_is_left_keeps_its_place():
    left = Cluster.parse("2x4:h100+2x4:a100").without("group0")
    assert left.to_data()["members"] == {
        "positions": list(range(8)),
        "group": "group1",
        "start": 8,
    }


def test_toml_of_a_part():
    cluster = Cluster.parse("2x2:cpu").without("host0/device1", prefer="hosts")
    lines = cluster.to_toml().splitlines()
    at = lines.index("[members]")
    assert lines[at - 1 : at + 3] == [
        "",
        "[members]",
        "positions = [0,2]",
        "idle = [3]",
    ]
    assert "[[members.level]]" in lines


def changed(path, value, text="2x4:h100"):
    """The data of a cluster with one changed value; None removes the value."""
    data = json.loads(json.dumps(Cluster.parse(text).to_data()))
    *outer, last = path
    place = data
    for key in outer:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "missing required field `device`"),
        ([], "Expected `object`"),
        (changed(["level"], None), "missing required field `level`"),
        (changed(["levels"], []), "unknown field `levels`"),
        (changed(["device", "speed"], 1), "unknown field `speed`"),
        (changed(["device", "kind"], None), r"\[device\] lacks kind"),
        (changed(["level", 0, "size"], "2"), r"Expected `int`, got `str`.*level"),
        (changed(["level", 0, "size"], 0), "size must be 1 or more"),
        (changed(["level"], []), "at least one"),
        (
            changed(["members"], {"positions": [0]}),
            "1 positions, and the levels have 8",
        ),
        (changed(["members"], {"positions": [0.5]}), "Expected `int`"),
        (changed(["members"], {"at": []}), "unknown field|missing required"),
        (changed(["hosts"], ["a"]), "1 names for 2 hosts"),
        (
            changed(["between"], {}, "8:h100+8:a100"),
            "missing required field `latency_s`",
        ),
        (changed(["device"], {}, "8:h100+8:a100"), "unknown field `device`"),
        (changed(["group"], [], "8:h100+8:a100"), "or groups= of such clusters"),
        (changed(["group", 0, "group"], [], "8:h100+8:a100"), "unknown field `group`"),
    ],
)
def test_errors(data, said):
    with pytest.raises(ClusterError, match=rf"the data of a cluster: .*({said})"):
        Cluster.from_data(data)


def test_the_link_between_groups_may_be_left_out():
    data = Cluster.parse("8:h100+8:a100").to_data()
    del data["between"]
    assert Cluster.from_data(data) == Cluster.parse("8:h100+8:a100")


@pytest.mark.parametrize(
    "cluster", [Cluster.parse("4:cpu+4:cpu"), Cluster.parse("2x8:cpu").slice((1, 8))]
)
def test_a_profile_is_of_whole_equal_devices(cluster, tmp_path, monkeypatch):
    path = tmp_path / "profile.toml"
    path.write_text(cluster.to_toml())
    monkeypatch.setenv("AUTOPAR_PROFILE", str(path))
    with pytest.raises(ClusterError, match="profile"):
        Cluster.local()
