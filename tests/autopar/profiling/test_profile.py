"""Tests profiles: quick measurements, and arithmetic on made-up times."""

import dataclasses
import os
import subprocess
import sys

import pytest
from checkout import ROOT
from processes import run_processes

from autopar.cluster import Cluster, ClusterError, local
from autopar.cluster.specs import KINDS
from autopar.profiling import kernels, profile

QUICK = profile.ProfileSizes(
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


@pytest.mark.cluster
def test_four_simulated_devices(tmp_path):
    """Every collective in groups of 2 and 4, saved where `Cluster.local` looks."""
    source = f"from autopar.profiling.profile import ProfileSizes\nQUICK = {QUICK!r}\n"
    (tmp_path / "tests_settings.py").write_text(source)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"]
        + " --xla_force_host_platform_device_count=4",
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


def program(trip_s, start_s=1.0, **series):
    """A program that takes this long on the clock of `fake_clock`."""

    def run(trips):
        Clock.now += start_s + trips * trip_s

    return kernels.TimedLoop(name="fake", run=run, **series)


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


@pytest.mark.usefixtures("_fake_clock")
def test_larger_messages_of_a_slow_link_are_not_timed():
    """At 5 MB/s a message of 4 MB takes long, so that of 8 MB is not sent."""

    def message(megabytes, series="all_reduce"):
        nbytes = megabytes << 20
        given = {"series": series, "nbytes": nbytes}
        return program(0.2 * megabytes, start_s=1e-4, **given)

    sizes = [8, 0, 4, 1]  # in any order
    programs = [message(n) for n in sizes] + [message(8, "all_gather")]
    found = kernels.trip_times_s(programs, rounds=1)
    assert found[0] is None
    assert found[1:] == pytest.approx([0.0, 0.8, 0.2, 1.6], abs=2e-4)


@pytest.mark.usefixtures("_fake_clock")
def test_a_pause_does_not_leave_out_larger_messages():
    calls = []

    def run(trips):
        calls.append(trips)
        Clock.now += trips * 1e-3 + (5.0 if len(calls) == 2 else 0.0)

    paused = kernels.TimedLoop(name="fake", run=run, series="all_reduce", nbytes=1)
    larger = program(2e-3, start_s=0.0, series="all_reduce", nbytes=2)
    found = kernels.trip_times_s([paused, larger], rounds=3)
    assert found == pytest.approx([1e-3, 2e-3], rel=1e-6)


def test_fits_of_a_slow_link_take_the_messages_that_were_timed():
    sizes = QUICK.collective_bytes
    times = profile._Times(
        devices=(),
        settings=QUICK,
        neighbours=1,
        seconds={("all_reduce", 0, 2, n): 0.5 + n * 1e-5 for n in sizes[:2]},
        transfer_s={n: 0.25 + n * 2e-5 for n in sizes[:2]},
    )
    fit = times.collective("all_reduce", 0, 2)
    assert fit.seconds(1 << 20) == pytest.approx(0.5 + (1 << 20) * 1e-5, rel=1e-4)
    latency_s, slope = profile._plain(times, 0, (fit,), 2)
    assert (latency_s, slope) == pytest.approx((0.25, 2e-5), rel=1e-4)


@pytest.mark.usefixtures("_fake_clock")
def test_pauses_of_the_machine_make_no_run_longer():
    """Those in short runs neither: a trip would seem to take no time at all."""
    calls = []

    def run(trips):
        calls.append(trips)
        Clock.now += 1.0 + trips * 1e-3 + (10.0 if len(calls) % 3 == 2 else 0.0)

    found = kernels._long_trips(kernels.TimedLoop(name="fake", run=run))
    assert found == pytest.approx(kernels.LONG_RUN_S / 1e-3)
    assert max(calls) < 10 * found


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


@pytest.mark.parametrize(
    ("indices", "reason"),
    [([0, 1], "2 of the 8 devices"), ([0] * 5 + [1] * 3, "different numbers")],
)
def test_what_cannot_be_measured_together_is_refused(monkeypatch, indices, reason):
    devices = [FakeDevice(k) for k in indices]
    monkeypatch.setattr(local, "take_devices", lambda count: devices)
    with pytest.raises(ClusterError, match=reason):
        profile.run()


def test_devices_without_a_preset():
    """Their memory is what they say; what they do not say must be written down."""
    known = [FakeDevice(k // 2, {"bytes_limit": 10**9}) for k in range(4)]
    memory_bytes, levels = profile._known_parts(known, known[:2])
    assert memory_bytes == 10**9
    assert [(level.name, level.size) for level in levels] == [
        ("host", 2),
        ("device", 2),
    ]
    with pytest.raises(ClusterError, match="does not say how much memory"):
        profile._known_parts([FakeDevice()], [FakeDevice()])


def test_groups_lie_along_their_level():
    devices = [f"{host}.{device}" for host in range(2) for device in range(3)]
    assert profile._along(devices, (2, 3), 1) == devices
    across = ["0.0", "1.0", "0.1", "1.1", "0.2", "1.2"]
    assert profile._along(devices, (2, 3), 0) == across


@pytest.mark.cluster
@pytest.mark.cluster
def test_two_processes_of_two_devices(tmp_path):
    """Both get one cluster of two levels, with every collective of both."""
    outs = [tmp_path / f"{k}.toml" for k in range(2)]
    run_processes("profile_worker.py", 2, [str(tmp_path)])
    first, second = (Cluster.from_toml(out) for out in outs)
    assert first == second
    assert [level.size for level in first.levels] == [2, 2]
    for level in first.levels:
        cases = [(fit.kind, fit.group_size) for fit in level.link.measured]
        assert sorted(cases) == sorted((kind, 2) for kind in KINDS)
    # One machine: its memory is shared by the four.
    limit = local.from_preset(local.take_devices(4))[0].memory_bytes
    assert first.device.memory_bytes == limit
    # What stages send each other is timed as they send it, and checked.
    for k in range(2):
        assert (
            "transfer to a neighbour, 0.00391 MiB"
            in outs[k].with_suffix(".txt").read_text()
        )


@pytest.mark.usefixtures("short_runs")
def test_codecs_are_timed():
    settings = dataclasses.replace(
        QUICK, codec_elements=1 << 12, codecs=("bf16", "powersgd:rank=2")
    )
    cluster = profile.run(2, settings=settings).cluster
    assert [text for text, _ in cluster.device.codec_s_per_element] == [
        "bf16",
        "powersgd:rank=2",
    ]
    assert Cluster.from_toml(profile.save(cluster)) == cluster
