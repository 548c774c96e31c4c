"""Speeds of hosts, found by their CPU quotas."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from autopar.elastic.processes import speeds
from autopar.elastic.processes.speeds import CpuMeter, CpuUse, SpeedWatch

HOSTS = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3"}
Report = Callable[[float, int], CpuUse]


def use(cores: float = 0.4, used: float = 0.4, waited: int = 9, group: str = "/g"):
    """A second of a worker with a quota, in ten periods."""
    return CpuUse(
        seconds=1.0, used_s=used, cores=cores, group=group, periods=10, waited=waited
    )


def run(
    report: Report,
    seconds: int = 100,
    planned: tuple[float, ...] = (1.0, 1.0, 1.0),
    watch: SpeedWatch | None = None,
) -> list[tuple[int, tuple[float, ...]]]:
    """When speeds are returned, and which."""
    watch = watch or SpeedWatch()
    watch.begin(0.0, HOSTS, planned)
    found: list[tuple[int, tuple[float, ...]]] = []
    for second in range(seconds):
        for worker in HOSTS:
            given = watch.take(float(second), worker, report(second, worker))
            if given is not None:
                found.append((second, given))
    return found


def throttled(second: float, worker: int) -> CpuUse:
    """Worker 1 has half of its quota after a minute; then the others wait for it."""
    if second < 60:
        return use()
    return use(0.2, 0.2) if worker == 1 else use(used=0.2, waited=0)


def test_equal_quotas_are_no_event() -> None:
    assert run(lambda second, worker: use()) == []


def test_a_throttled_host_is_found_once() -> None:
    """The others use no more than it while they wait, and are as fast as before."""
    ((when, found),) = run(throttled, 200)
    assert found == (1.0, 0.5, 1.0)
    assert 60 + 20 <= when <= 60 + 31


def test_a_change_is_expected_before_it_counts() -> None:
    """So that a plan is ready when it does; a short change is only expected."""
    watch = SpeedWatch()
    watch.begin(0.0, HOSTS, (1.0, 1.0, 1.0))
    found = [
        (second, speeds)
        for second in range(80)
        for worker in HOSTS
        if watch.take(float(second), worker, throttled(second, worker)) is None
        and (speeds := watch.expect()) is not None
    ]
    ((when, speeds),) = found
    assert speeds == (1.0, 0.5, 1.0)
    assert 60 + 5 <= when <= 60 + 11


def test_a_host_that_was_slow_from_the_start_is_found() -> None:
    ((when, found),) = run(lambda second, worker: use(0.2 if worker == 1 else 0.4))
    assert found == (1.0, 0.5, 1.0)
    assert when <= 35


def test_a_short_throttling_is_no_event() -> None:
    def report(second: float, worker: int) -> CpuUse:
        return use(0.2, 0.2) if worker == 1 and 60 <= second < 80 else use()

    assert run(report, 200) == []


def test_a_quota_that_is_not_used_up_is_no_event() -> None:
    """A step that mostly waits for its network needs little CPU time."""
    lower = use(0.2, 0.1, waited=0)
    assert run(lambda _, worker: lower if worker == 1 else use(2.0, 0.1, 0)) == []


def test_a_slow_host_with_fewer_rows_stays_slow() -> None:
    """It may not use up its quota any more; that is no recovery."""
    watch = SpeedWatch()
    run(throttled, 100, watch=watch)
    small = use(0.2, 0.1, waited=0)

    def report(_: float, worker: int) -> CpuUse:
        return small if worker == 1 else use()

    assert run(report, planned=(1.0, 0.5, 1.0), watch=watch) == []


def test_a_quota_that_is_raised_again_is_an_event() -> None:
    watch = SpeedWatch()
    run(throttled, 100, watch=watch)

    def report(_: float, worker: int) -> CpuUse:
        return use(0.4, 0.2, 0) if worker == 1 else use()

    ((when, found),) = run(report, planned=(1.0, 0.5, 1.0), watch=watch)
    assert found == (1.0, 1.0, 1.0)
    assert when <= 35


def test_a_quota_where_there_was_none() -> None:
    """A process that used 1.3 CPUs runs at 0.65 / 1.3 of its speed."""

    def report(second: float, worker: int) -> CpuUse:
        if second < 60:
            return use(8.0, 1.3, 0, group="")
        slow = use(0.65, 0.65)
        return slow if worker == 2 else use(8.0, 0.7, 0, group="")

    assert [found for _, found in run(report)] == [(1.0, 1.0, 0.5)]


def test_workers_of_a_host_share_its_quota() -> None:
    watch = SpeedWatch()
    watch.begin(0.0, {0: "a", 1: "a", 2: "b"}, (1.0, 1.0, 1.0))
    found = [
        watch.take(float(second), worker, use(0.4, 0.2 if worker < 2 else 0.4))
        for second in range(60)
        for worker in range(3)
    ]
    assert [x for x in found if x] == [(0.5, 0.5, 1.0)]


def test_speeds_that_have_no_plan_are_returned_once() -> None:
    watch = SpeedWatch()
    run(throttled, 100, watch=watch)
    assert watch.deviates()
    watch.assume((1.0, 0.5, 1.0))
    assert not watch.deviates()
    after = [
        watch.take(100.0 + s, w, throttled(99, w)) for s in range(90) for w in HOSTS
    ]
    assert not any(after)


def version1(root: pathlib.Path, quota: int, waited: int) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("3:cpuset:/\n1:cpu,cpuacct:/box/job\n0::/\n")
    (root / "proc/self/mountinfo").write_text(
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    )
    for path, value in (("", -1), ("box", quota), ("box/job", -1)):
        folder = root / "sys/fs/cgroup/cpu" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_quota_us").write_text(f"{value}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        counts = f"nr_periods 50\nnr_throttled {waited}\nthrottled_time 5\n"
        (folder / "cpu.stat").write_text(counts)


def version2(root: pathlib.Path, quota: int, waited: int) -> None:
    """As a container sees it: its own group is the top of what is mounted."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/pods/one/job\n")
    (root / "proc/self/mountinfo").write_text(
        "30 20 0:26 /pods/one /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    )
    for path, value in (("", f"{quota} 100000"), ("job", "max 100000")):
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{value}\n")
        counts = f"usage_usec 7\nnr_periods 50\nnr_throttled {waited}\n"
        (folder / "cpu.stat").write_text(counts)


@pytest.mark.parametrize("write", [version1, version2])
def test_the_smallest_quota_is_read(write, tmp_path: pathlib.Path) -> None:
    write(tmp_path, 40_000, 10)
    meter = CpuMeter(tmp_path)
    write(tmp_path, 20_000, 35)
    found = meter.take()
    assert (found.cores, found.waited, found.periods) == (0.2, 25, 0)
    assert found.seconds > 0
    assert CpuUse.from_data({**found.to_data(), "kind": "computed"}) == found


def test_without_control_groups_there_is_no_quota(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds.os, "sched_getaffinity", lambda _: {0, 1, 2})
    found = CpuMeter(tmp_path).take()
    assert (found.cores, found.group, found.periods) == (3.0, "", 0)
