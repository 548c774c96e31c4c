"""Measuring a machine: quick runs, and arithmetic on times made up here."""

import os
import subprocess
import sys

import pytest
from checkout import ROOT

from autopar.cluster import Cluster, ClusterError, local
from autopar.cluster.specs import KINDS
from autopar.profiling import kernels, profile

QUICK = profile.Settings(
    dtypes=("float32",),
    matmul_sizes=(32, 64),
    stream_bytes=1 << 16,
    collective_bytes=(1 << 10, 1 << 14, 1 << 17),
    check_matmul_size=48,
    check_bytes=(1 << 12,),
    rounds=1,
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOPAR_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def short_runs(monkeypatch):
    monkeypatch.setattr(kernels, "LONG_RUN_S", 0.002)


@pytest.mark.usefixtures("short_runs")
def test_one_device():
    """No collectives to measure: the preset's link is kept."""
    said: list[str] = []
    found = profile.run(1, said.append, QUICK)
    assert found.cluster.num_devices == 1
    (level,) = found.cluster.levels
    assert level.link == local.from_preset(local.take_devices(1))[1][-1].link
    assert [check.name for check in found.checks] == ["matmul float32 48"]
    assert found.cluster.device.matmul_efficiency == 1.0
    assert any("matrix products of float32" in line for line in said)
    assert "held out" in str(found)


FOUR_DEVICES = """
from autopar.profiling import profile
from autopar.cluster import Cluster
from autopar.profiling import kernels
from tests_settings import QUICK
kernels.LONG_RUN_S = 0.002
found = profile.run(settings=QUICK)
print(found)
profile.save(found.cluster)
assert Cluster.local() == found.cluster
assert Cluster.local(2) != found.cluster
fits = found.cluster.levels[0].link.measured
print("cases", sorted((fit.kind, fit.group_size) for fit in fits))
print("checks", [check.name for check in found.checks])
"""


def test_four_simulated_devices(tmp_path):
    """Every collective in groups of 2 and 4, saved where `Cluster.local` looks."""
    source = f"from autopar.profiling.profile import Settings\nQUICK = {QUICK!r}\n"
    (tmp_path / "tests_settings.py").write_text(source)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", FOUR_DEVICES],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = sorted((kind, k) for kind in KINDS for k in (2, 4))
    assert f"cases {cases}" in done.stdout
    checks = ["matmul float32 48"]
    checks += [f"{kind} of 4, 0.00391 MiB" for kind in KINDS]
    assert f"checks {[*checks, 'matmul and all_reduce 48']}" in done.stdout


def program(trip_s, start_s=1.0):
    """A program that takes this long on the clock of `fake_clock`."""

    def run(trips):
        Clock.now += start_s + trips * trip_s

    return kernels.TimedLoop(name="fake", run=run)


class Clock:
    now = 0.0


@pytest.fixture
def _fake_clock(monkeypatch):
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: Clock.now)


@pytest.mark.usefixtures("_fake_clock")
def test_the_start_of_a_program_cancels():
    programs = [program(1e-3), program(2e-5, start_s=0.5), program(0.1)]
    found = kernels.trip_times_s(programs, rounds=3)
    assert found == pytest.approx([1e-3, 2e-5, 0.1], rel=1e-6)


def test_no_time_is_negative():
    assert kernels._typical([-2.0, -1.0, 3.0]) == 3.0
    assert kernels._typical([-2.0, -1.0]) > 0
    assert kernels._typical([1.0, 2.0, 9.0]) == 2.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_operands_have_the_size_asked_for(kind, group_size):
    """The convention of the cost model: an all-gather's size is its result."""
    elements = kernels.local_elements(kind, group_size, 1 << 20)
    total = elements * (group_size if kind == "all_gather" else 1)
    assert total * 4 == pytest.approx(1 << 20, rel=0.001)
    assert elements % group_size == 0


def test_divisors():
    assert profile.divisors(12) == (2, 3, 4, 6, 12)
    assert profile.divisors(7) == (7,)
    assert profile.divisors(1) == ()


def test_check_error():
    check = profile.Check(name="x", predicted_s=3.0, measured_s=2.0)
    assert check.relative_error == pytest.approx(0.5)


def test_save_to_a_path(tmp_path):
    cluster = Cluster.parse("2x4:h100")
    path = profile.save(cluster, tmp_path / "deep" / "mine.toml")
    assert Cluster.parse(str(path)) == cluster


def test_save_to_the_environments_path(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_PROFILE", str(tmp_path / "here.toml"))
    assert profile.save(Cluster.parse("1:cpu")) == tmp_path / "here.toml"


class FakeDevice:
    platform = "gpu"
    device_kind = "Abacus 9"

    def __init__(self, process_index=0, stats=None):
        self.process_index = process_index
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_several_processes_are_refused(monkeypatch):
    devices = [FakeDevice(0), FakeDevice(1)]
    monkeypatch.setattr(local, "take_devices", lambda count: devices)
    with pytest.raises(ClusterError, match="several processes"):
        profile.run()


def test_device_without_a_preset():
    """Its memory is what it says; what it does not say must be written down."""
    memory_bytes, link = profile._known([FakeDevice(stats={"bytes_limit": 10**9})])
    assert memory_bytes == 10**9
    assert link.bandwidth_bytes_per_s > 0
    with pytest.raises(ClusterError, match="does not say how much memory"):
        profile._known([FakeDevice()])
