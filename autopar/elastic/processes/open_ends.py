"""Keeps a connection to a coordination service open after the service has died.

XLA ends a process whose coordination service closes its connection. A callback given
in its place is not called: jaxlib 0.10.2 cannot make a Python object of the error, and
ends the process by ``std::bad_cast``. A connection ends once nobody has its other end.
So each worker has a descriptor of the service's end, too: where the service dies,
calls are not answered, and nothing ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from autopar.elastic.processes import identity
from autopar.elastic.processes.sockets import established, inodes

_POLL_S, _WATCH_S = 0.002, 0.2
_ASK_S = 5.0
# Connections of a worker to one service; XLA has one.
_MOST = 8


def _name(port: int) -> str:
    """The address, in Linux's abstract namespace, where ends are handed out."""
    return f"\0autopar-coordination-{port}"


class OpenEnds:
    """The service's ends of a worker's connections, as long as they are needed."""

    def __init__(self, port: int, limit_s: float, died: Callable[[], None]) -> None:
        """Takes them as soon as the worker connects.

        Args:
          port: of the service.
          limit_s: longest that the worker takes to connect.
          died: is called from a thread once the service has died. It shuts down the
            client, which then is not ended with its connection: that closes, so that
            calls which wait for an answer raise an error.
        """
        self._port, self._end_s = port, time.monotonic() + limit_s
        self._died, self._taken = died, threading.Event()
        self._descriptors: list[int] = []
        self._service = -1
        self._thread = threading.Thread(target=self._hold, daemon=True, name="ends")
        self._thread.start()

    def wait(self) -> None:
        """Waits until they are there; the worker has connected."""
        self._taken.wait(_ASK_S)

    def close(self) -> None:
        """Closes them: the worker has no connection any more."""
        self._end_s = 0.0
        self._thread.join()

    def _hold(self) -> None:
        self._take()
        self._taken.set()
        while self._descriptors and self._end_s:
            if identity.ended(self._service, wait_s=_WATCH_S):
                self._died()
                break
        for descriptor in [*self._descriptors, self._service]:
            if descriptor >= 0:
                os.close(descriptor)

    def _take(self) -> None:
        while not self._descriptors and time.monotonic() < self._end_s:
            own = inodes(os.getpid())
            ports = [h for h, t, x in established() if x in own and t == self._port]
            if ports:
                with contextlib.suppress(OSError):
                    self._descriptors = self._asked(ports)
            time.sleep(_POLL_S)

    def _asked(self, ports: list[int]) -> list[int]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(_ASK_S)
            end.connect(_name(self._port))
            if self._service < 0:
                self._service = os.pidfd_open(_peer(end)[0])
            end.send(json.dumps(ports).encode())
            return list(socket.recv_fds(end, 1, _MOST)[1])


def hand_out(port: int) -> socket.socket:
    """Gives workers the ends of their connections to a service of this process.

    Args:
      port: of the service.

    Returns:
      What to close once nobody connects to the service any more.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(_name(port))
    server.listen(64)

    def serve() -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            with end, contextlib.suppress(OSError, ValueError, TypeError):
                end.settimeout(_ASK_S)
                if _peer(end)[1] == os.getuid():
                    found = _ends(port, {int(k) for k in json.loads(end.recv(1024))})
                    socket.send_fds(end, [b"1"], found[:_MOST])

    threading.Thread(target=serve, daemon=True, name="ends").start()
    return server


def _peer(end: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    size = struct.calcsize("3i")
    given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return struct.unpack("3i", given)[:2]


def _ends(port: int, others: set[int]) -> list[int]:
    """This process's descriptors of connections from other ports to one of its own."""
    own = inodes(os.getpid())
    rows = [(h, t, x) for h, t, x in established() if h == port and t in others]
    return [own[x] for _, _, x in rows if x in own]
