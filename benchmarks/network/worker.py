"""Functions of the benchmarks inside a namespace: processes, counters and reports.

`start` makes the processes one JAX program with one CPU device each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import launch

HEADER_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 20 and its timestamps 12: what a packet has on top."""

SEGMENT_BYTES = 1448
"""Of data in a full packet: an MTU of 1500 less the headers of IP and TCP."""

_STATISTICS = pathlib.Path("/sys/class/net")
_PR_SET_PDEATHSIG = 1
_SETTLE_S = 0.02


def rank() -> int:
    """Number of this process."""
    return int(os.environ[launch.RANK])


def count() -> int:
    """Number of processes."""
    return int(os.environ[launch.COUNT])


def start() -> None:
    """Joins `jax.distributed`, with one CPU device for this process."""
    # If the parent process is killed, no other process could end this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        os.environ[launch.COORDINATOR], count(), rank(), initialization_timeout=60
    )
    if jax.device_count() != count():
        raise RuntimeError(
            f"{count()} processes and {jax.device_count()} devices: the coordinator "
            f"is {os.environ[launch.COORDINATOR]}."
        )


def _tell(message: dict[str, Any]) -> None:
    print(launch.MARK + json.dumps(message), flush=True)


def report(value: Any) -> None:
    """Sends a JSON value to the parent process, which stores it."""
    _tell({"result": value})


def say(text: str) -> None:
    """Prints a line in the parent process; only process 0 may print."""
    if rank() == 0:
        _tell({"say": text})


def barrier() -> None:
    """Waits for all processes, by a collective of a few bytes."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("bed")


def set_rate(rate_mbit: float | None) -> None:
    """Changes the rate of all links; every process must call it."""
    _ask({"rate_mbit": rate_mbit})


def set_cores(cores: float | None) -> None:
    """Limits each process to a part of a core (None: no limit), as `set_rate` does."""
    _ask({"cores": cores})


def _ask(message: dict[str, Any]) -> None:
    barrier()
    if rank() == 0:
        _tell(message)
        sys.stdin.readline()
    barrier()


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and packets that an interface has sent.

    A packet is a unit of up to 64 KiB that the interface gets, and which a real card
    would cut into segments. Each packet has one header, so ``data_bytes`` is exact.
    ``wire_bytes`` is what a real link would carry.
    """

    sent_bytes: float
    packets: float

    def __sub__(self, other: Traffic) -> Traffic:
        """What was sent since."""
        return Traffic(self.sent_bytes - other.sent_bytes, self.packets - other.packets)

    def scaled(self, factor: float) -> Traffic:
        """The traffic multiplied by a factor."""
        return Traffic(self.sent_bytes * factor, self.packets * factor)

    @property
    def data_bytes(self) -> float:
        """Bytes without the headers of Ethernet, IP and TCP (`HEADER_BYTES` per
        packet).
        """
        return self.sent_bytes - self.packets * HEADER_BYTES

    @property
    def wire_bytes(self) -> float:
        """Bytes with the headers of full segments, as on a real link."""
        segments = max(self.packets, self.data_bytes / SEGMENT_BYTES)
        return self.data_bytes + segments * HEADER_BYTES


def traffic(interface: str = "eth0") -> Traffic:
    """The traffic that this namespace's interface has sent so far."""
    folder = _STATISTICS / interface / "statistics"
    sent, packets = (
        int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")
    )
    return Traffic(sent, packets)


@dataclasses.dataclass(frozen=True, slots=True)
class Background:
    """Traffic without any work: in a second, and of a pair of barriers."""

    per_s: Traffic
    barriers: Traffic


def background(idle_s: float = 1.0, rounds: int = 5) -> Background:
    """Measures heartbeats and barriers, which `measure` subtracts."""
    barrier()
    before = traffic()
    time.sleep(idle_s)
    per_s = (traffic() - before).scaled(1 / idle_s)
    found = [_between_barriers(lambda: None)[0] for _ in range(rounds)]
    return Background(
        per_s,
        Traffic(
            statistics.median(t.sent_bytes for t in found),
            statistics.median(t.packets for t in found),
        ),
    )


def _between_barriers(work: Callable[[], Any]) -> tuple[Traffic, float]:
    barrier()
    before, started_s = traffic(), time.perf_counter()
    work()
    elapsed_s = time.perf_counter() - started_s
    barrier()
    time.sleep(_SETTLE_S)  # the last acknowledgements
    return traffic() - before, elapsed_s


def measure(work: Callable[[], Any], idle: Background) -> tuple[Traffic, float]:
    """The traffic and the seconds of some work in this process.

    All processes do the work at the same time. The work must wait for its own end. The
    result of `background` is subtracted from the traffic.
    """
    sent, elapsed_s = _between_barriers(work)
    return sent - idle.barriers - idle.per_s.scaled(elapsed_s), elapsed_s
