"""Starts the processes of workers, and says when they end."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


class Reports(Protocol):
    """What a launcher tells the run; from any thread."""

    def ended(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """A worker's process has ended.

        Args:
          worker: its number.
          code: its exit status, negative for a signal; None: not known.
          spare: whether another machine waits that may take its place.
        """
        ...

    def joined(self, machines: int) -> None:
        """So many machines more may each take a worker."""
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

    def start(self, worker: int, environment: Mapping[str, str]) -> int | None:
        """Starts a worker.

        Args:
          worker: its number.
          environment: all variables of the process.

        Returns:
          The process id; None: not known yet.
        """
        ...

    def watch(self, worker: int, pid: int | None) -> bool:
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


class LocalLauncher:
    """Starts workers as processes of this machine."""

    def __init__(self, command: Sequence[str]) -> None:
        """Has started none.

        Args:
          command: of a worker.
        """
        self._command = tuple(command)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._pids: dict[int, int] = {}
        self._reports: Reports | None = None

    def begin(self, run: str, reports: Reports) -> None:
        """See `Launcher`."""
        del run
        self._reports = reports

    def start(self, worker: int, environment: Mapping[str, str]) -> int | None:
        """See `Launcher`."""
        child = subprocess.Popen(
            self._command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._children[worker] = child
        if not self.watch(worker, child.pid):
            self._ended(worker, child.wait())
        return child.pid

    def watch(self, worker: int, pid: int | None) -> bool:
        """See `Launcher`."""
        try:
            descriptor = os.pidfd_open(pid or 0)
        except OSError:
            return False
        if select.select([descriptor], [], [], 0)[0]:
            os.close(descriptor)
            return False  # it has ended, and nobody has waited for it
        self._pids[worker] = pid or 0

        def wait() -> None:
            select.select([descriptor], [], [])
            os.close(descriptor)
            child = self._children.get(worker)
            self._pids.pop(worker, None)
            self._ended(worker, None if child is None else child.wait())

        threading.Thread(target=wait, daemon=True).start()
        return True

    def signal(self, worker: int, number: int) -> None:
        """See `Launcher`."""
        if (pid := self._pids.get(worker)) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def close(self) -> None:
        """See `Launcher`."""

    def _ended(self, worker: int, code: int | None) -> None:
        assert self._reports is not None
        self._reports.ended(worker, code)
