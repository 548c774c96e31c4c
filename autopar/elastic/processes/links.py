"""Links between hosts, watched while a run trains over them.

The kernel counts for each TCP connection the bytes that the other end has
acknowledged, and how long some were on their way (``tcpi_bytes_acked`` and
``tcpi_busy_time`` of ``struct tcp_info``, linux/tcp.h). The quotient is the rate that
the step's own exchanges got, so nothing is sent to measure it. Time in which the
receiver had no room (``tcpi_rwnd_limited``) is none of the link's.

Bytes that other transports send, such as InfiniBand, are not seen: no link changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import statistics
import struct
from collections.abc import Mapping

from autopar.elastic.processes.network import inodes

# How often a worker tells what its connections have sent.
TELL_S = 1.0
# A window of the rate of a worker, and how many in a row must differ.
_WINDOW_S, _WINDOWS = 5.0, 6
# So many windows at the start of a world say what its exchanges get as planned.
_FIRST = 3
# A world's first seconds compile, and fetch the state.
_SETTLE_S = 3.0
# By so much a rate must differ from that.
_FACTOR = 1.5
# With fewer bytes a window says nothing: they travel within one round trip.
_LEAST_BYTES = 1 << 18

# ``struct tcp_info`` of Linux 4.10 and later: bytes_acked at 120, busy_time and
# rwnd_limited, in microseconds, at 168 and 176.
_ACKED, _BUSY = struct.Struct("=120xQ"), struct.Struct("=168xQQ")


@dataclasses.dataclass(frozen=True, slots=True)
class SentBytes:
    """What connections have sent.

    Attributes:
      nbytes: acknowledged by the other ends.
      busy_s: seconds in which some were on their way, over all connections.
    """

    nbytes: int
    busy_s: float

    def __add__(self, other: SentBytes) -> SentBytes:
        """Both together."""
        return SentBytes(self.nbytes + other.nbytes, self.busy_s + other.busy_s)

    def __sub__(self, other: SentBytes) -> SentBytes:
        """What was sent after the other."""
        return SentBytes(self.nbytes - other.nbytes, self.busy_s - other.busy_s)

    @property
    def rate(self) -> float | None:
        """Bytes per second; None: too few to say."""
        known = self.nbytes >= _LEAST_BYTES and self.busy_s > 0
        return self.nbytes / self.busy_s if known else None


_NONE = SentBytes(0, 0.0)


class Traffic:
    """Reads what this process has sent to other hosts."""

    def __init__(self, host: str) -> None:
        """Has read nothing yet.

        Args:
          host: address of this host; what stays on it is left out.
        """
        self._host = host
        self._before: Mapping[int, SentBytes] = {}

    def take(self) -> SentBytes:
        """What was sent since it was asked last."""
        now = {
            k: x
            for k, fd in inodes(os.getpid()).items()
            if (x := self._read_socket(fd))
        }
        fresh = [x - self._before.get(k, _NONE) for k, x in now.items()]
        self._before = now
        return sum(fresh, _NONE)

    def _read_socket(self, descriptor: int) -> SentBytes | None:
        """What a connection to another host has sent; None: it is none."""
        with contextlib.suppress(OSError, struct.error):
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    return None
                if found.type != socket.SOCK_STREAM:
                    return None
                if self._is_local(found.getpeername()[0]):
                    return None
                data = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (acked,), (busy, full) = _ACKED.unpack_from(data), _BUSY.unpack_from(data)
            return SentBytes(acked, max(0, busy - full) / 1e6)
        return None

    def _is_local(self, peer: str) -> bool:
        peer = peer.removeprefix("::ffff:")
        return peer == self._host or peer.startswith("127.") or peer == "::1"


class LinkWatch:
    """Compares the rates that a world gets with those that it began with."""

    def __init__(self) -> None:
        """No world has formed."""
        self._began_s = 0.0
        self._current: dict[int, SentBytes] = {}
        self._window = -1
        self._rates: dict[int, list[float | None]] = {}
        self._told = True

    def begin(self, now: float) -> None:
        """A world has formed; what it gets first is what was planned for.

        Args:
          now: seconds on a clock that goes on (`time.monotonic`), here and below.
        """
        self._began_s, self._told = now + _SETTLE_S, False
        self._current, self._rates, self._window = {}, {}, -1

    def take(self, now: float, worker: int, sent: SentBytes) -> float | None:
        """Takes what a worker has sent since it told last.

        Returns:
          By what factor the slowest link has become faster, where this has been so for
          half a minute; each change is told once.
        """
        window = int((now - self._began_s) // _WINDOW_S)
        if self._told or now < self._began_s:
            return None
        if window > self._window:
            self._end_window()
            self._window = window
        self._current[worker] = self._current.get(worker, _NONE) + sent
        factor = self._find_factor()
        self._told = factor is not None
        return factor

    def _end_window(self) -> None:
        for worker, sent in self._current.items():
            self._rates.setdefault(worker, []).append(sent.rate)
        self._current = {}

    def _find_factor(self) -> float | None:
        """The factor of the slowest link, where it has changed for long enough."""
        found = [x for x in map(_factors, self._rates.values()) if x]
        slower = [max(x) <= 1 / _FACTOR for x in found]
        faster = [min(x) >= _FACTOR for x in found]
        if not found or not (any(slower) or all(faster)):
            return None
        return min(statistics.median(x) for x in found)


def _factors(rates: list[float | None]) -> list[float]:
    """The last rates of a worker over its first ones; none: nothing is known."""
    first = [x for x in rates[:_FIRST] if x is not None]
    last = [x for x in rates[_FIRST:][-_WINDOWS:] if x is not None]
    if not first or len(last) < _WINDOWS - 1:
        return []
    return [x / statistics.median(first) for x in last]
