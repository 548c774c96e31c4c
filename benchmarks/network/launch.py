"""Starts one process in each namespace, and exchanges messages with it.

A worker writes lines to its standard output. A line that starts with ``@bed`` is
followed by JSON: ``{"result": ...}`` is stored. ``{"rate_mbit": ...}`` changes the rate
of all links, and ``{"cores": ...}`` how much of a core each process may use; both are
answered by one line on the worker's standard input. All other lines are the worker's
log.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

MARK = "@bed "
RANK, COUNT, COORDINATOR = "BED_RANK", "BED_COUNT", "BED_COORDINATOR"
COORDINATOR_PORT = 29400
"""In a namespace of its own no other program can hold it."""

# XLA computes with one thread, because the hosts share the machine's cores. NPROC sets
# the size of XLA's pool; a collective blocks one of its threads.
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false"
NPROC = "4"

# By default, glibc returns every large array to the kernel after a step, and the next
# step has page faults for the same memory. With these settings glibc keeps the memory.
# A step of the 3.6 M language model with int4 at 500 Mbit/s takes 208 ms with them and
# 285 ms without. A dense step, which waits for the link, takes 615 and 625 ms. Memory
# beyond the 64 MB of a thread's arena would still be returned, so there is only one
# arena. A step with int8 at 10 Gbit/s then takes 96 ms instead of 127 ms.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}

_LOG_LINES = 400
_POLL_S = 0.02
_GRACE_S = 2.0
_PERIOD_US = 10_000
"""A process that has used up its time waits for at most this long."""
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class RunFailed(RuntimeError):
    """A process failed or took too long; the message has the end of its log."""


class Place(Protocol):
    """The attributes of `bed.Host` that this module needs."""

    @property
    def rank(self) -> int:
        """Number of the host."""
        ...

    @property
    def namespace(self) -> str:
        """Name of its namespace."""
        ...

    @property
    def address(self) -> str:
        """Its address."""
        ...


def environment(
    rank: int, count: int, coordinator: str, more: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of one worker."""
    folders = (REPOSITORY, REPOSITORY / "solver", REPOSITORY / "passes")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": XLA_FLAGS,
        "OMP_NUM_THREADS": "1",
        "NPROC": NPROC,
        **KEEP_MEMORY,
        **more,
        RANK: str(rank),
        COUNT: str(count),
        COORDINATOR: f"{coordinator}:{COORDINATOR_PORT}",
    }


class CoreLimit:
    """A control group of one process, which limits its processor time."""

    def __init__(self, pid: int) -> None:
        """Makes the group, without a limit.

        Raises:
          OSError: this machine lets no one make control groups.
        """
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
        parts = {name: path for _, name, path in (x.split(":", 2) for x in lines)}
        first = next((n for n in parts if "cpu" in n.split(",")), None)
        self._first, root = bool(first), pathlib.Path("/sys/fs/cgroup")
        folder = root / "cpu" / parts[first].strip("/") if first else root
        self._group = folder / f"bed{pid}"
        self._group.mkdir()
        (self._group / "cgroup.procs").write_text(str(pid))

    def set(self, cores: float | None) -> None:
        """Sets how much of a core the process may use; None: no limit."""
        limit_us = -1 if cores is None else round(cores * _PERIOD_US)
        if self._first:
            (self._group / "cpu.cfs_quota_us").write_text("-1")
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(limit_us))
        else:
            most = "max" if cores is None else str(limit_us)
            (self._group / "cpu.max").write_text(f"{most} {_PERIOD_US}")

    def remove(self) -> None:
        """Removes the group after its process has ended."""
        with contextlib.suppress(OSError):
            self._group.rmdir()


