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

from autopar.elastic.processes.sockets import established, inodes

_POLL_S = 0.002
_ASK_S = 5.0
# Connections of a worker to one service; XLA has one.
_MOST = 8


def _name(port: int) -> str:
    """The address, in Linux's abstract namespace, where ends are handed out."""
    return f"\0autopar-coordination-{port}"


class OpenEnds:
    """The service's ends of a worker's connections, as long as they are needed."""

    def __init__(self, port: int, limit_s: float) -> None:
        """Takes them as soon as the worker connects.

        Args:
          port: of the service.
          limit_s: longest that the worker takes to connect.
        """
        self._port, self._end_s = port, time.monotonic() + limit_s
        self._descriptors: list[int] = []
        self._thread = threading.Thread(target=self._take, daemon=True, name="ends")
        self._thread.start()

    def wait(self) -> bool:
        """Waits until they are there; the worker has connected."""
        self._end_s = min(self._end_s, time.monotonic() + _ASK_S)
        self._thread.join()
        return bool(self._descriptors)

    def close(self) -> None:
        """Closes them: the worker has no connection any more."""
        self._end_s = 0.0
        self._thread.join()
        while self._descriptors:
            os.close(self._descriptors.pop())

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
                if _owner(end) == os.getuid():
                    found = _ends(port, {int(k) for k in json.loads(end.recv(1024))})
                    socket.send_fds(end, [b"1"], found[:_MOST])

    threading.Thread(target=serve, daemon=True, name="ends").start()
    return server


def _owner(end: socket.socket) -> int:
    """The user at the other end."""
    size = struct.calcsize("3i")
    given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return struct.unpack("3i", given)[1]


def _ends(port: int, others: set[int]) -> list[int]:
    """This process's descriptors of connections from other ports to one of its own."""
    own = inodes(os.getpid())
    rows = [(h, t, x) for h, t, x in established() if h == port and t in others]
    return [own[x] for _, _, x in rows if x in own]
