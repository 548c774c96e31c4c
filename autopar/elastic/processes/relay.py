"""Keeps a process alive when its coordination service dies.

XLA ends a process when JAX's coordination service closes the connection. A Python
callback for this case does not help: jaxlib 0.10.2 cannot convert the error to a Python
object, and ends the process with ``std::bad_cast``. So XLA connects to a *relay* in its
own process, which forwards bytes to and from the service. When the service dies, the
relay keeps XLA's connection open, and answers no call.

XLA also ends a process that cannot connect at all. So if the service dies before XLA
has connected, the relay answers instead of the service. The process must then leave its
world (the set of processes that train together).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

from autopar.elastic.processes.network import (
    End,
    Network,
    hang_up,
    inodes,
    join_address,
    pass_on,
    split_address,
)
from autopar_passes import jax_processes

# The functions below end waits of collectives for a process that is gone.
#
# In gloo, JAX's communication library on CPUs, a collective waits for a missing process
# without a time limit. Shutting down the connections between workers turns the wait
# into an error (Linux only).

_ESTABLISHED, _LISTENING = "01", "0A"
# gloo numbers the connections that it waits for. `knock` does not know which numbers
# are missing, so it tries all numbers below this one.
_NUMBERS = 64


def break_connections(
    pids: Iterable[int],
    hosts: Collection[str],
    but: Collection[int],
    older: Collection[int] = (),
) -> int:
    """Shuts down this process's TCP connections to the other processes of a world.

    Args:
      pids: process ids of the other processes on this host.
      hosts: addresses of other hosts. All connections to these hosts count as
        connections to the world.
      but: connections that use one of these ports stay open.
      older: inodes of sockets to other hosts that existed before the world; they stay
        open.

    Returns:
      The number of connections that were shut down.
    """
    rows = _rows(_ESTABLISHED)
    inode_at = {(here, there): inode for here, there, inode in rows}
    theirs = {inode for pid in pids for inode in inodes(pid)}
    own = inodes(os.getpid())
    count = 0
    for here, there, inode in rows:
        far = _host(there) in hosts and inode not in older
        if inode not in own or not (far or inode_at.get((there, here)) in theirs):
            continue
        if not {_port(here), _port(there)} & set(but):
            count += _shut_down(own[inode])
    return count


def listening() -> frozenset[str]:
    """The addresses (host and port) on which this process listens."""
    own = inodes(os.getpid())
    found = {here for here, _, x in _rows(_LISTENING) if x in own}
    return frozenset(join_address(_host(x), _port(x)) for x in found)


def knock(addresses: Iterable[str]) -> None:
    """Connects to gloo in place of missing processes, and disconnects at once.

    Without this, gloo would wait without limit for the connection of a dead process.

    Args:
      addresses: addresses at which gloo listens.
    """
    for address in addresses:
        for number in range(_NUMBERS):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(split_address(address), 1.0) as end,
            ):
                end.sendall(number.to_bytes(8, "little"))


def _rows(state: str) -> list[tuple[str, str, int]]:
    """Local address, remote address and inode of each TCP socket in a given state."""
    found: list[tuple[str, str, int]] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as lines:
            next(lines, None)
            fields = [line.split() for line in lines]
            found += [(f[1], f[2], int(f[9])) for f in fields if f[3] == state]
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _host(address: str) -> str:
    """The host of an address in ``/proc/net/tcp``, in words of native byte order."""
    digits = bytes.fromhex(address.rpartition(":")[0])
    words = [digits[k : k + 4] for k in range(0, len(digits), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def _shut_down(descriptor: int) -> int:
    """Shuts a socket down but does not close it; returns 1 if it was open, else 0."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            found.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0
    return 1


_CHUNK = 1 << 16
# Constants of HTTP/2 frames (RFC 9113, sections 4.1 and 6): bytes of a frame's header,
# two frame types, and a flag.
_HEAD = 9
_DATA, _HEADERS, _END_STREAM = 0, 1, 1


