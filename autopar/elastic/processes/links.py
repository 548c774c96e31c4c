"""Measures the links between hosts while a run trains over them.

For each TCP connection, the Linux kernel counts the bytes that the other end has
acknowledged (``tcpi_bytes_acked`` of ``struct tcp_info``, linux/tcp.h), and the time
during which sent bytes were not yet acknowledged (``tcpi_busy_time``). From this time,
the module subtracts the time during which the receiver's TCP window was full
(``tcpi_rwnd_limited``). The bytes divided by the difference are the rate, in bytes per
second, at which the messages of training steps travel. So no extra messages are needed
for a measurement.

The kernel does not count bytes of other transports, such as InfiniBand. On such links,
this module finds no change.
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

# Seconds between two reports of a worker about the bytes that it has sent.
TELL_S = 1.0
# A worker's rate is measured over intervals of `_WINDOW_S` seconds, called windows. A
# link has changed if the rates in its last `_WINDOWS` windows all differ from the first
# rate.
_WINDOW_S, _WINDOWS = 5.0, 6
# After this many windows with a changed rate, a change is expected to last (`expect`).
EXPECTED = 2
# The rate in the first `_FIRST` windows of a world counts as the rate that the plan
# assumes.
_FIRST = 3
# The first seconds of a world are ignored, because its processes compile and fetch the
# state.
_SETTLE_S = 3.0
# A rate counts as changed if it is larger or smaller than the first rate by at least
# this factor.
_FACTOR = 1.5
# A worker that sends fewer bytes than this within a window gives no rate: their time is
# mostly the latency of round trips, not a matter of bandwidth.
_LEAST_BYTES = 1 << 18

# Byte offsets of fields in ``struct tcp_info`` of Linux 4.10 and later: bytes_acked at
# 120; busy_time and rwnd_limited, in microseconds, at 168 and 176.
_ACKED, _BUSY = struct.Struct("=120xQ"), struct.Struct("=168xQQ")


@dataclasses.dataclass(frozen=True, slots=True)
class SentBytes:
    """The bytes that connections have sent.

    Attributes:
      nbytes: bytes that the other ends have acknowledged.
      busy_s: seconds during which sent bytes were not yet acknowledged, summed over all
        connections.
    """

    nbytes: int
    busy_s: float

    def __add__(self, other: SentBytes) -> SentBytes:
        """Adds bytes and seconds of two records."""
        return SentBytes(self.nbytes + other.nbytes, self.busy_s + other.busy_s)

    def __sub__(self, other: SentBytes) -> SentBytes:
        """The bytes and seconds that were added since the other, earlier record."""
        return SentBytes(self.nbytes - other.nbytes, self.busy_s - other.busy_s)

    @property
    def rate(self) -> float | None:
        """Bytes per second; None if the bytes are too few to measure a rate."""
        known = self.nbytes >= _LEAST_BYTES and self.busy_s > 0
        return self.nbytes / self.busy_s if known else None


_NONE = SentBytes(0, 0.0)


class Traffic:
    """Reads the bytes that this process has sent to other hosts."""

    def __init__(self, host: str) -> None:
        """Starts without a reading.

        Args:
          host: address of this host; connections within the host do not count.
        """
        self._host = host
        self._before: Mapping[int, SentBytes] = {}

    def take(self) -> SentBytes:
        """The bytes sent since the last call."""
        now = {
            k: x
            for k, fd in inodes(os.getpid()).items()
            if (x := self._read_socket(fd))
        }
        fresh = [x - self._before.get(k, _NONE) for k, x in now.items()]
        self._before = now
        return sum(fresh, _NONE)

    def _read_socket(self, descriptor: int) -> SentBytes | None:
        """The bytes sent on a socket; None if it does not lead to another host."""
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
    """Compares the present rates of a world's links with their first rates."""

    def __init__(self) -> None:
        """No world has formed yet."""
        self._began_s = 0.0
        self._current: dict[int, SentBytes] = {}
        self._window = -1
        self._rates: dict[int, list[float | None]] = {}
        self._told = self._expected = True

    def begin(self, now: float) -> None:
        """Begins a new world, whose first rates count as those that its plan assumes.

        Args:
          now: time in seconds on a monotonic clock (`time.monotonic`).
        """
        self._began_s = now + _SETTLE_S
        self._told = self._expected = False
        self._current, self._rates, self._window = {}, {}, -1

    def take(self, now: float, worker: int, sent: SentBytes) -> float | None:
        """Takes the bytes that a worker has sent since its last report.

        Returns:
          The factor by which the rate of the slowest link has changed, if it has stayed
          changed for half a minute; otherwise None. Each change is returned only once.
        """
        window = int((now - self._began_s) // _WINDOW_S)
        if self._told or now < self._began_s:
            return None
        if window > self._window:
            self._end_window()
            self._window = window
        self._current[worker] = self._current.get(worker, _NONE) + sent
        factor = self._find_factor(_WINDOWS)
        self._told = factor is not None
        return factor

    def expect(self) -> float | None:
        """The factor of a change that may last, before `take` returns it; only once."""
        factor = None if self._expected else self._find_factor(EXPECTED)
        self._expected = self._expected or factor is not None
        return factor

    def _end_window(self) -> None:
        for worker, sent in self._current.items():
            self._rates.setdefault(worker, []).append(sent.rate)
        self._current = {}

    def _find_factor(self, windows: int) -> float | None:
        """The factor by which the slowest link's rate has changed for some windows."""
        rates = self._rates.values()
        found = [x for x in (_factors(mine, windows) for mine in rates) if x]
        slower = [max(x) <= 1 / _FACTOR for x in found]
        faster = [min(x) >= _FACTOR for x in found]
        if not found or not (any(slower) or all(faster)):
            return None
        # Shortly after a change, an earlier window may lie before and after it.
        lasts = windows == _WINDOWS
        return min(statistics.median(x) if lasts else x[-1] for x in found)


def _factors(rates: list[float | None], windows: int) -> list[float]:
    """A worker's rates in the last windows, divided by its first rate.

    Empty if there are too few windows.
    """
    first = [x for x in rates[:_FIRST] if x is not None]
    last = [x for x in rates[_FIRST:][-windows:] if x is not None]
    if not first or len(last) < windows - windows // _WINDOWS:
        return []
    return [x / statistics.median(first) for x in last]
