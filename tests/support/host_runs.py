"""Hosts that are network namespaces of this machine, and runs on them.

It needs Linux, root and iproute2. Each host has an address of its own on a bridge; the
supervisor is on a host of its own, too.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from elastic_processes import Run

from autopar.elastic.processes.certificates import create_secret

PORT = 7000


def why_not() -> str:
    """Why there can be no hosts here; '': there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    made = subprocess.run(["ip", "netns", "add", "autopar-try"], capture_output=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "delete", "autopar-try"], check=True)
    return ""


class Hosts:
    """Hosts with addresses, on one bridge."""

    def __init__(self, count: int, rate: str = "") -> None:
        """Makes hosts.

        Args:
          count: of hosts.
          rate: of the link of each, as `tc` takes it; '': not limited.
        """
        self._mark = f"{os.getpid() % 100000:05d}"
        self._net = 2 + os.getpid() % 250
        self.count = count
        self._ip("link", "add", f"apb{self._mark}", "type", "bridge")
        self._ip("link", "set", f"apb{self._mark}", "up")
        # This process looks at runs.
        self._ip("addr", "add", f"10.{self._net}.77.254/24", "dev", f"apb{self._mark}")
        for host in range(count):
            space, link = self.space(host), self._link(host)
            self._ip("netns", "add", space)
            veth = ("type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "add", link, *veth)
            self._ip("link", "set", link, "master", f"apb{self._mark}", "up")
            at = f"{self.address(host)}/24"
            self._ip("-n", space, "addr", "add", at, "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self.link(host, up=True)
            for inside in (True, False) if rate else ():
                self.shape(host, rate, inside=inside)

    def shape(self, host: int, rate: str, *, inside: bool) -> None:
        """Limits what a host sends (inside) or receives."""
        where = ["ip", "netns", "exec", self.space(host)] if inside else []
        device = "eth0" if inside else self._link(host)
        shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
        line = [*where, "tc", "qdisc", "replace", "dev", device, "root", *shape]
        subprocess.run(line, check=True)

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.{self._net}.77.{host + 1}"

    def space(self, host: int) -> str:
        """The namespace of a host."""
        return f"ap{self._mark}h{host}"

    def link(self, host: int, *, up: bool) -> None:
        """Takes the link of a host up or down."""
        state = "up" if up else "down"
        self._ip("-n", self.space(host), "link", "set", "eth0", state)

    def command(self, host: int, *words: str) -> list[str]:
        """The command that runs words on a host."""
        return ["ip", "netns", "exec", self.space(host), *words]

    def close(self) -> None:
        """Removes all of them."""
        for host in range(self.count):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip("netns", "delete", self.space(host))
        self._ip("link", "delete", f"apb{self._mark}")

    def _link(self, host: int) -> str:
        return f"apv{self._mark}{host}"

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


class HostRun(Run):
    """A run on hosts; the supervisor is on the last one, which has no agent."""

    def __init__(
        self, hosts: Hosts, folder: pathlib.Path, *words: Any, **options: Any
    ) -> None:
        self.hosts = hosts
        self.secret = folder.parent / "secret"
        create_secret(self.secret)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        supervisor = hosts.address(hosts.count - 1)
        self.at = f"{supervisor}:{PORT}"
        given = {"listen": self.at, "secret": self.secret, **options}
        super().__init__(folder, *words, **given)

    def started(self) -> subprocess.Popen[str]:
        """Starts `autopar run` on its host."""
        return self.popen(self.command_line(), self.hosts.count - 1)

    def popen(self, line: list[str], host: int) -> subprocess.Popen[Any]:
        """Starts a command on a host."""
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "output", "a") as output:
            return subprocess.Popen(
                self.hosts.command(host, *line),
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def start_agent(self, host: int, **options: Any) -> None:
        """Starts the agent of a host, where it has none or its last one has ended."""
        if host in self.agents:
            self.agents[host].wait()
        folder = self.folder.parent / f"host{host}"
        given = {"supervisor": self.at, "secret": self.secret, "folder": folder}
        words = [f"--{k}={v}" for k, v in {**given, **options}.items()]
        line = [sys.executable, "-m", "autopar", "worker", *words]
        self.agents[host] = self.popen(line, host)

    def pid(self, worker: int) -> int:
        return int(self.ask(command="status")["status"]["workers"][str(worker)]["pid"])

    def host_of(self, worker: int) -> int:
        """Where a worker runs."""
        space = subprocess.run(
            ["ip", "netns", "identify", str(self.pid(worker))],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        return next(h for h in self.agents if self.hosts.space(h) == space)

    def world(self) -> list[int]:
        """The workers that train."""
        return self.worlds()[-1] if self.worlds() else []

    def wait_for_size(self, size: int, steps: int = 3) -> None:
        """Waits until so many train together, and have done some steps."""
        self.wait_for(lambda: len(self.world()) == size)
        there = self.last_step()
        self.wait_for(lambda: self.last_step() >= there + steps)

    def wait_for_worlds(self, count: int, steps: int = 3) -> None:
        """Waits until so many worlds have formed in all, and trains on."""
        self.wait_for(lambda: len(self.worlds()) >= count)
        there = self.last_step()
        self.wait_for(lambda: self.last_step() >= there + steps)

    def clean(self) -> None:
        """Ends all that is left, agents too."""
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.service(), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        time.sleep(0.2)
