"""Starts the processes of workers, and says when they end."""

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

# Linux sends this process a signal as the thread ends that started it, and changes the
# program at once, so that no time is left in which it could miss that.
_HELPER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit()
os.nice(19)
os.execvp(sys.argv[2], sys.argv[2:])
"""


# How long what workers have printed may take to be shown after their end.
_SHOWN_S = 2.0


class Reports(Protocol):
    """What a launcher tells the run; from any thread."""

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """A worker's process has ended.

        Args:
          worker: its number.
          code: its exit status, negative for a signal; None: not known.
          spare: whether another machine waits that may take its place.
        """
        ...

    def on_join(self, machines: int) -> None:
        """So many machines more may each take a worker."""
        ...


@runtime_checkable
class HostReports(Reports, Protocol):
    """What a launcher of hosts tells and asks the run besides."""

    def on_wait(self, worker: int) -> None:
        """A worker waits until a host has room."""
        ...

    def on_start(self, worker: int) -> None:
        """A worker that waited has been started."""
        ...

    def on_leave(self, worker: int, *, spare: bool) -> None:
        """The host of a worker is about to go; another one may have room for it."""
        ...

    def on_unreached(self, worker: int, *, spare: bool) -> None:
        """A worker cannot be reached; whether it runs is not known."""
        ...

    def on_host(self, name: str, slots: int) -> None:
        """A host has joined, with room for so many workers; 0: it is gone."""
        ...

    def may_return(self, worker: int) -> bool:
        """Whether a worker that was given up may take part again."""
        ...

    def has_link(self, worker: int) -> bool:
        """Whether a worker is connected to the supervisor."""
        ...

    def is_done(self) -> bool:
        """Whether the run has ended without an error, and was not suspended."""
        ...


class Launcher(Protocol):
    """Starts workers somewhere, and says when they end."""

    def begin(self, run: str, reports: Reports) -> None:
        """Begins, or takes up a run; before all else.

        Args:
          run: name of the run.
          reports: is told what happens.
        """
        ...

    def start(self, worker: int, environment: Mapping[str, str]) -> ProcessId | None:
        """Starts a worker.

        Args:
          worker: its number.
          environment: all variables of the process.

        Returns:
          Its process; None: not known yet.
        """
        ...

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """Reports the end of a worker that an earlier supervisor started.

        Returns:
          Whether it runs; otherwise there is no report.
        """
        ...

    def signal(self, worker: int, number: int) -> None:
        """Sends a worker's process a signal; nothing where it has ended."""
        ...

    def close(self) -> None:
        """Ends; all workers have."""
        ...


@runtime_checkable
class Placing(Protocol):
    """What a launcher does besides that starts workers at places it is told."""

    def move(self, places: Mapping[str, int]) -> Sequence[int]:
        """Takes the places of workers from now on.

        Args:
          places: name of a place -> how many workers it has.

        Returns:
          The workers that have no place any more.
        """
        ...


def python_command(script: Sequence[str]) -> tuple[str, ...]:
    """The command that runs a script with its arguments."""
    return (sys.executable, *script)


# gloo may miss that a send has failed, and waits for this flag of XLA's: half an hour.
COLLECTIVE_FLAG = "xla_cpu_collective_timeout_seconds"


def threads_needed(devices: int) -> str:
    """Threads of a worker (``NPROC``): collectives take one for a device and its peer.

    Args:
      devices: simulated in the process.
    """
    return str(max(os.cpu_count() or 1, 2 * devices))


class LocalLauncher:
    """Starts workers as processes of this machine."""

    def __init__(self, command: Sequence[str], *, names: bool = False) -> None:
        """Has started none.

        Args:
          command: of a worker.
          names: whether the number of a worker stands before each line that it prints;
            the first one prints as it is where a run begins with it alone.
        """
        self._command, self._names = tuple(command), names
        self._lock = threading.Lock()
        self._printing: list[subprocess.Popen[bytes]] = []
        self._descriptors: dict[int, int] = {}
        self._reports: Reports | None = None
        # Of the memory of its workers, and whose there may be.
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
                # What goes to a pipe would wait for more of it.
                env={"PYTHONUNBUFFERED": "1", **environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        # Nobody has waited for it yet, so the number is its own.
        process = ProcessId.of(child.pid)
        self._watch(worker, os.pidfd_open(child.pid), child)
        return process

    @contextlib.contextmanager
    def _printing_of(self, worker: int) -> Generator[tuple[int | None, int | None]]:
        """Where a worker prints to: a process that prints its lines with its number."""
        if worker == 0 and not self._names:
            yield None, None
            return
        with contextlib.ExitStack() as opened:
            (out, stdout), (err, stderr) = os.pipe(), os.pipe()
            for descriptor in (out, stdout, err, stderr):
                opened.callback(os.close, descriptor)
            command = [sys.executable, "-I", "-S", output.__file__]
            printing = subprocess.Popen(
                [*command, f"[{worker}] ", str(err)],
                stdin=out,
                pass_fds=(err,),
                start_new_session=True,
            )
            # Asking reaps those that have ended with their workers.
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
        """See `Launcher`; what workers have left in shared memory goes."""
        remove_shared(self._shared, self._workers)
        end = time.monotonic() + _SHOWN_S
        for printing in self._printing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                printing.wait(max(0.0, end - time.monotonic()))


def start_helper(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a process of the lowest priority, which ends with the calling thread.

    Args:
      command: of the process.
      environment: all its variables.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _HELPER, str(os.getpid()), *command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Where sessions share the cores evenly, the priority of a process counts in its
    # session alone (Linux, sched(7), "The autogroup feature").
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{child.pid}/autogroup", "w") as file,
    ):
        file.write("19")
    return child
