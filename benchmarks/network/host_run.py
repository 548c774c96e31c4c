"""A run of `autopar run` over the hosts of a bed, and their shares of the CPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import netns
from bed import Bed, Host

from autopar.elastic.processes.certificates import create_secret
from autopar.elastic.processes.records import command

SCRIPT = pathlib.Path(__file__).resolve().parent / "link_script.py"
PORT = 7000
LIMIT_S = 180.0

_GROUPS = pathlib.Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
# The weight of a host's control group is this many times that of another process of the
# machine. Otherwise other work keeps hosts from using up their quotas.
_WEIGHT = 4
# `ip netns exec` mounts another /sys, in which no control groups are mounted. Commands
# that mount those of version 1 and 2:
_MOUNT_1 = (
    "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu && "
    "mount -t cgroup -o cpu none /sys/fs/cgroup/cpu"
)
_MOUNT_2 = "mount -t cgroup2 none /sys/fs/cgroup"


class CpuShares:
    """A control group for each host of a bed, with a quota that can be changed."""

    def __init__(self, bed: Bed) -> None:
        """Describes the control groups; ``with`` makes them."""
        self._first = (_GROUPS / "cpu").is_dir()
        base = _GROUPS / "cpu" if self._first else _GROUPS
        self._folders = {h.rank: base / f"{bed.prefix}h{h.rank}" for h in bed.hosts}

    def __enter__(self) -> Self:
        """Makes the control groups, without quotas."""
        if not self._first:
            (_GROUPS / "cgroup.subtree_control").write_text("+cpu")
        name, usual = ("cpu.shares", 1024) if self._first else ("cpu.weight", 100)
        for folder in self._folders.values():
            folder.mkdir()
            (folder / name).write_text(str(_WEIGHT * usual))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the control groups, once no process is left in them."""
        for folder in self._folders.values():
            end = time.monotonic() + 10.0
            while folder.exists() and time.monotonic() < end:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                time.sleep(0.05)

    def set(self, rank: int, cores: float | None) -> None:
        """Sets how many cores the processes of a host get on average; None: all."""
        quota = None if cores is None else round(cores * _PERIOD_US)
        if self._first:
            file, text = "cpu.cfs_quota_us", "-1" if quota is None else str(quota)
        else:
            file, text = "cpu.max", f"{'max' if quota is None else quota} {_PERIOD_US}"
        (self._folders[rank] / file).write_text(text)

    def words(self, host: Host) -> list[str]:
        """The words that start a command in the namespace and the group of a host."""
        enter = f'echo $$ > {self._folders[host.rank]}/cgroup.procs; exec "$@"'
        mount = _MOUNT_1 if self._first else _MOUNT_2
        return [
            *("sh", "-c", enter, "sh", "ip", "netns", "exec", host.namespace),
            *("sh", "-c", f'{mount} && exec "$@"', "sh"),
        ]


class HostRun:
    """A run of `link_script.py` on the hosts of a bed; the last is the supervisor's."""

    def __init__(
        self,
        folder: pathlib.Path,
        bed: Bed,
        script: Sequence[str],
        *,
        options: Sequence[str] = (),
        shares: CpuShares | None = None,
    ) -> None:
        """Starts a run.

        Args:
          folder: for all files.
          bed: the hosts.
          script: arguments of the script after the first one, where it writes times.
          options: options of `autopar run`.
          shares: the control groups of the hosts that train; None: they have none.
        """
        self.folder, self.bed, self._shares = folder, bed, shares
        folder.mkdir()
        secret = folder / "secret"
        create_secret(secret)
        home, count = bed.hosts[-1], len(bed.hosts) - 1
        at = f"{home.address}:{PORT}"
        words = ["run", "--listen", at, "--secret", str(secret), *options]
        words += ["--processes", str(count), "--folder", str(folder / "run")]
        words += [str(SCRIPT), str(folder / "times"), *script]
        self.processes = [self._start(home, words)]
        for k, host in enumerate(bed.hosts[:-1]):
            words = ["worker", "--supervisor", at, "--secret", str(secret)]
            words += ["--folder", str(folder / f"host{k}")]
            self.processes.append(self._start(host, words))
            # Workers get their ranks in the order in which hosts join.
            self.wait_for("host", k + 1)

    def _start(self, host: Host, words: list[str]) -> subprocess.Popen[Any]:
        inside = ["ip", "netns", "exec", host.namespace]
        if self._shares is not None and host is not self.bed.hosts[-1]:
            inside = self._shares.words(host)
        with open(self.folder / "output", "a") as output:
            return subprocess.Popen(
                [*inside, sys.executable, "-m", "autopar", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """What the supervisor and the agents have printed."""
        return (self.folder / "output").read_text()

    def log(self, event: str) -> list[dict[str, Any]]:
        """The events of a kind in the log of the run."""
        try:
            lines = (self.folder / "run" / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [x for x in found if x["event"] == event]

    def times(self) -> list[float]:
        """When the first process of the world had ended each step."""
        lines = (self.folder / "times").read_text().split("\n")
        return [float(x) for x in lines[:-1]]

    def wait_for(
        self, event: str, count: int, limit_s: float = LIMIT_S
    ) -> float | None:
        """When so many events of a kind had happened; None: not within the limit."""
        end = time.time() + limit_s
        while len(self.log(event)) < count:
            if time.time() > end or self.processes[0].poll() is not None:
                return None
            time.sleep(0.2)
        return float(self.log(event)[count - 1]["time_s"])

    def seconds(self, length_s: float) -> list[float]:
        """The seconds of each step from now on, for so long and at least 20 steps."""
        time.sleep(5.0)
        begin = time.time()
        while True:
            time.sleep(1.0)
            found = [x for x in self.times() if x > begin]
            if time.time() > begin + length_s and len(found) > 20:
                return [b - a for a, b in itertools.pairwise(found)]

    def step_s(self, length_s: float) -> float:
        """The median seconds of a step from now on."""
        return statistics.median(self.seconds(length_s))

    def pause(self) -> dict[str, Any]:
        """The seconds of the last pause, and of its parts."""
        lines = (self.folder / "times.ledger").read_text().splitlines()
        found = [x for x in map(json.loads, lines) if x["kind"] == "world"][-1]
        names = ("pause_s", "plan_s", "compile_s", "place_s")
        parts = {n: round(found["measured"][n], 2) for n in names}
        return {**parts, "program": found["program"]}

    def prepared(self) -> dict[str, Any]:
        """The seconds in which the last changed cluster was planned for.

        The plan was made when the change was expected, or when it counted.
        """
        found = [
            x for x in self.log("prepared") if x["number"] > 0 or x.get("expected")
        ]
        names = ("plan_s", "compile_s")
        return {n: round(max(x.get(n, 0.0) for x in found[-2:]), 1) for n in names}

    def shares(self) -> str:
        """The microbatches of each replica of the last plan, such as ``3+3+1``."""
        return (self.folder / "times.shares").read_text().splitlines()[-1]

    def scheme(self) -> str:
        """The plan of the last world, in a few words."""
        return str(self.log("formed")[-1]["scheme"])

    def close(self) -> None:
        """Ends the run."""
        with contextlib.suppress(OSError):
            netns.inside(
                self.bed.hosts[-1].namespace,
                lambda: command(self.folder / "run", command="stop"),
            )
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
