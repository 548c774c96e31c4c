"""Takes events over HTTP, from senders that know a secret token.

    curl -H "Authorization: Bearer $TOKEN" -d '{"kind": "gone", "hosts": ["host1"]}' \
        http://127.0.0.1:8765/events

The answer gives the outcome of each event. Its HTTP status is 200 if all events are
accepted, repeated or late, and 409 if an event is refused. The server listens only on
the loopback address, unless the user names another host.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import hmac
import json
import logging
import os
import secrets
import socket
import ssl
import time
from http import HTTPStatus
from typing import Any

from tornado import http1connection, httpserver, iostream, web

from autopar.elastic.events import Resolved
from autopar.elastic.sources.source import LARGEST_BYTES, Sink, Watched, read_events
from autopar.errors import EventError, PlanError

# The HTTP server: Tornado in a thread of its own.
#
# One thread serves all connections asynchronously, so a slow connection delays no
# other. A client that is too slow in sending its request or reading the answer is
# disconnected. If there are too many connections, the oldest is closed. The server
# checks the token first. Requests without the token do not count for the rate limit.

# The rate limit of requests with the token: `_RATE` per second on average, and `_BURST`
# at once.
_RATE, _BURST = 10.0, 40
# Longest duration of a connection in seconds, from the TLS handshake to the answer; and
# the largest number of connections.
_PATIENCE_S, _CONNECTIONS = 5.0, 256
_LONGEST_HEAD = 16 << 10
# Seconds between two records about requests without the token.
_NOTE_S = 10.0


class _Allowance:
    """A rate limit: a number of requests per second, and a number at once."""

    def __init__(self) -> None:
        self._left, self._at = float(_BURST), time.monotonic()
        self._told = False

    def take(self) -> tuple[bool, bool]:
        """Whether to accept a request, and whether it is the first refused one."""
        now = time.monotonic()
        self._left = min(_BURST, self._left + (now - self._at) * _RATE)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            self._told = False
            return True, False
        first, self._told = not self._told, True
        return False, first


class _Strangers:
    """Counts requests without the token.

    At most one record is written every `_NOTE_S` seconds, to keep the ledger short.
    """

    def __init__(self) -> None:
        self._count, self._at = 0, -_NOTE_S

    def note(self) -> str | None:
        """Counts one request; returns the text to record, or None."""
        self._count += 1
        if time.monotonic() - self._at < _NOTE_S:
            return None
        more = f" ({self._count} requests)" if self._count > 1 else ""
        self._count, self._at = 0, time.monotonic()
        return more


class _Server(httpserver.HTTPServer):
    """A server that closes the oldest connection if there are too many."""

    def initialize(self, *args: Any, **options: Any) -> None:
        super().initialize(*args, **options)
        self.connections: collections.deque[iostream.IOStream] = collections.deque()

    def handle_stream(self, stream: iostream.IOStream, address: Any) -> None:
        if len(self.connections) >= _CONNECTIONS:
            there = [x for x in self.connections if not x.closed()]
            self.connections.clear()
            self.connections.extend(there)
        if len(self.connections) >= _CONNECTIONS:
            self.connections.popleft().close()
        self.connections.append(stream)
        asyncio.get_running_loop().call_later(_PATIENCE_S, stream.close)
        super().handle_stream(stream, address)


@web.stream_request_body
class _Handler(web.RequestHandler):
    """Answers one request."""

    def initialize(self, serving: Serving) -> None:
        self._serving = serving
        self._body = bytearray()

    def set_default_headers(self) -> None:
        self.set_header("Server", "autopar")

    def prepare(self) -> None:
        """Refuses an invalid request before its body is read."""
        serving, request = self._serving, self.request
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, b"Bearer " + serving.token):
            more = serving.strangers.note()
            text = "the header 'Authorization: Bearer TOKEN' lacks the token."
            self._refuse(HTTPStatus.UNAUTHORIZED, text, note=more)
            return
        may, first = serving.allowance.take()
        if not may:
            text = f"more than {_RATE:g} requests a second."
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, text, note="" if first else None)
        elif request.method != "POST":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "send events by POST.")
        elif request.path.rstrip("/") != "/events":
            self._refuse(HTTPStatus.NOT_FOUND, "send events to /events.")
        else:
            self._check_length(request.headers.get("Content-Length", ""))

    def _check_length(self, length: str) -> None:
        if not (length.isascii() and length.isdigit()):
            text = "a request needs its Content-Length."
            self._refuse(HTTPStatus.LENGTH_REQUIRED, text)
        elif len(length) > 12 or int(length) > LARGEST_BYTES:
            text = f"a message has at most {LARGEST_BYTES} bytes."
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)

    def data_received(self, chunk: bytes) -> None:
        if not self._headers_written:
            self._body += chunk

    def _end(self) -> None:
        """Closes a refused request's connection, once its body has been received."""
        self.finish()

    get = head = put = patch = delete = options = _end

    def post(self) -> None:
        """Passes on the events of a message, and answers with their outcomes."""
        if self._headers_written:
            self._end()
            return
        try:
            events = read_events(bytes(self._body), self._source)
        except EventError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            self.finish()
            return
        found = [self._serving.sink.put(event) for event in events]
        refused = any(x.status == "refused" for x in found)
        status = HTTPStatus.CONFLICT if refused else HTTPStatus.OK
        self._answer(status, {"events": [_answer(x) for x in found]})
        self.finish()

    @property
    def _source(self) -> str:
        return f"http:{self.request.remote_ip}"

    def _refuse(
        self, status: HTTPStatus, reason: str, *, note: str | None = ""
    ) -> None:
        if note is not None:
            text = f"{status.value}: {reason}{note}"
            self._serving.sink.wrong(self._source, text)
        # The rest of the request is read and discarded. Otherwise the client could not
        # read the answer.
        connection = self.request.connection
        if isinstance(connection, http1connection.HTTP1Connection):
            connection.set_max_body_size(1 << 62)
        self._answer(status, {"error": reason})

    def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        """Sends an answer; `_end` or `post` then closes the connection."""
        text = json.dumps(body).encode() + b"\n"
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Content-Length", len(text))
        self.write(text)
        self.flush()

    def write_error(self, status_code: int, **_: Any) -> None:
        self._answer(HTTPStatus(status_code), {"error": HTTPStatus(status_code).phrase})
        self.finish()

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Records an error in this code; the server goes on."""
        del typ, tb
        if not isinstance(value, web.HTTPError):
            text = f"a bug in autopar: {type(value).__name__}: {value}"[:500]
            self._serving.sink.wrong(self._source, text)


class Serving:
    """A server that runs in a thread until it is closed."""

    def __init__(
        self,
        address: tuple[str, int],
        sink: Sink,
        token: str,
        context: ssl.SSLContext | None,
    ) -> None:
        """Starts to listen.

        Args:
          address: host and port; port 0: any free port.
          sink: receives the events.
          token: token that senders must know.
          context: TLS context; None: plain HTTP.

        Raises:
          OSError: the address cannot be used.
        """
        self.sink, self.token = sink, token.encode()
        self.allowance, self.strangers = _Allowance(), _Strangers()
        self._context = context
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listening = socket.create_server(address, family=family, backlog=1024)
        listening.setblocking(False)
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._listening = listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        # Tornado warns about clients that disconnect early. The run can ignore this.
        logging.getLogger("tornado.general").setLevel(logging.ERROR)
        self._watched = Watched(
            "autopar-http",
            self._run,
            functools.partial(sink.wrong, "http"),
        )

    def close(self) -> None:
        """Stops listening."""
        self._watched.ending.set()
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # an error may have closed the loop
                loop.call_soon_threadsafe(lambda: self._ended.set())
        self._watched.end()
        self._listening.close()

    def _run(self, watched: Watched) -> None:
        connections: collections.deque[iostream.IOStream] = collections.deque()
        try:
            asyncio.run(self._serve(watched, connections))
        finally:
            for stream in connections:  # connections that are open when the loop ends
                if stream.socket is not None:
                    stream.socket.close()

    async def _serve(
        self, watched: Watched, connections: collections.deque[iostream.IOStream]
    ) -> None:
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if watched.ending.is_set():
            return
        rules = [(".*", _Handler, {"serving": self})]
        application = web.Application(rules, log_function=lambda handler: None)
        server = _Server(
            application,
            ssl_options=self._context,
            no_keep_alive=True,
            max_header_size=_LONGEST_HEAD,
            max_body_size=LARGEST_BYTES,
            max_buffer_size=2 * LARGEST_BYTES,
        )
        server.connections = connections
        server.add_socket(self._listening)
        await self._ended.wait()
        server.stop()
        await server.close_all_connections()


def _answer(found: Resolved) -> dict[str, Any]:
    return {
        "event": str(found.event),
        "status": found.status,
        "reason": found.reason,
        "cluster": None if found.cluster is None else str(found.cluster),
    }


# The environment variable for the token, the least number of characters of a token, and
# below the variables for the TLS files.
TOKEN_VARIABLE, _SHORTEST = "AUTOPAR_EVENTS_TOKEN", 16
CERTIFICATE_VARIABLE, KEY_VARIABLE = "AUTOPAR_EVENTS_CERT", "AUTOPAR_EVENTS_KEY"


class Http:
    """Receives events over HTTP.

    Attributes:
      token: token that senders must know.
      url: where to send events; set by `start`.
    """

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        *,
        tls: bool = False,
    ) -> None:
        """Does not listen yet.

        Args:
          port: port to listen on; 0: any free port.
          host: address to listen on; the default can be reached only from this machine.
          token: token that senders must know; None: the environment variable
            `TOKEN_VARIABLE`, or else a random token.
          tls: whether to use HTTPS, with the certificate and the key in the PEM files
            that `CERTIFICATE_VARIABLE` and `KEY_VARIABLE` name.

        Raises:
          PlanError: the token is too short.
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
        self._tls = tls
        self._server: Serving | None = None

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        context = _context() if self._tls else None
        host, port = self._address
        try:
            self._server = Serving((host, port), sink, self.token, context)
        except (OSError, OverflowError, UnicodeError) as error:
            kind = "https" if self._tls else "http"
            raise PlanError(
                f"events: cannot listen on {host}:{port}: {error}. Give {kind}:0 for "
                "any free port."
            ) from error
        host, port = self._server.address
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if self._tls else 'http'}://{shown}:{port}/events"

    def stop(self) -> None:
        """See `Source`."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _context() -> ssl.SSLContext:
    """The TLS context with the certificate and the key.

    Raises:
      PlanError: the certificate or the key cannot be read.
    """
    certificate, key = (os.environ.get(x) for x in (CERTIFICATE_VARIABLE, KEY_VARIABLE))
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        made.load_cert_chain(certificate or "", key)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"events: https needs a certificate: {error}. Set {CERTIFICATE_VARIABLE} "
            f"and {KEY_VARIABLE} to PEM files."
        ) from error
    return made
