"""A real Slurm cluster of several nodes on this machine, for tests.

Each node is a slurmd with its own port. The cluster has its own munged and key for
authentication. So the Slurm of this machine, if any, is not touched.
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
    """The programs that a cluster needs but this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PLACES) is None]


def wait_for(done: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)


class SlurmCluster:
    """A cluster of nodes n1, n2, ... with four CPUs each."""

    def __init__(self, folder: pathlib.Path, nodes: int = 4) -> None:
        """Starts the daemons of the cluster.

        Args:
          folder: the folder of all files of the daemons.
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
        """Starts the slurmd of a node."""
        self._slurmd[node] = self._daemon("slurmd", "-D", "-N", node)

    def _up(self) -> bool:
        states = self.do("sinfo", "-N", "-h", "-o", "%T").split()
        return states == ["idle"] * len(self.nodes)

    def do(self, *words: str) -> str:
        """Runs a Slurm command and returns what it prints."""
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def state(self, job: int) -> str:
        """The state of a job; '' if Slurm does not know the job any more."""
        return self.do("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T")

    def submit(self, script: str, **variables: str) -> int:
        """Submits a job, with variables in its environment; returns its number."""
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            env=self.env | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    def start_at_once(self, job: int, restarts: int = 1) -> None:
        """Makes a requeued job start at once, and waits until it runs or has ended.

        Args:
          job: the number of the job, which Slurm would start only after two minutes.
          restarts: how often Slurm has requeued the job by then.
        """

        # Slurm revokes the credential of the requeued job. A start within the same
        # second would be taken for the old one.
        seen: list[float] = []

        def starts() -> bool:
            if self.state(job) == "PENDING":
                seen.append(time.monotonic())
            if seen and seen[-1] > seen[0] + 2.5:
                self.do("scontrol", "update", f"jobid={job}", "StartTime=now")
            shown = self.do("scontrol", "show", "job", str(job)).split()
            states = {"JobState=RUNNING", "JobState=COMPLETED"}
            return f"Restarts={restarts}" in shown and not states.isdisjoint(shown)

        wait_for(starts, f"job {job} does not start again", 2 * LIMIT_S)

    def processes(self, node: str) -> list[int]:
        """The processes of jobs on a node, with their step daemons first."""
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
        """Kills all processes of a node at once, as a power failure does."""
        # Children die first: the kernel would send a stopped srun whose parent has died
        # SIGHUP and SIGCONT, and it would end its step on another node.
        found = sorted(self.processes(node), reverse=True)
        pids = [self._slurmd[node].pid, *found]
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, how)
        self._slurmd.pop(node).wait()

    def end_jobs(self) -> None:
        """Cancels all jobs, and waits some seconds for their end."""
        self.do("scancel", "--user", subprocess.getoutput("id -un"))
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.do("squeue", "-h"), "jobs are left", 15.0)

    def stop(self) -> None:
        """Cancels all jobs and ends all daemons."""
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
