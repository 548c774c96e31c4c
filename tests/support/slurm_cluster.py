"""A real Slurm of some nodes on this machine, for tests.

Each node is a slurmd of its own, with a port of its own. Authentication has a key and a
munged of its own, so nothing of the machine's own Slurm is touched.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
LIMIT_S = 60.0
_PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def missing_programs() -> list[str]:
    """What a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PLACES) is None]


def wait_for(done: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Waits until something is so."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)


class SlurmCluster:
    """Nodes n1, n2, ... of four CPUs each."""

    def __init__(self, folder: pathlib.Path, nodes: int = 4) -> None:
        """Starts the daemons.

        Args:
          folder: of all their files.
          nodes: how many.
        """
        self.folder = folder
        self.nodes = [f"n{k}" for k in range(1, nodes + 1)]
        self._conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self._conf), "PATH": _PLACES}
        for name in ("state", "spool", "munge"):
            (folder / name).mkdir()
        key = folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._conf.write_text(self._settings(_free_ports(nodes + 1)))
        self._daemons = [self._munged(key), self._daemon("slurmctld", "-D")]
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}
        for node in self.nodes:
            self.start(node)
        wait_for(self._up, "the nodes do not come up")

    def _settings(self, ports: list[int]) -> str:
        folder, user = self.folder, subprocess.getoutput("id -un")
        host = socket.gethostname()
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            "CPUs=4 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SlurmdTimeout=6
KillWait=2
SchedulerParameters=sched_interval=2,bf_interval=2
{chr(10).join(lines)}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

    def _munged(self, key: pathlib.Path) -> subprocess.Popen[bytes]:
        place = key.parent
        named = [f"--{n}-file={place / n}" for n in ("pid", "seed", "log")]
        words = [f"--key-file={key}", f"--socket={place / 'socket'}", *named]
        found = self._daemon("munged", "--foreground", "--force", *words)
        wait_for((place / "socket").exists, "munged does not start")
        return found

    def _daemon(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        program = shutil.which(name, path=_PLACES)
        assert program is not None
        output = (self.folder / f"{name}.output").open("ab")
        with output:
            return subprocess.Popen(
                [program, *words], env=self.env, stdout=output, stderr=output
            )

    def start(self, node: str) -> None:
        """Starts the daemon of a node."""
        self._slurmd[node] = self._daemon("slurmd", "-D", "-N", node)

    def _up(self) -> bool:
        states = self.do("sinfo", "-N", "-h", "-o", "%T").split()
        return states == ["idle"] * len(self.nodes)

    def do(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def state(self, job: int) -> str:
        """The state of a job; '' where Slurm has forgotten it."""
        return self.do("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T")

    def start_at_once(self, job: int, restarts: int = 1) -> None:
        """Waits until a job that is requeued runs again.

        Args:
          job: its number; Slurm would let it wait two minutes.
          restarts: how often it has been requeued then.
        """

        # Slurm revokes the job's credential, and takes what begins within the same
        # second for the job before.
        seen: list[float] = []

        def starts() -> bool:
            if self.state(job) == "PENDING":
                seen.append(time.monotonic())
            if seen and seen[-1] > seen[0] + 2.5:
                self.do("scontrol", "update", f"jobid={job}", "StartTime=now")
            shown = self.do("scontrol", "show", "job", str(job)).split()
            return {"JobState=RUNNING", f"Restarts={restarts}"} <= set(shown)

        wait_for(starts, f"job {job} does not start again", 2 * LIMIT_S)

    def processes(self, node: str) -> list[int]:
        """The processes of jobs on a node, their step daemons first."""
        wanted = f"SLURMD_NODENAME={node}".encode()
        found: list[int] = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                ours = f"SLURM_CONF={self._conf}".encode() in words
                if ours and wanted in words:
                    found.append(int(path.name))
        parents: set[int] = set()
        for pid in found:
            with contextlib.suppress(OSError):
                stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                name = pathlib.Path(f"/proc/{parent}/comm").read_text()
                if name.startswith("slurmstepd"):
                    parents.add(parent)
        return [*parents, *found]

    def kill(self, node: str) -> None:
        """Kills all of a node at once, as a machine that loses its power."""
        pids = [self._slurmd[node].pid, *self.processes(node)]
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, how)
        self._slurmd.pop(node).wait()

    def end_jobs(self) -> None:
        """Ends all jobs; those that do not end within seconds are left."""
        self.do("scancel", "--user", subprocess.getoutput("id -un"))
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.do("squeue", "-h"), "jobs are left", 15.0)

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        self.end_jobs()
        for node in list(self._slurmd):
            for pid in self.processes(node):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in [*self._slurmd.values(), *reversed(self._daemons)]:
            daemon.terminate()
        for daemon in [*self._slurmd.values(), *self._daemons]:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        ends = [opened.enter_context(socket.socket()) for _ in range(count)]
        for end in ends:
            end.bind(("127.0.0.1", 0))
        return [int(end.getsockname()[1]) for end in ends]
