"""Keeps a process alive whose coordination service dies.

XLA ends a process whose coordination service closes its connection. A callback given
in its place is not called: jaxlib 0.10.2 cannot make a Python object of the error, and
ends the process by ``std::bad_cast``. So XLA connects to a relay in its own process.
Where the service dies, the relay keeps XLA's side open, and no call is answered.

XLA also ends a process that cannot connect. So the relay answers in the place of a
service that died before; the world is then to be left.
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

# Ends the waits of collectives whose other side is gone or has left.
#
# A collective of gloo waits for ever for a process that does not come. Shutting down
# the connections between workers turns the wait into an error (Linux only).

_ESTABLISHED, _LISTENING = "01", "0A"
# gloo numbers the connections that it waits for; a world has few of them.
_NUMBERS = 64


def break_connections(
    pids: Iterable[int],
    hosts: Collection[str],
    but: Collection[int],
    older: Collection[int] = (),
) -> int:
    """Shuts down this process's TCP connections to other processes of a world.

    Args:
      pids: process ids of the other ends that are on this host.
      hosts: addresses of other hosts; what connects to them is the world's, as far as
        can be seen from here.
      but: ports whose connections stay.
      older: inodes of sockets to other hosts that stay, as they are from before.

    Returns:
      How many there were.
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
    """The addresses at which this process waits for connections."""
    own = inodes(os.getpid())
    found = {here for here, _, x in _rows(_LISTENING) if x in own}
    return frozenset(join_address(_host(x), _port(x)) for x in found)


def knock(addresses: Iterable[str]) -> None:
    """Connects in the place of processes that gloo waits for, and hangs up.

    A process that died would have connected, and gloo waits for it without a limit.

    Args:
      addresses: at which gloo listens.
    """
    for address in addresses:
        for number in range(_NUMBERS):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(split_address(address), 1.0) as end,
            ):
                end.sendall(number.to_bytes(8, "little"))


def _rows(state: str) -> list[tuple[str, str, int]]:
    """Own address, other address and inode of each connection in a state."""
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
    """The host of an address in ``/proc/net/tcp``: words of the processor's order."""
    digits = bytes.fromhex(address.rpartition(":")[0])
    words = [digits[k : k + 4] for k in range(0, len(digits), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def _shut_down(descriptor: int) -> int:
    """Shuts a socket down without closing the owner's descriptor; 1 if it was open."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            found.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0
    return 1


_CHUNK = 1 << 16
# Frames of HTTP/2 (RFC 9113, 4.1 and 6): the size of their head, two types, a flag.
_HEAD = 9
_DATA, _HEADERS, _END_STREAM = 0, 1, 1


class Relay:
    """Passes the bytes of this process's connections to a coordination service.

    Attributes:
      address: what XLA connects to.
      alone: whether it connects to nobody, as the service had died.
    """

    def __init__(
        self, address: str, network: Network, index: int, count: int, limit_s: float
    ) -> None:
        """Listens.

        Args:
          address: of the service.
          network: on which it is reached.
          index: number of this process in the world.
          count: number of processes of the world.
          limit_s: longest that this process may take to connect.
        """
        self._target, self._network = address, network
        self._index, self._count, self._limit_s = index, count, limit_s
        self._client: Any = None
        self._own: Any = None  # a service of this process, in the place of the other
        self.alone = False
        # XLA registers by its first call, and repeats it until it is answered.
        self._registered, self._connected = threading.Event(), threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._ends: list[End] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def on_client(self, client: Any) -> None:
        """The client has connected, and can be shut down, which a dead service does.

        A client that is shut down outlives its connection. That closes then, so that
        calls which wait for an answer raise an error.
        """
        self._client = client
        self._connected.set()

    def close(self) -> None:
        """Closes all connections: the client is shut down."""
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
                own.close()  # a user of this host, who has no secret
                continue
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._serve, own)

    def _serve(self, own: socket.socket) -> None:
        """Serves a connection until one side ends it."""
        if not self._keep(own):
            return
        service = self._reach()
        if not self._keep(service):
            return
        self._start(pass_on, own, service)
        answers = _Answers()
        with contextlib.suppress(OSError):
            while data := service.recv(_CHUNK):
                own.sendall(data)
                if answers.whole(data):
                    self._registered.set()
        if self._registered.is_set() and not self._closed:
            self._connected.wait()
            shut_down(self._client)
            self.close()
        hang_up(own)

    def _reach(self) -> End:
        """A connection to the service, or to one of this process where it is dead."""
        if not self.alone:
            with contextlib.suppress(OSError):
                return self._network.connect(self._target, self._limit_s)
            self._stand_in()
        return Network().connect(self._target, self._limit_s)

    def _stand_in(self) -> None:
        """Starts a service at which all are there as soon as this process is."""
        self.alone = True
        address, self._own = jax_processes.open_service(self._count)
        self._target = address
        for index in set(range(self._count)) - {self._index}:
            self._start(jax_processes.fill_place, address, index, int(self._limit_s))

    def _keep(self, end: End) -> bool:
        """Keeps a socket to close it; False: the relay is closed already."""
        with self._lock:
            if not self._closed:
                self._ends.append(end)
                return True
        end.close()
        return False


def _is_own(end: socket.socket) -> bool:
    """Whether the other side of a connection on loopback is this process, too."""
    here, there = end.getsockname()[1], end.getpeername()[1]
    mine = inodes(os.getpid())
    return any(
        (_port(own), _port(other)) == (there, here) and inode in mine
        for own, other, inode in _rows(_ESTABLISHED)
    )


class _Answers:
    """Looks for the end of a call's answer in what a gRPC server sends.

    An answer is a message, in frames of data, and headers that end its stream; an
    error has no message.
    """

    def __init__(self) -> None:
        self._rest, self._skip, self._data = b"", 0, False

    def whole(self, sent: bytes) -> bool:
        """Takes bytes; returns whether an answer ended in them."""
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
    """Shuts a client of a coordination service down; None: there is none."""
    if client is not None:
        with contextlib.suppress(Exception):
            client.shutdown()
