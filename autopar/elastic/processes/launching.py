"""Starts the processes of workers, and reports their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from autopar.elastic.processes import members, output
from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.recovery import (
    SHARED_VARIABLE,
    remove_shared,
    shared_prefix,
)

# Code of a helper process that dies with the thread that started it. The helper asks
# Linux for a signal at the end of that thread. Then it checks that its parent is still
# alive, because the thread may have ended before the helper asked.
_HELPER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit()
os.nice(int(sys.argv[2]))
os.execvp(sys.argv[3], sys.argv[3:])
"""


# Seconds to wait for the last output of workers after their processes have ended.
_SHOWN_S = 2.0


class Reports(Protocol):
    """Receives a launcher's reports; any thread may call the methods."""

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """Reports that a worker's process has ended.

        Args:
          worker: number of the worker.
          code: exit status, negative for a signal; None: unknown.
          spare: whether another machine is ready to run a replacement of the worker.
        """
        ...

    def on_join(self, machines: int) -> None:
        """Reports that this many machines joined, each with room for one worker."""
        ...

    def on_leave(self, worker: int, *, spare: bool) -> None:
        """Reports that a worker's host leaves; ``spare``: another host has room."""
        ...


@runtime_checkable
class HostReports(Reports, Protocol):
    """Also receives reports and questions of a launcher that manages several hosts."""

    def on_wait(self, worker: int) -> None:
        """Reports that no host has room for a worker, so that it waits."""
        ...

    def on_start(self, worker: int) -> None:
        """Reports that a worker that waited for a host has been started."""
        ...

    def on_unreached(self, worker: int, *, spare: bool) -> None:
        """Reports that a worker cannot be reached, but may still run."""
        ...

    def on_host(self, name: str, slots: int) -> None:
        """Reports that a host joined with ``slots`` slots for workers; 0: it left."""
        ...

    def may_return(self, worker: int) -> bool:
        """Whether a worker that counted as gone may take part again."""
        ...

    def has_link(self, worker: int) -> bool:
        """Whether a worker is connected to the supervisor now."""
        ...

    def is_done(self) -> bool:
        """Whether the run has ended without an error, and was not suspended."""
        ...


class Launcher(Protocol):
    """Starts workers, and reports when they end."""

    def begin(self, run: str, reports: Reports) -> None:
        """Begins or resumes a run; must be called before all other methods.

        Args:
          run: name of the run.
          reports: receives the launcher's reports.
        """
        ...

    def start(self, worker: int, environment: Mapping[str, str]) -> ProcessId | None:
        """Starts a worker.

        Args:
          worker: number of the worker.
          environment: all environment variables of the process.

        Returns:
          The process of the worker; None: not known yet.
        """
        ...

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """Takes over a worker that an earlier supervisor started, to report its end.

        Returns:
          Whether the worker still runs. If not, no end will be reported.
        """
        ...

    def signal(self, worker: int, number: int) -> None:
        """Sends a worker's process a signal; does nothing if the process has ended."""
        ...

    def close(self) -> None:
        """Frees the launcher's resources; called after all workers have ended."""
        ...


@runtime_checkable
class Placing(Protocol):
    """A launcher that starts workers at named places, such as nodes of a cluster."""

    def move(self, places: Mapping[str, int]) -> Sequence[int]:
        """Sets how many workers run at each place.

        Args:
          places: name of a place -> number of workers at the place.

        Returns:
          The workers that must leave, because they have no place any more.
        """
        ...


def python_command(script: Sequence[str]) -> tuple[str, ...]:
    """The command that runs a script with its arguments."""
    return (sys.executable, *script)


# gloo (JAX's communication library on CPUs) may miss that a send has failed. It then
# waits until a timeout, half an hour by default, which this XLA flag sets.
COLLECTIVE_FLAG = "xla_cpu_collective_timeout_seconds"


def threads_needed(devices: int) -> str:
    """Number of XLA threads of a worker (``NPROC``); collectives need two per device.

    Args:
      devices: number of CPU devices that the process simulates.
    """
    return str(max(os.cpu_count() or 1, 2 * devices))