class Running:
    """The processes of a command, one in each namespace."""

    def __init__(
        self,
        hosts: Sequence[Place],
        command: Sequence[str],
        env: Mapping[str, str],
        set_rate: Callable[[float | None], None],
    ) -> None:
        """Starts the processes; called by `bed.Bed.start`.

        Args:
          hosts: where to.
          command: the program and its arguments.
          env: further environment variables.
          set_rate: called with each rate that a worker requests, in Mbit/s.
        """
        self.results: list[list[Any]] = [[] for _ in hosts]
        self._set_rate = set_rate
        self._logs = [collections.deque[str](maxlen=_LOG_LINES) for _ in hosts]
        self._folder = tempfile.TemporaryDirectory(prefix="bed-")
        self._errors = [
            pathlib.Path(self._folder.name) / f"{host.rank}.err" for host in hosts
        ]
        self._written = [""] * len(hosts)  # to the files, once those are gone
        self._processes: list[subprocess.Popen[str]] = []
        self._limits: list[CoreLimit] = []
        self._readers: list[threading.Thread] = []
        self._problem: str | None = None
        for host, errors in zip(hosts, self._errors, strict=True):
            variables = environment(host.rank, len(hosts), hosts[0].address, env)
            self._start(host, command, variables, errors)

    def _start(
        self,
        host: Place,
        command: Sequence[str],
        variables: Mapping[str, str],
        errors: pathlib.Path,
    ) -> None:
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *command],
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the parent, who cleans up
            )
        self._processes.append(process)
        reader = threading.Thread(target=self._read, args=(host.rank,), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, rank: int) -> None:
        process = self._processes[rank]
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                self._serve(rank, line)
            else:
                self._logs[rank].append(line)

    def _serve(self, rank: int, line: str) -> None:
        """Carries out the request of a worker."""
        try:
            message = json.loads(line.removeprefix(MARK))
            if "result" in message:
                self.results[rank].append(message["result"])
                return
            if "say" in message:
                print(message["say"], file=sys.stderr, flush=True)
                return
            if "cores" in message:
                self._limit_cores(message["cores"])
            else:
                self._set_rate(message["rate_mbit"])
            answer = self._processes[rank].stdin
            assert answer is not None
            answer.write("done\n")
            answer.flush()
        except Exception as error:  # of this thread, which nobody joins in time
            self._problem = f"process {rank} asked {line.strip()!r}: {error}"

    def _limit_cores(self, cores: float | None) -> None:
        """Limits the processor time of each process."""
        if not self._limits:
            self._limits = [CoreLimit(process.pid) for process in self._processes]
        for limit in self._limits:
            limit.set(cores)

    def wait(self, timeout_s: float) -> list[list[Any]]:
        """Waits for the end of all processes; returns the results that each reported.

        Raises:
          RunFailed: a process failed, or they took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                codes = [process.poll() for process in self._processes]
                self._check(codes, time.monotonic() > deadline, timeout_s)
                if all(code == 0 for code in codes):
                    break
                time.sleep(_POLL_S)
            for reader in self._readers:
                reader.join(_GRACE_S)
            if self._problem:
                raise RunFailed(self._problem)
        except RunFailed:
            time.sleep(0.2)  # the others may say what went wrong
            raise
        finally:
            self.stop()
        return self.results

    def _check(self, codes: Sequence[int | None], late: bool, timeout_s: float) -> None:
        if self._problem:
            raise RunFailed(self._problem)
        for rank, code in enumerate(codes):
            if code:
                raise RunFailed(
                    f"process {rank} ended with {code}:\n{self.log(rank, 40)}"
                )
        if late:
            still = [rank for rank, code in enumerate(codes) if code is None]
            raise RunFailed(
                f"processes {still} had not ended after {timeout_s:g} s; the log of "
                f"{still[0]}:\n{self.log(still[0], 20)}"
            )

    def log(self, rank: int, lines: int = _LOG_LINES) -> str:
        """The end of a process's log."""
        errors = self._written[rank]
        if self._errors[rank].exists():
            errors = self._errors[rank].read_text(errors="replace")
        last = errors.splitlines(keepends=True)[-lines:]
        return "".join([*list(self._logs[rank])[-lines:], *last])

    def stop(self) -> None:
        """Kills the processes that still run; results and logs are kept."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait()
            reader.join(_GRACE_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        for limit in self._limits:
            limit.remove()
        if self._errors and self._errors[0].exists():
            texts = [path.read_text(errors="replace") for path in self._errors]
            self._written = texts
        self._folder.cleanup()
