"""Causes random failures while a script trains on up to four hosts.

    python benchmarks/network/soak_hosts.py --seed 61 62 63 --events 200

The benchmark works like `benchmarks/soak.py`, with an agent on each host, the
supervisor on a fifth host, and a sixth host for a standby. Hosts are network
namespaces. Events kill workers, agents and the supervisor; they switch the supervisor's
host off; they disconnect hosts for ever or for a while, separate the hosts into halves,
and stop all processes of a host; and hosts join and leave. If no step goes back further
than recovery explains, two worlds never trained at once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import netns
import soak
from bed import Bed, Host
from soak_figures import SCRIPT, report

from autopar.elastic.processes.certificates import create_secret
from autopar.elastic.processes.records import command

HOSTS = 4
PORT = 7000


class HostSoak(soak.Soak):
    """A run over hosts, to which events happen."""

    def __init__(
        self, folder: pathlib.Path, seed: int, bed: Bed, processes: int = 3
    ) -> None:
        """Starts a run.

        Args:
          folder: folder for all files.
          seed: seed of the events.
          bed: the hosts; the last two are those of the supervisor and the standby.
          processes: number of processes at the start of the run.
        """
        self._processes = str(processes)
        self.bed, self.secret = bed, folder / "secret"
        self._home, self._homes = HOSTS, 0
        self.agents: dict[int, subprocess.Popen[Any]] = {}
        self.cut: set[int] = set()
        # Hosts whose agent was asked to leave the run.
        self.leaving: set[int] = set()
        create_secret(self.secret)
        super().__init__(folder, seed)

    @property
    def home(self) -> Host:
        """The supervisor's host."""
        return self.bed.hosts[self._home]

    @property
    def _addresses(self) -> str:
        return ",".join(f"{x.address}:{PORT}" for x in self.bed.hosts[HOSTS:])

    def begin(self) -> None:
        """Starts a run in a new folder, and an agent on each host."""
        self.end_agents()
        self.run_folder = self.folder / f"run{len(self.runs)}"
        self.results = self.folder / f"results{len(self.runs)}"
        self.run_folder.mkdir()
        self.results.mkdir()
        self.runs.append(self.results)
        self.supervise()
        for host in range(HOSTS):
            self.start_agent(host)
        self.wait(lambda: self.trains(-1))

    def _start(self, host: Host, words: list[str]) -> subprocess.Popen[Any]:
        checkpoint = str(self.results / "checkpoint")
        with open(self.results / "output", "a") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, sys.executable, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SOAK_CHECKPOINT": checkpoint, "NPROC": "4"},
            )

    def supervise(self, *more: str) -> None:
        """Starts `autopar run`, also after it was killed."""
        at = f"{self.home.address}:{PORT}"
        words = ["-m", "autopar", "run", "--listen", at, "--secret", str(self.secret)]
        words += more
        words += ["--processes", self._processes, "--min", "1", "--max", str(HOSTS)]
        for name in ("silence", "grace"):
            limit = os.environ.get(f"SOAK_{name.upper()}")
            words += [f"--{name}", limit] if limit else []
        words += ["--restarts", "1000000", "--folder", str(self.run_folder)]
        words += ["--recovery", os.environ.get("SOAK_RECOVERY", "auto")]
        words += [str(SCRIPT), str(self.results / "losses"), str(10**7)]
        self.process = self._start(self.home, words)

    def start_agent(self, host: int) -> None:
        """Starts the agent of a host that has no agent."""
        if (agent := self.agents.get(host)) is not None:
            if agent.poll() is None:
                return
            agent.wait()
        words = ["-m", "autopar", "worker", "--supervisor", self._addresses]
        words += ["--secret", str(self.secret), "--grace", "120"]
        words += ["--folder", str(self.folder / f"host{host}")]
        self.agents[host] = self._start(self.bed.hosts[host], words)

    def ask(self, **words: Any) -> Any:
        """Sends the supervisor a command."""
        return netns.inside(
            self.home.namespace, lambda: command(self.run_folder, **words)
        )

    def pids(self, host: int) -> list[int]:
        """The process numbers of a host."""
        space = self.bed.hosts[host].namespace
        return [int(x) for x in netns.output("ip", "netns", "pids", space).split()]

    def home_of(self, worker: int) -> int:
        """The host on which a worker runs."""
        found: list[int] = []

        def runs() -> bool:
            # A process that is respawned has another number from one call to the next.
            pid = self.pid_of(worker)
            found[:] = [h for h in range(HOSTS) if pid and pid in self.pids(h)]
            return bool(found)

        if not self.wait(runs):
            raise RuntimeError(f"worker {worker} runs on no host: {self.status()}")
        return found[0]

    def pid_of(self, worker: int) -> int | None:
        """The number of a worker's process."""
        known = self.status().get("workers", {})
        return known.get(str(worker), {}).get("pid")

    def link(self, host: int, *, up: bool) -> None:
        """Switches a host's link on or off."""
        words = ["-n", self.bed.hosts[host].namespace, "link", "set", "eth0"]
        netns.command(["ip", *words, "up" if up else "down"], "set a link")
        (self.cut.discard if up else self.cut.add)(host)

    # Events. Each method returns what the run must recover from.

    def event(self) -> bool:
        """Causes one event, and waits until the run has recovered."""
        good = super().event()
        for host in list(self.cut):
            self.link(host, up=True)
        # The others train on before an agent that leaves has ended. Without an agent
        # on each host, the next event may have no host to join.
        for host in self.leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agents[host].wait(soak.LIMIT_S)
        self.leaving.clear()
        for host in range(HOSTS):
            self.start_agent(host)
        return good

    def _some(self, world: list[int], count: int = 1) -> frozenset[int]:
        chosen = self.draw.sample(world, count)
        for worker in chosen:
            if pid := self.pid_of(worker):
                self.killed[worker] = pid
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        return frozenset(chosen)

    def _agent(self, found: Any, world: Any, generation: int) -> Any:
        """Kills an agent, with which its workers die."""
        worker = self.draw.choice(world)
        self.agents[self.home_of(worker)].kill()
        return {"generation": generation, "dead": frozenset([worker])}

    def _goes(self, found: Any, world: Any, generation: int) -> Any:
        """Asks a host to leave."""
        worker = self.draw.choice(world)
        host = self.home_of(worker)
        self.agents[host].terminate()
        self.leaving.add(host)
        return {"generation": generation, "dead": frozenset([worker])}

    def _down(self, found: Any, world: Any, generation: int) -> Any:
        """Disconnects a host until the others train without it."""
        worker = self.draw.choice(world)
        self.link(self.home_of(worker), up=False)
        return {"generation": generation, "dead": frozenset([worker])}

    def _glitch(self, found: Any, world: Any, generation: int) -> Any:
        """Switches a link off for 2 to 20 s; the world continues with or without the
        host.
        """
        host = self.home_of(self.draw.choice(world))
        found["which"] = seconds = round(self.draw.uniform(2, 20), 1)
        self.link(host, up=False)
        time.sleep(seconds)
        self.link(host, up=True)
        return {"generation": generation - 1}

    def _halves(self, found: Any, world: Any, generation: int) -> Any:
        """Separates half of the hosts, perhaps all that train, from the supervisor."""
        hosts = [self.home_of(w) for w in world]
        parted = self.draw.sample(
            hosts, self.draw.choice([len(hosts) // 2, len(hosts)])
        )
        found["which"] = f"{len(parted)} of {len(hosts)}"
        bridge = f"{self.bed.prefix}br2"
        netns.command(["ip", "link", "add", bridge, "type", "bridge"], "add a bridge")
        netns.command(["ip", "link", "set", bridge, "up"], "start the bridge")
        for host in parted:
            self._master(host, bridge)
        time.sleep(self.draw.uniform(2, 25))
        for host in parted:
            self._master(host, f"{self.bed.prefix}br")
        netns.command(["ip", "link", "delete", bridge], "remove the bridge")
        # If all hosts were out of reach, they may have saved the state and ended.
        found["back"] = len(parted) == len(hosts)
        return {"generation": generation - 1}

    def _master(self, host: int, bridge: str) -> None:
        outer = self.bed.hosts[host].outer
        netns.command(["ip", "link", "set", outer, "master", bridge], "move a link")

    def _slow(self, found: Any, world: Any, generation: int) -> Any:
        """Stops all processes of a host for a while."""
        pids = self.pids(self.home_of(self.draw.choice(world)))
        found["which"] = seconds = round(self.draw.uniform(0.5, 10), 1)
        for number, pause_s in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            time.sleep(pause_s)
        return {"generation": generation - 1}

    def _away(self, found: Any, world: Any, generation: int) -> Any:
        """Switches off the supervisor's link, and kills the supervisor, for a while."""
        home = ["ip", "-n", self.home.namespace, "link", "set", "eth0"]
        netns.command([*home, "down"], "set a link")
        self.process.kill()
        self.process.wait()
        time.sleep(self.draw.uniform(0, 4))
        netns.command([*home, "up"], "set a link")
        self.supervise()
        return {"generation": generation}

    def _lost(self, found: Any, world: Any, generation: int) -> Any:
        """Switches the supervisor's host off for ever; a standby starts before or
        after.
        """
        home, old = self._home, self.process
        wait_s = self.draw.uniform(0, 4)
        home_link = ["ip", "-n", self.home.namespace, "link", "set", "eth0"]
        netns.command([*home_link, "down"], "set a link")
        time.sleep(wait_s)
        self._homes += 1
        self._home = HOSTS + (home + 1 - HOSTS) % 2
        self.run_folder = self.folder / f"run{len(self.runs) - 1}.{self._homes}"
        self.run_folder.mkdir()
        self.supervise("--standby")
        if not self.wait(lambda: bool(self.status())):
            return None
        old.kill()
        old.wait()
        netns.command([*home_link, "up"], "set a link")
        return {"generation": generation}

    # The end.

    def end_agents(self) -> None:
        """Kills all agents; their workers die with them."""
        for agent in self.agents.values():
            agent.kill()
            agent.wait()

    def finish(self) -> None:
        """Ends the run, and all of its remaining processes."""
        asked, code = self.process.poll() is None, None
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.ask(command="stop")
            code = self.process.wait(60)
        if asked:
            self.stops.append(code == 0)
        self.end_agents()
        if (service := self.service()) is not None:
            service.kill()
        self.process.kill()
        self.process.wait()


# Smallest and largest number of processes of the world to which an event may happen.
KINDS = {
    "kill": (2, HOSTS),
    "agent": (2, HOSTS),
    "goes": (2, HOSTS),
    "join": (1, HOSTS - 1),
    "down": (2, HOSTS),
    "glitch": (2, HOSTS),
    "halves": (2, HOSTS),
    "slow": (2, HOSTS),
    "service": (2, HOSTS),
    "supervisor": (1, HOSTS),
    "away": (1, HOSTS),
    "lost": (1, HOSTS),
    "forming": (3, HOSTS),
    "saving": (2, HOSTS),
}


def run_seed(
    seed: int, events: int, kinds: list[str], limit_s: float
) -> dict[str, Any]:
    """The figures of the events that a seed draws."""
    soak.KINDS.clear()
    soak.KINDS.update({kind: KINDS[kind] for kind in kinds})
    with tempfile.TemporaryDirectory() as temporary, Bed(HOSTS + 2) as bed:
        folder = pathlib.Path(temporary)
        made = HostSoak(folder, seed, bed)
        begin = time.time()
        try:
            made.run(events, limit_s)
        finally:
            made.close()
        seconds = round(time.time() - begin)
        return {**report(made, seed, soak.KINDS), "seconds": seconds}


def main() -> None:
    """Runs the events of all seeds, and reports the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    data = pathlib.Path(__file__).parents[2] / "docs" / "data" / "soak_hosts.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    parser.add_argument("--seconds", type=float, default=1e9, help="for all events")
    parser.add_argument("--append", action="store_true", help="keep --out's seeds")
    parser.add_argument("--silence", type=int, default=5, help="of `autopar run`")
    parser.add_argument("--grace", type=int, default=8, help="of `autopar run`")
    parser.add_argument("--limit", type=float, default=soak.LIMIT_S, help="of an event")
    parser.add_argument("--recovery", default="auto", help="inplace or respawn")
    given = parser.parse_args()
    os.environ["SOAK_RECOVERY"] = given.recovery
    os.environ["SOAK_SILENCE"] = str(given.silence)
    os.environ["SOAK_GRACE"] = str(given.grace)
    soak.LIMIT_S = given.limit
    found: list[dict[str, Any]] = []
    commands = [" ".join(["python benchmarks/network/soak_hosts.py", *sys.argv[1:]])]
    if given.append:
        before = json.loads(given.out.read_text())
        found, commands = before["seeds"], [before["command"], *commands]
    asked, failed = (given.events, given.kinds, given.seconds), False
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        jobs = [pool.submit(run_seed, s, *asked) for s in given.seed]
        for done in concurrent.futures.as_completed(jobs):
            if (error := done.exception()) is not None:
                failed = True
                traceback.print_exception(error)
                continue
            found.append(done.result())
            print(json.dumps(found[-1], indent=1), flush=True)
            made = {**soak.data_of(given, found), "command": "; ".join(commands)}
            given.out.write_text(json.dumps(made, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
