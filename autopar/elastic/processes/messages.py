"""Messages between the supervisor and its workers: a JSON object a line, over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
from typing import Any

Message = dict[str, Any]

# The exit status of a worker, and of a run, that has saved its state to go on later.
SUSPENDED = 75  # EX_TEMPFAIL of <sysexits.h>

# Longest line: what a worker holds is listed by array, not sent.
_LONGEST_BYTES = 64 << 20


class Connection:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        """Takes a connected socket."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = end
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()

    @property
    def ports(self) -> frozenset[int]:
        """The ports of both ends; none once it is closed."""
        try:
            own, other = self._socket.getsockname(), self._socket.getpeername()
        except OSError:
            return frozenset()
        return frozenset((own[1], other[1]))

    def send(self, kind: str, **data: Any) -> bool:
        """Sends a message; returns whether the other end was still there."""
        line = json.dumps({"kind": kind, **data}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            return False
        return True

    def patience(self, seconds: float) -> None:
        """Waits no longer for a message than so many seconds."""
        self._socket.settimeout(seconds)

    def receive(self) -> Message | None:
        """The next message; None at the end, or after what is no message."""
        try:
            line = self._lines.readline(_LONGEST_BYTES)
            found = json.loads(line) if line else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and "kind" in found else None

    def close(self) -> None:
        """Closes it; the other end is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


def connect(host: str, port: int, timeout_s: float) -> Connection:
    """Connects to a supervisor.

    Raises:
      OSError: nobody listens there.
    """
    end = socket.create_connection((host, port), timeout=timeout_s)
    end.settimeout(None)
    return Connection(end)


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on loopback.

    Raises:
      OSError: the port is taken.
    """
    return socket.create_server(("127.0.0.1", port), backlog=64)


def knows(message: Message | None, token: str) -> bool:
    """Whether a first message has the token."""
    given = "" if message is None else str(message.get("token", ""))
    return hmac.compare_digest(given.encode(), token.encode())
