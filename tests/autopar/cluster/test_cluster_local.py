"""Tests the cluster of this process's devices, with and without a saved profile."""

import dataclasses
from typing import Any

import jax
import pytest

from autopar.cluster import Cluster, ClusterError, local
from autopar.cluster.presets import PRESETS, USABLE_MEMORY

GIB = 2**30


@dataclasses.dataclass
class FakeDevice:
    device_kind: str
    platform: str = "gpu"
    process_index: int = 0
    bytes_limit: int | None = None

    def memory_stats(self) -> dict[str, Any] | None:
        return self.bytes_limit and {"bytes_limit": self.bytes_limit}


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOPAR_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pretend(monkeypatch, devices):
    monkeypatch.setattr(local, "take_devices", lambda count: devices[:count])


def test_this_machine_from_the_preset():
    cluster = Cluster.local()
    assert cluster.num_devices == jax.device_count()
    assert cluster.device.kind == jax.devices()[0].platform


def test_fewer_devices():
    assert Cluster.local(1).num_devices == 1


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_more_devices_than_there_are(count):
    with pytest.raises(ClusterError, match="jax_num_cpu_devices"):
        Cluster.local(count)


def test_cpu_devices_share_the_host(monkeypatch):
    """Twice the devices, half the memory and (beyond the cores) half the rate."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(local, "_host_memory_bytes", lambda: 16 * GIB)
    pretend(monkeypatch, [FakeDevice("cpu", "cpu")] * 16)
    some, many = Cluster.local(8).device, Cluster.local(16).device
    assert some.memory_bytes == round(2 * GIB * USABLE_MEMORY)
    assert some.peak("float32") == PRESETS["cpu"].device.peak("float32") / 2
    assert many.peak("float32") == some.peak("float32") / 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("cpu", "cpu"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_device_kinds(kind, name):
    assert local.preset_name(kind) == name


def test_memory_is_what_the_backend_says(monkeypatch):
    pretend(monkeypatch, [FakeDevice("NVIDIA H100", bytes_limit=60 * GIB)] * 4)
    cluster = Cluster.local()
    assert cluster.memory_bytes == 60 * GIB
    assert cluster.levels == Cluster.parse("4:h100").levels


def test_processes_are_hosts(monkeypatch):
    devices = [FakeDevice("NVIDIA H100", process_index=i // 4) for i in range(8)]
    pretend(monkeypatch, devices)
    assert Cluster.local() == Cluster.parse("2x4:h100")


def test_unknown_device(monkeypatch):
    pretend(monkeypatch, [FakeDevice("Abacus 9")])
    with pytest.raises(ClusterError, match="autopar profile"):
        Cluster.local()


def test_profile_of_the_cache_folder(monkeypatch):
    pretend(monkeypatch, [FakeDevice("NVIDIA H100")] * 4)
    path = local.profile_path("NVIDIA H100", 4)
    assert path.name.endswith("-nvidia_h100-4.toml")
    path.parent.mkdir(parents=True)
    saved = Cluster.parse("4:h100,efficiency=0.123")
    path.write_text(saved.to_toml())
    assert Cluster.local() == saved
    assert Cluster.local(2) == Cluster.parse("2:h100")  # no profile for two


def test_profile_of_the_environment(monkeypatch, tmp_path):
    pretend(monkeypatch, [FakeDevice("NVIDIA H100")] * 4)
    path = tmp_path / "mine.toml"
    path.write_text(Cluster.parse("2x2:h100").to_toml())
    monkeypatch.setenv("AUTOPAR_PROFILE", str(path))
    assert Cluster.local() == Cluster.parse("2x2:h100")
    with pytest.raises(ClusterError, match="describes 4 devices"):
        Cluster.local(2)


def test_missing_profile_of_the_environment_is_an_error(monkeypatch, tmp_path):
    pretend(monkeypatch, [FakeDevice("NVIDIA H100")])
    monkeypatch.setenv("AUTOPAR_PROFILE", str(tmp_path / "none.toml"))
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.local()
