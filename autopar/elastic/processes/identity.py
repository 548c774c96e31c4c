"""Which process a number means: numbers are given again, after a reset sooner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import select
import signal
from collections.abc import Mapping
from typing import Any

# Of the fields behind the name in ``/proc/PID/stat``: field 22 of proc(5).
_STARTED = 19


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine (Linux).

    Attributes:
      pid: its number.
      started: when it started, in ticks since the machine did.
      boot: names the start of the machine.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has a number now; None: there is none."""
        try:
            text = pathlib.Path(f"/proc/{pid}/stat").read_text()
            return cls(pid, int(text.rpartition(")")[2].split()[_STARTED]), _boot())
        except (OSError, ValueError, IndexError):
            return None

    @classmethod
    def from_data(cls, data: Any) -> ProcessId | None:
        """Reads `to_data`; None where it is nothing of the kind."""
        if not isinstance(data, Mapping):
            return None
        pid, started, boot = (data.get(k) for k in ("pid", "started", "boot"))
        if not (isinstance(pid, int) and isinstance(started, int) and pid > 0):
            return None
        return cls(pid, started, str(boot))

    def to_data(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    def open(self) -> int | None:
        """A descriptor of the process (pidfd_open(2)); None: it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            return None
        # The descriptor keeps its process, so what the number means is asked behind it.
        if ProcessId.of(self.pid) == self and not has_ended(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def kill(self) -> None:
        """Ends the process, and no other one that has its number."""
        if (descriptor := self.open()) is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def has_ended(descriptor: int, wait_s: float | None = 0) -> bool:
    """Whether a process has ended, also where nobody has waited for it yet.

    Args:
      descriptor: of the process.
      wait_s: longest to wait for its end; None: for ever.
    """
    return bool(select.select([descriptor], [], [], wait_s)[0])


@functools.cache
def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
