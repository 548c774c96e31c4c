"""Finds hosts of a run that compute more slowly than the others, while the run trains.

On Linux, a control group (cgroup) limits the CPU time of processes by a quota for each
period, as containers and batch systems do. The kernel counts the periods, and those in
which the processes had used up their quota and had to wait (``cpu.stat``;
https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files, and
https://docs.kernel.org/scheduler/sched-bwc.html for version 1). Each worker reports its
quota, these counts and its own CPU time (`CpuMeter`). From the reports of all workers,
the supervisor computes how fast they are (`SpeedWatch`).

Nothing is found for devices other than CPUs, whose speed depends on no quota, nor for
hosts that are slow for another reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autopar.elastic.processes.links import EXPECTED

# A worker's CPU time is measured over intervals of `_WINDOW_S` seconds, called windows.
# A speed has changed if it differs from the planned one in the last `_WINDOWS` windows.
_WINDOW_S, _WINDOWS = 5.0, 5
# The first seconds of a world are ignored, because its processes compile and fetch the
# state.
_SETTLE_S = 3.0
# A speed counts as changed if it is larger or smaller than the planned one by at least
# this factor.
_FACTOR = 1.25
# A quota counts as the limit of a worker if the worker had to wait in at least this
# fraction of the periods.
_LIMITED = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """The CPU time of a worker since its last report.

    Attributes:
      seconds: seconds since the last report.
      used_s: CPU seconds that the process has used, summed over its threads.
      cores: CPUs that the process may use on average: by the smallest quota of its
        control groups, or else by its CPU mask.
      group: path of the control group with this quota; '' if there is no quota. All
        processes in it share the quota.
      periods: number of periods of this control group in which processes ran.
      waited: number of these periods in which processes had used up the quota.
    """

    seconds: float
    used_s: float
    cores: float
    group: str = ""
    periods: int = 0
    waited: int = 0

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CpuUse:
        """Reads the result of `to_data`; further keys are ignored."""
        return msgspec.convert({k: data[k] for k in cls.__slots__}, cls)

    def to_data(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold."""
        return dataclasses.asdict(self)

    def __add__(self, later: CpuUse) -> CpuUse:
        """The CPU time in both reports; quota and control group are the later ones."""
        return dataclasses.replace(
            later,
            seconds=self.seconds + later.seconds,
            used_s=self.used_s + later.used_s,
            periods=self.periods + later.periods,
            waited=self.waited + later.waited,
        )

    @property
    def is_limited(self) -> bool:
        """Whether the quota has made the processes of the control group wait."""
        return self.waited >= max(1.0, _LIMITED * self.periods)


def control_groups(root: pathlib.Path = pathlib.Path("/")) -> list[pathlib.Path]:
    """The folders of the control groups that limit this process's CPU time.

    The result begins with the process's own group, and ends with the outermost group
    that is visible. It is empty if the process sees no control groups.

    Args:
      root: folder that takes the place of ``/``, for tests.
    """
    with contextlib.suppress(OSError, ValueError):
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        paths = {name: path for _, name, path in (x.split(":", 2) for x in own)}
        for line in mounts:
            found = _control_group(line, paths)
            if found is None:
                continue
            mount, inside = found
            base = root / mount.lstrip("/")
            folders = [base / inside, *(base / inside).parents]
            return [x for x in folders if x.is_relative_to(base) and _has_quota(x)]
    return []


def _control_group(line: str, paths: Mapping[str, str]) -> tuple[str, str] | None:
    """Where a line of ``mountinfo`` (proc(5)) shows the CPU control group of a process.

    Args:
      line: describes a mount.
      paths: names of controllers, '' for version 2 -> the process's control group.

    Returns:
      The mount's folder, and the path of the process's control group in it; None if the
      line describes something else.
    """
    place, _, kind = line.partition(" - ")
    fields, (system, _, options) = place.split(), kind.split(" ", 2)
    if system == "cgroup2":
        own = paths.get("")
    elif system == "cgroup" and "cpu" in options.split(","):
        own = next((p for n, p in paths.items() if "cpu" in n.split(",")), None)
    else:
        return None
    if own is None:
        return None
    top = fields[3]
    inside = os.path.relpath(own, top) if own.startswith(top) else "."
    return fields[4], inside


def _has_quota(folder: pathlib.Path) -> bool:
    return any((folder / x).exists() for x in ("cpu.max", "cpu.cfs_quota_us"))


def _quota(folder: pathlib.Path) -> float | None:
    """CPUs by the quota of a control group; None if it has no quota."""
    try:
        if (version2 := folder / "cpu.max").exists():
            quota, period = version2.read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period")
            )
        if quota.strip() == "max" or int(quota) < 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _counts(folder: pathlib.Path) -> tuple[int, int]:
    """Periods of a control group, and those in which its quota was used up."""
    with contextlib.suppress(OSError, ValueError):
        lines = (folder / "cpu.stat").read_text().splitlines()
        found = dict(line.split() for line in lines)
        return int(found["nr_periods"]), int(found["nr_throttled"])
    return 0, 0