class Relay:
    """Passes bytes between this process and a coordination service.

    Attributes:
      address: address that XLA connects to.
      alone: whether the service died before XLA connected, so that the relay answers
        instead of it.
    """

    def __init__(
        self, address: str, network: Network, index: int, count: int, limit_s: float
    ) -> None:
        """Starts to listen.

        Args:
          address: address of the service.
          network: network on which the service is reached.
          index: rank of this process in the world.
          count: number of processes of the world.
          limit_s: seconds within which this process must connect.
        """
        self._target, self._network = address, network
        self._index, self._count, self._limit_s = index, count, limit_s
        self._client: Any = None
        self._own: Any = None  # a service in this process that replaces a dead one
        self.alone = False
        # XLA's first call to the service registers the process. XLA repeats the call
        # until it gets an answer.
        self._registered, self._connected = threading.Event(), threading.Event()
        self._closed = self._lost = False
        self._lock = threading.Lock()
        self._ends: list[End] = []
        self._services: list[End] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def on_client(self, client: Any) -> None:
        """Stores XLA's connected client, to shut it down if the service dies.

        XLA does not end the process if a client loses its connection after it was shut
        down. So the relay first shuts the client down and then closes the connection.
        Calls that wait for an answer then raise an error.
        """
        self._client = client
        self._connected.set()

    def lose(self) -> None:
        """Treats the service as dead.

        If the host of the service is lost, its connections stay silent for a long time
        before the kernel ends them. This call may take some seconds.
        """
        self._lost = True
        if self._registered.is_set():
            self._end_client()
            return
        with self._lock:
            services = list(self._services)
        for service in services:
            hang_up(service)

    def _end_client(self) -> None:
        """Shuts XLA's client down, and then closes its connection."""
        self._connected.wait()
        shut_down(self._client)
        self.close()

    def close(self) -> None:
        """Closes all connections; the client must have been shut down before."""
        with self._lock:
            self._closed = True
            ends, self._ends = [self._listener, *self._ends], []
            own, self._own = self._own, None
        self._connected.set()
        for end in ends:
            hang_up(end)
            end.close()
        if own is not None:
            own.shutdown()

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True, name="relay").start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                own, _ = self._listener.accept()
            except OSError:
                return
            if not _is_own(own):
                own.close()  # another user's process, which lacks the secret
                continue
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._serve, own)

    def _serve(self, own: socket.socket) -> None:
        """Passes bytes of a connection on until one side ends it."""
        if not self._keep(own):
            return
        service = self._reach()
        if not self._keep(service):
            return
        with self._lock:
            self._services.append(service)
        self._start(pass_on, own, service)
        answers = _Answers()
        with contextlib.suppress(OSError):
            while data := service.recv(_CHUNK):
                own.sendall(data)
                if answers.whole(data):
                    self._registered.set()
        if self._registered.is_set() and not self._closed:
            self._end_client()
        hang_up(own)

    def _reach(self) -> End:
        """Connects to the service, or to its replacement if the service is dead."""
        if not self.alone:
            if not self._lost:
                with contextlib.suppress(OSError):
                    return self._network.connect(self._target, self._limit_s)
            self._stand_in()
        return Network().connect(self._target, self._limit_s)

    def _stand_in(self) -> None:
        """Starts a replacement service, and registers all other processes with it."""
        self.alone = True
        address, self._own = jax_processes.open_service(self._count)
        self._target = address
        for index in set(range(self._count)) - {self._index}:
            self._start(jax_processes.fill_place, address, index, int(self._limit_s))

    def _keep(self, end: End) -> bool:
        """Records a socket, so that `close` closes it; False if `close` was called."""
        with self._lock:
            if not self._closed:
                self._ends.append(end)
                return True
        end.close()
        return False


def _is_own(end: socket.socket) -> bool:
    """Whether this process itself opened a loopback connection."""
    here, there = end.getsockname()[1], end.getpeername()[1]
    mine = inodes(os.getpid())
    return any(
        (_port(own), _port(other)) == (there, here) and inode in mine
        for own, other, inode in _rows(_ESTABLISHED)
    )


class _Answers:
    """Finds the ends of answers in the bytes that a gRPC server sends.

    An answer consists of data frames with a message, followed by headers with a flag
    that ends the stream. An error consists of headers only.
    """

    def __init__(self) -> None:
        self._rest, self._skip, self._data = b"", 0, False

    def whole(self, sent: bytes) -> bool:
        """Processes received bytes; returns whether an answer ended in these bytes."""
        found = False
        data = self._rest + sent
        while True:
            skipped = min(self._skip, len(data))
            data, self._skip = data[skipped:], self._skip - skipped
            if len(data) < _HEAD:
                self._rest = data
                return found
            self._skip = _HEAD + int.from_bytes(data[:3], "big")
            kind, flags = data[3], data[4]
            if kind == _DATA:
                self._data = True
            elif kind == _HEADERS and flags & _END_STREAM:
                found, self._data = found or self._data, False


def shut_down(client: Any) -> None:
    """Shuts down a client of a coordination service; ignores None."""
    if client is not None:
        with contextlib.suppress(Exception):
            client.shutdown()
