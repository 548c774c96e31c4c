"""Tests the correction constants of the cost model: checks, replacement and files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autopar.cluster import Cluster, ClusterError
from autopar.cluster.specs import CALIBRATIONS, Calibration
from autopar.cost.pricer import Pricer

TOML = """
[device]
preset = "h100"

[device.calibration]
skew = 1.25
combined_kinds = ["all_reduce"]
forms_reduce_scatter = false

[[level]]
name = "device"
size = 4
latency_s = 1e-6
bandwidth_bytes_per_s = 1e11
"""


def calibrated(cluster: Cluster, **values: object) -> Cluster:
    own = dataclasses.replace(cluster.device.corrections, **values)
    device = dataclasses.replace(cluster.device, calibration=own)
    return dataclasses.replace(cluster, device=device)


def test_a_device_has_the_calibration_of_its_kind() -> None:
    for text, kind in (("8:h100", "gpu"), ("8:cpu", "cpu"), ("2x2x1:v5p", "tpu")):
        device = Cluster.parse(text).device
        assert device.calibration is None
        assert device.corrections == CALIBRATIONS[kind]


def test_a_file_replaces_single_constants(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    found = Cluster.from_toml(path)
    own = found.device.corrections
    assert (own.skew, own.combined_kinds) == (1.25, ("all_reduce",))
    assert own.half_rate_side == CALIBRATIONS["gpu"].half_rate_side
    pricer = Pricer(found, found.default_mesh())
    assert pricer.skew(pricer.mesh.axes[-1:]) == 1.25
    assert pricer.runs_as("reduce_scatter") == "all_reduce"
    assert pricer.combiner.kinds == {"all_reduce"}


def test_only_devices_of_one_host_wait_for_shared_cores() -> None:
    """A collective between hosts takes no longer for what a host's cores do."""
    cluster = Cluster.parse("2x4:cpu")
    pricer = Pricer(cluster, cluster.default_mesh())
    outer, inner = pricer.mesh.axes
    assert pricer.skew((outer,)) == 1.0
    assert pricer.skew((inner,)) == pricer.skew((outer, inner)) > 1.0
    hosts = Cluster.parse("4x1:cpu")
    assert Pricer(hosts, hosts.default_mesh()).skew(hosts.default_mesh().axes) == 1.0


def test_clusters_are_written_and_read_back(tmp_path: Path) -> None:
    made = calibrated(Cluster.parse("2x4:cpu"), skew=1.1, combined_arrays=7)
    path = tmp_path / "made.toml"
    path.write_text(made.to_toml())
    assert Cluster.from_toml(path) == made
    assert Cluster.from_data(json.loads(json.dumps(made.to_data()))) == made


def test_constants_count_in_the_fingerprint() -> None:
    plain = Cluster.parse("2x4:cpu")
    assert calibrated(plain, skew=1.1).fingerprint() != plain.fingerprint()
    assert "calibration" not in plain.to_toml()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skew", 0.5),
        ("vector_slowdown", float("inf")),
        ("memory_overhead", float("nan")),
        ("half_rate_side", -1.0),
        ("patch_passes", -0.1),
        ("combined_arrays", 0),
    ],
)
def test_impossible_values(name: str, value: float) -> None:
    with pytest.raises(ClusterError, match=f"Calibration: {name} must be"):
        Calibration(**{name: value})


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TOML.replace("skew", "screw"))
    with pytest.raises(ClusterError, match="unknown field `screw`"):
        Cluster.from_toml(path)