class CpuMeter:
    """Measures the CPU time that this process gets."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/")) -> None:
        """Begins to measure.

        Args:
          root: folder that takes the place of ``/``, for tests.
        """
        self._root = root
        self._before = time.monotonic(), time.process_time()
        self._group: pathlib.Path | None = None
        self._counts = (0, 0)
        self.take()

    def take(self) -> CpuUse:
        """The CPU time since the last call."""
        quotas = [(q, x) for x in control_groups(self._root) if (q := _quota(x))]
        cores, group = min(quotas, default=(None, None), key=lambda pair: pair[0])
        now = time.monotonic(), time.process_time()
        counts = (0, 0) if group is None else _counts(group)
        # A group's counts say nothing until they were read before.
        before = self._counts if group == self._group else counts
        seconds, used_s = (a - b for a, b in zip(now, self._before, strict=True))
        self._before, self._group, self._counts = now, group, counts
        usable = float(len(os.sched_getaffinity(0)))
        return CpuUse(
            seconds=seconds,
            used_s=used_s,
            cores=usable if cores is None else min(cores, usable),
            group="" if group is None else str(group),
            periods=counts[0] - before[0],
            waited=counts[1] - before[1],
        )


class SpeedWatch:
    """Compares the speeds of a world's workers with those that its plan assumes.

    The *level* of a worker is the number of CPUs that it can use: by its quota, but no
    more than it has ever been seen to use or to be limited to. A worker's speed is its
    level divided by the largest level of all workers. So a lower quota that a worker
    does not use up changes nothing. A worker counts as slower only while its quota
    makes it wait, but as faster as soon as its quota is raised: with fewer rows, it may
    not use up its quota any more.
    """

    def __init__(self) -> None:
        """No world has formed yet."""
        self._began_s = 0.0
        # The speed of each worker that the plan assumes; empty: speeds are not watched.
        self._planned: dict[int, float] = {}
        self._hosts: Mapping[int, str] = {}
        # Whether `take` has returned speeds for which nothing has been planned yet.
        self._told = False
        self._current: dict[int, CpuUse] = {}
        self._window = -1
        self._speeds: dict[int, list[tuple[float, bool]]] = {}
        # The speeds that `expect` has returned last.
        self._expected: tuple[float, ...] | None = None
        # The most CPUs that each worker has been seen to use, or to be limited to.
        self._most: dict[int, float] = {}

    def begin(
        self, now: float, hosts: Mapping[int, str], planned: Sequence[float]
    ) -> None:
        """Begins a new world.

        Args:
          now: time in seconds on a monotonic clock (`time.monotonic`).
          hosts: the workers of the world by rank -> addresses of their hosts.
          planned: by rank, the speeds that the plan assumes; empty: speeds are not
            watched.
        """
        self._began_s, self._hosts = now + _SETTLE_S, dict(hosts)
        self._most = {w: x for w, x in self._most.items() if w in hosts}
        self.assume(planned)

    def assume(self, planned: Sequence[float]) -> None:
        """Sets the speeds with which later ones are compared, by rank."""
        self._planned = dict(zip(self._hosts, planned, strict=False))
        self._current, self._speeds, self._window = {}, {}, -1
        self._expected, self._told = None, False

    def take(self, now: float, worker: int, use: CpuUse) -> tuple[float, ...] | None:
        """Takes a worker's report.

        Returns:
          By rank, the speeds to plan for, if one of them has stayed changed for
          `_WINDOWS` windows; otherwise None. Each change is returned only once.
        """
        if worker not in self._planned or now < self._began_s:
            return None
        window = int((now - self._began_s) // _WINDOW_S)
        if window > self._window:
            if self._window >= 0:
                self._end_window()
            self._window = window
        before = self._current.get(worker)
        self._current[worker] = use if before is None else before + use
        speeds = self._find_speeds(_WINDOWS)
        if speeds is not None:
            self._planned, self._told = {}, True
        return speeds

    def deviates(self) -> bool:
        """Whether a speed differs from the planned one, in the last window."""
        return self._told or self._find_speeds(1) is not None

    def expect(self) -> tuple[float, ...] | None:
        """By rank, speeds that may last, before `take` returns them; each only once."""
        found, before = self._find_speeds(EXPECTED), self._expected
        self._expected = found or before
        return None if found == before else found

    def _end_window(self) -> None:
        current, self._current = self._current, {}
        if current.keys() != self._planned.keys():
            self._speeds = {}  # a worker was not heard of
            return
        levels = {w: self._level(w, use, current) for w, use in current.items()}
        largest = max(levels.values())
        for worker, level in levels.items():
            found = level / largest, current[worker].is_limited
            self._speeds.setdefault(worker, []).append(found)

    def _level(self, worker: int, use: CpuUse, current: Mapping[int, CpuUse]) -> float:
        """The number of CPUs that a worker can use."""
        quota = use.cores
        if use.group:
            host = self._hosts[worker]
            quota /= sum(
                self._hosts[w] == host and x.group == use.group
                for w, x in current.items()
            )
        seen = quota if use.is_limited else min(quota, use.used_s / use.seconds)
        most = self._most[worker] = max(seen, self._most.get(worker, 1e-6))
        return min(quota, most)

    def _find_speeds(self, windows: int) -> tuple[float, ...] | None:
        """The speeds to plan for, if they have been changed for so many windows."""
        changed: dict[int, float] = {}
        for worker, planned in self._planned.items():
            last = self._speeds.get(worker, [])[-windows:]
            slower = [limited and x * _FACTOR <= planned for x, limited in last]
            faster = [x >= planned * _FACTOR for x, _ in last]
            if len(last) == windows and (all(slower) or all(faster)):
                changed[worker] = _round_speed(statistics.median(x for x, _ in last))
        if not changed:
            return None
        return tuple(changed.get(w, x) for w, x in self._planned.items())


def _round_speed(speed: float) -> float:
    """A speed to plan for: 1 if it is nearly that, otherwise with two digits."""
    return 1.0 if speed * _FACTOR > 1.0 else float(f"{speed:.2g}")
