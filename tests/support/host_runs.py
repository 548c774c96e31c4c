"""Starts runs on several hosts, which are network namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from checkout import ROOT
from elastic_processes import Run

from autopar.elastic.processes.certificates import create_secret

sys.path.insert(0, str(ROOT / "benchmarks" / "network"))

import netns
from bed import Bed, BedUnavailable

PORT = 7000


def why_not() -> str:
    """The reason why network namespaces are not available; '' if they are."""
    try:
        with Bed(1):
            return ""
    except BedUnavailable as error:
        return str(error)


class HostRun(Run):
    """A run on several hosts; by default the supervisor's ``home`` has no agent."""

    def __init__(
        self,
        hosts: Bed,
        folder: pathlib.Path,
        *words: Any,
        home: int = -1,
        **options: Any,
    ) -> None:
        self.hosts = hosts
        self.secret = folder.parent / "secret"
        create_secret(self.secret)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.lost: list[subprocess.Popen[Any]] = []
        self.home = self.begun = home
        given = {"listen": self.address(home), "secret": self.secret, **options}
        super().__init__(folder, *words, **given)

    def started(self) -> subprocess.Popen[str]:
        """Starts `autopar run` on the supervisor's host."""
        return self.popen(self.command_line(), self.home)

    def address(self, host: int) -> str:
        """The address of a supervisor on a host."""
        return f"{self.hosts.hosts[host].address}:{PORT}"

    def start_standby(self, host: int) -> None:
        """Starts a standby supervisor with its own folder, and reads that folder."""
        self.lost.append(self.process)
        self.folder = self.folder.with_name(f"standby{len(self.lost)}")
        self.options |= {"listen": self.address(host), "standby": None}
        self.home = host
        self.process = self.started()

    def popen(self, line: list[str], host: int) -> subprocess.Popen[Any]:
        """Starts a command on a host."""
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "output", "a") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.hosts.hosts[host].namespace, *line],
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def start_agent(self, host: int, **options: Any) -> None:
        """Starts the agent of a host, after the host's last agent has ended."""
        if host in self.agents:
            self.agents[host].wait()
        folder = self.folder.parent / f"host{host}"
        given = {
            "supervisor": self.address(-1),
            "secret": self.secret,
            "folder": folder,
        }
        words = [f"--{k}={v}" for k, v in {**given, **options}.items()]
        line = [sys.executable, "-m", "autopar", "worker", *words]
        self.agents[host] = self.popen(line, host)

    def ask(self, **words: Any) -> Any:
        ask = super().ask
        return netns.inside(self.hosts.hosts[self.home].namespace, lambda: ask(**words))

    def link(self, host: int, *, up: bool) -> None:
        """Sets the network link of a host up or down."""
        words = ["ip", "-n", self.hosts.hosts[host].namespace, "link", "set", "eth0"]
        netns.command([*words, "up" if up else "down"], "set a link")

    def pid(self, worker: int) -> int:
        return int(self.ask(command="status")["status"]["workers"][str(worker)]["pid"])

    def host_of(self, worker: int) -> int:
        """The host on which a worker runs."""
        space = netns.output("ip", "netns", "identify", str(self.pid(worker))).strip()
        return next(h for h in self.agents if self.hosts.hosts[h].namespace == space)

    def programs(self) -> list[set[str]]:
        """The names of the compiled programs that each host stores."""
        folders = [self.folder.parent / f"host{host}" for host in sorted(self.agents)]
        return [{x.name for x in folder.glob("programs/*")} for folder in folders]

    def world(self) -> list[int]:
        """The workers of the last world."""
        return self.worlds()[-1] if self.worlds() else []

    def wait_for_size(self, size: int, steps: int = 3) -> None:
        """Waits until that many workers train together and have done some steps."""
        self.wait_for(lambda: len(self.world()) == size)
        there = self.last_step()
        self.wait_for(lambda: self.last_step() >= there + steps)

    def wait_for_worlds(self, count: int, steps: int = 3) -> None:
        """Waits until that many worlds have formed and the last has done some steps."""
        self.wait_for(lambda: len(self.worlds()) >= count)
        there = self.last_step()
        self.wait_for(lambda: self.last_step() >= there + steps)

    def clean(self) -> None:
        """Kills all processes of the run that are still alive, also agents."""
        for process in [*self.agents.values(), *self.lost]:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.service(), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        time.sleep(0.2)