class LocalLauncher:
    """Starts workers as processes of this machine."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        names: bool = False,
        label: str = "",
        folder: str | None = None,
    ) -> None:
        """Starts no worker yet.

        Args:
          command: command of a worker.
          names: whether each line that a worker prints gets the worker's number as
            prefix. If not, only worker 0's lines are printed, without a number.
          label: text in front of the numbers.
          folder: the folder in which workers run; None: the current folder.
        """
        self._command, self._names = tuple(command), names
        self._label, self._folder = label, folder
        self._lock = threading.Lock()
        self._printing: list[subprocess.Popen[bytes]] = []
        self._descriptors: dict[int, int] = {}
        self._reports: Reports | None = None
        # Prefix of the names of the workers' shared memory, and the workers that may
        # have left shared memory behind.
        self._shared, self._workers = "", set[int]()

    def begin(self, run: str, reports: Reports) -> None:
        """See `Launcher`."""
        self._reports, self._shared = reports, shared_prefix(run)

    def start(self, worker: int, environment: Mapping[str, str]) -> ProcessId | None:
        """See `Launcher`."""
        self._workers.add(worker)
        own = {SHARED_VARIABLE: self._shared} if self._shared else {}
        with self._printing_of(worker) as (stdout, stderr):
            child = subprocess.Popen(
                self._command,
                # Without this, Python would buffer output to a pipe.
                env={"PYTHONUNBUFFERED": "1", **environment, **own},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        # The process number cannot be reused before this process waits for the child.
        process = ProcessId.of(child.pid)
        self._watch(worker, os.pidfd_open(child.pid), child)
        return process

    @contextlib.contextmanager
    def _printing_of(self, worker: int) -> Generator[tuple[int | None, int | None]]:
        """Starts a process that prints the output of a worker with its number."""
        if worker == 0 and not self._names:
            yield None, None
            return
        with contextlib.ExitStack() as opened:
            (out, stdout), (err, stderr) = os.pipe(), os.pipe()
            for descriptor in (out, stdout, err, stderr):
                opened.callback(os.close, descriptor)
            command = [sys.executable, "-I", "-S", output.__file__]
            printing = subprocess.Popen(
                [*command, f"{self._label}[{worker}] ", str(err)],
                stdin=out,
                pass_fds=(err,),
                start_new_session=True,
            )
            # A printing process ends with its worker. `poll` collects its exit status,
            # so that no zombie stays.
            self._printing = [p for p in self._printing if p.poll() is None]
            self._printing.append(printing)
            yield stdout, stderr

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """See `Launcher`."""
        self._workers.add(worker)
        descriptor = None if process is None else process.open()
        if descriptor is None:
            return False
        self._watch(worker, descriptor, None)
        return True

    def _watch(
        self, worker: int, descriptor: int, child: subprocess.Popen[bytes] | None
    ) -> None:
        self._descriptors[worker] = descriptor

        def wait() -> None:
            members.has_ended(descriptor, wait_s=None)
            with self._lock:
                self._descriptors.pop(worker, None)
                os.close(descriptor)
            assert self._reports is not None
            self._reports.on_end(worker, None if child is None else child.wait())

        threading.Thread(target=wait, daemon=True).start()

    def signal(self, worker: int, number: int) -> None:
        """See `Launcher`."""
        with self._lock, contextlib.suppress(OSError):
            if (descriptor := self._descriptors.get(worker)) is not None:
                signal.pidfd_send_signal(descriptor, number)

    def close(self) -> None:
        """See `Launcher`; also removes shared memory that workers have left behind."""
        remove_shared(self._shared, self._workers)
        end = time.monotonic() + _SHOWN_S
        for printing in self._printing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                printing.wait(max(0.0, end - time.monotonic()))


def start_helper(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    nice: int,
    descriptors: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Starts a process that dies with the calling thread.

    Args:
      command: command of the process.
      environment: all environment variables of the process.
      nice: the process's nice value, 0 to 19 (the lowest priority).
      descriptors: open files that the process inherits.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _HELPER, str(os.getpid()), str(nice), *command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=descriptors,
    )
    # Linux may share cores evenly between sessions. A nice value then only counts
    # within a session (sched(7), "The autogroup feature"). Therefore the session's nice
    # value is set, too.
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{child.pid}/autogroup", "w") as file,
    ):
        file.write(str(nice))
    return child
