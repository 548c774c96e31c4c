"""Events over HTTP, from who knows the token.

    curl -H "Authorization: Bearer $TOKEN" -d '{"kind": "gone", "hosts": ["host1"]}' \\
        http://127.0.0.1:8765/events

The answer says what comes of each event: 200 accepted, repeated or late, 409 refused.
It listens on this machine only, unless a host is named.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import os
import secrets
import socket
import threading
import time
from http import HTTPStatus
from typing import Any

from autopar.elastic.resolve import Resolved
from autopar.elastic.sources.messages import LARGEST_BYTES, read_events
from autopar.elastic.sources.source import Sink
from autopar.errors import EventError, PlanError

# Where a token is read from, and the shortest that is taken.
TOKEN_VARIABLE, _SHORTEST = "AUTOPAR_EVENTS_TOKEN", 16
# Requests a second over a longer time, at once, and at the same time.
_RATE, _BURST, _CONNECTIONS = 10.0, 40, 8
# Seconds in which a client must have sent its request; and, after its answer, the rest.
_PATIENCE_S = 5.0


class Http:
    """Listens for events.

    Attributes:
      token: what senders must know.
      url: where to send events to; known once it has started.
    """

    def __init__(
        self, port: int = 0, host: str = "127.0.0.1", token: str | None = None
    ) -> None:
        """Listens to nothing yet.

        Args:
          port: 0: any that is free.
          host: the address to listen on; the default is reached from this machine
            only.
          token: None: that of the environment variable `TOKEN_VARIABLE`, or else a
            random one.

        Raises:
          PlanError: the token is short.
        """
        found = token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        if len(found) < _SHORTEST or not found.isascii():
            raise PlanError(
                f"events: the token of http must have {_SHORTEST} ASCII letters or "
                f"more; set {TOKEN_VARIABLE}, or leave it out for a random one."
            )
        self.token = found
        self.url = ""
        self._address = (host, port)
        self._server: _Server | None = None

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        try:
            server = _Server(self._address, sink, self.token)
        except (OSError, OverflowError) as error:
            host, port = self._address
            raise PlanError(
                f"events: cannot listen on {host}:{port}: {error}. Give http:0 for any "
                "free port."
            ) from error
        self._server = server
        host, port = server.server_address[:2]
        self.url = f"http://{host!s}:{port}/events"
        threading.Thread(
            target=server.serve_forever, args=(0.05,), name="autopar-http", daemon=True
        ).start()

    def stop(self) -> None:
        """See `Source`."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Allowance:
    """How many requests may still be answered: so many a second, some at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left, self._at = float(_BURST), time.monotonic()
        self._told = False

    def take(self) -> tuple[bool, bool]:
        """Whether a request may be answered, and whether a refusal is the first."""
        with self._lock:
            now = time.monotonic()
            self._left = min(_BURST, self._left + (now - self._at) * _RATE)
            self._at = now
            if self._left >= 1:
                self._left -= 1
                self._told = False
                return True, False
            first, self._told = not self._told, True
            return False, first


class _Server(http.server.ThreadingHTTPServer):
    """A server that keeps to a number of connections."""

    daemon_threads = True
    request_queue_size = 64  # with fewer, clients that come together wait for seconds
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], sink: Sink, token: str) -> None:
        super().__init__(address, _Handler)
        self.sink, self.token = sink, token.encode()
        self.allowance = _Allowance()
        self._connections = threading.Semaphore(_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error of the run."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _PATIENCE_S
    server_version, sys_version = "autopar", ""

    def do_POST(self) -> None:
        """Takes the events of a message."""
        data = self._allowed()
        if data is None:
            return
        source = f"http:{self.client_address[0]}"
        try:
            events = read_events(data, source)
        except EventError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        found = [self.server.sink.put(event) for event in events]
        refused = any(x.status == "refused" for x in found)
        status = HTTPStatus.CONFLICT if refused else HTTPStatus.OK
        self._answer(status, {"events": [_answer(x) for x in found]})

    def do_GET(self) -> None:
        """There is nothing to read."""
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "send events by POST.")

    do_PUT = do_DELETE = do_HEAD = do_PATCH = do_GET

    def _allowed(self) -> bytes | None:
        """The message of a request; None: it was refused."""
        may, first = self.server.allowance.take()
        if not may:
            text = f"more than {_RATE:g} requests a second."
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, text, note=first)
            return None
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self.server.token):
            text = "the header 'Authorization: Bearer TOKEN' lacks the token."
            self._refuse(HTTPStatus.UNAUTHORIZED, text)
            return None
        if self.path.rstrip("/") != "/events":
            self._refuse(HTTPStatus.NOT_FOUND, "send events to /events.")
            return None
        return self._body()

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            text = "a request needs its Content-Length."
            self._refuse(HTTPStatus.LENGTH_REQUIRED, text)
            return None
        if len(length) > 12 or int(length) > LARGEST_BYTES:
            text = f"a message has at most {LARGEST_BYTES} bytes."
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return None
        try:
            data = self.rfile.read(int(length))
        except (TimeoutError, OSError):
            data = b""
        if len(data) < int(length):
            self._refuse(HTTPStatus.BAD_REQUEST, "the message ends too soon.")
            return None
        return data

    def _refuse(self, status: HTTPStatus, reason: str, *, note: bool = True) -> None:
        if note:
            source = f"http:{self.client_address[0]}"
            self.server.sink.wrong(source, f"{status.value}: {reason}")
        self._answer(status, {"error": reason})

    def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def finish(self) -> None:
        """Throws away what the client still sends, or it could not read its answer.

        A socket that is closed on bytes that nobody has read resets the connection.
        """
        super().finish()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            end, left = time.monotonic() + _PATIENCE_S, LARGEST_BYTES
            while left > 0 and (rest_s := end - time.monotonic()) > 0:
                self.connection.settimeout(rest_s)
                found = self.connection.recv(1 << 16)
                left = left - len(found) if found else 0

    def log_message(self, format: str, *args: Any) -> None:
        """The ledger has what is worth noting."""


def _answer(found: Resolved) -> dict[str, Any]:
    return {
        "event": str(found.event),
        "status": found.status,
        "reason": found.reason,
        "cluster": None if found.cluster is None else str(found.cluster),
    }
