"""Connections between the processes of a run: on loopback, or over TLS.

A run on one machine uses only loopback. A run on several hosts has a secret: a private
key and a certificate that all its processes share. Both sides of each connection
present this certificate and accept no other. So a process without the secret cannot
read any message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import os
import pathlib
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import InputError, PlanError

# The environment variables for the secret, as PEM text, and for the address of the host
# that a worker runs on.
SECRET_VARIABLE = "AUTOPAR_SECRET"
HOST_VARIABLE = "AUTOPAR_HOST"
_LOOPBACK = "127.0.0.1"
_PIECE = 1 << 18
# Seconds within which a new connection must present the certificate, and the largest
# number of connections that have not done so yet.
_GREETING_S = 5.0
_STRANGERS, _STRANGERS_OF_ONE_HOST = 256, 64


def read_secret(path: pathlib.Path | None) -> str:
    """Reads the secret from a file, or from `SECRET_VARIABLE` if there is no path.

    Raises:
      PlanError: there is no secret, it is malformed, or other users can read it.
    """
    if path is None:
        text, where = os.environ.get(SECRET_VARIABLE, ""), f"${SECRET_VARIABLE}"
        if not text:
            raise PlanError(
                "processes on other hosts need a secret: make one by `autopar secret "
                f"FILE`, and give it with --secret FILE or in {SECRET_VARIABLE}."
            )
    else:
        where = str(path)
        try:
            text, found = path.read_text(), path.stat()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise PlanError(
                f"{path} cannot be read: {reason}. Make a secret by `autopar secret "
                "FILE`, and copy it to each host."
            ) from error
        # If another user owns the file, this user may have access through the file's
        # group.
        mine = stat.S_IRWXG if found.st_uid == os.getuid() else 0
        if found.st_mode & (stat.S_IRWXO | mine):
            raise PlanError(
                f"other users of this host can read {path}: run `chmod 600 {path}`."
            )
    try:
        _contexts(text)
    except (ssl.SSLError, ValueError) as error:
        raise PlanError(
            f"{where} is no secret of a run: make one by `autopar secret FILE`."
        ) from error
    return text


@functools.cache
def _contexts(secret: str) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """The TLS contexts of the accepting and the connecting side, and the certificate.

    Raises:
      ssl.SSLError: the secret is damaged.
      ValueError: the secret contains no certificate.
    """
    start = secret.index("-----BEGIN CERTIFICATE-----")
    certificate = secret[start:]
    made: list[ssl.SSLContext] = []
    # The secret is written to an anonymous file in memory, because Python's ssl module
    # loads a key only from a file.
    descriptor = os.memfd_create("secret", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, secret.encode())
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the certificates are compared instead
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            context.load_verify_locations(cadata=certificate)
            made.append(context)
    finally:
        os.close(descriptor)
    made[0].num_tickets = 0  # no connection is resumed
    return made[0], made[1], ssl.PEM_cert_to_DER_cert(certificate.strip())


class TlsSocket:
    """A connected socket with TLS; one thread may receive while other threads send.

    This class replaces `ssl.SSLSocket`, which two threads must not use at the same
    time.
    """

    def __init__(self, end: socket.socket, secret: str, *, called: bool) -> None:
        """Makes the TLS handshake with the other side.

        Args:
          end: a connected socket; this object closes it.
          secret: secret of the run.
          called: whether the other side opened the connection.

        Raises:
          OSError: the other side is gone, or has no secret or another secret.
        """
        server, client, certificate = _contexts(secret)
        self._end = end
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = server if called else client
        self._tls = context.wrap_bio(self._in, self._out, server_side=called)
        # One lock protects the TLS object. If several threads send, the other lock
        # keeps the encrypted bytes in the order in which the TLS object made them.
        self._using, self._sending = threading.Lock(), threading.Lock()
        try:
            self._greet()
            if self._tls.getpeercert(binary_form=True) != certificate:
                raise ConnectionError("the other side has another certificate")
        except BaseException:
            end.close()
            raise

    def _greet(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._hear()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # sends the other side the TLS error
                raise
        self._flush()

    def _flush(self) -> None:
        with self._sending:
            self._send_made()

    def _send_made(self) -> None:
        with self._using:
            made = self._out.read()
        if made:
            self._end.sendall(made)

    def _hear(self) -> None:
        """Waits for bytes from the other side, and passes them to TLS."""
        data = self._end.recv(_PIECE)
        with self._using:
            if data:
                self._in.write(data)
            else:
                self._in.write_eof()

    def sendall(self, data: Any) -> None:
        """Sends all bytes; see `socket.socket.sendall`."""
        view = memoryview(data).cast("B")
        with self._sending:
            for start in range(0, len(view), _PIECE):
                with self._using:
                    self._tls.write(view[start : start + _PIECE])
                self._send_made()

    def recv_into(self, buffer: Any) -> int:
        """Receives bytes into a buffer; returns their number, 0 after the last byte."""
        view = memoryview(buffer).cast("B")
        while len(view):
            try:
                with self._using:
                    # The type stubs of `ssl` do not accept a memoryview as a buffer.
                    return int(self._tls.read(len(view), view))  # type: ignore[arg-type]
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            # TLS may have produced messages of its own. They are sent with the next
            # data.
            self._hear()
        return 0

    def recv(self, size: int) -> bytes:
        """Receives at most ``size`` bytes; b'' after the other side's end."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def makefile(self, mode: str) -> io.BufferedReader:
        """A buffered reader; `mode` must be ``rb``."""
        assert mode == "rb"
        return io.BufferedReader(_Received(self), _PIECE)

    def settimeout(self, seconds: float | None) -> None:
        """See `socket.socket.settimeout`."""
        self._end.settimeout(seconds)

    def getsockname(self) -> Any:
        """See `socket.socket.getsockname`."""
        return self._end.getsockname()

    def getpeername(self) -> Any:
        """See `socket.socket.getpeername`."""
        return self._end.getpeername()

    def shutdown(self, how: int) -> None:
        """See `socket.socket.shutdown`."""
        self._end.shutdown(how)

    def close(self) -> None:
        """Closes the socket."""
        self._end.close()


class _Received(io.RawIOBase):
    """The received bytes as a raw stream, for a buffered reader."""

    def __init__(self, end: TlsSocket) -> None:
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._end.recv_into(buffer)


End = socket.socket | TlsSocket


class Listener:
    """Accepts connections of processes that have the secret, each in its own thread.

    A new connection must present the certificate within a few seconds. If too many
    connections have not done so yet, the listener closes the oldest of them from the
    same address. So a stranger that opens many connections cannot keep other processes
    waiting.
    """

    def __init__(
        self, server: socket.socket, secret: str, serve: Callable[[End], None]
    ) -> None:
        """Starts to listen.

        Args:
          server: a listening socket.
          secret: secret of the run; '': connections do not use TLS.
          serve: function that is called in a thread with each connection.
        """
        self._server, self._secret, self._serve = server, secret, serve
        self._lock = threading.Lock()
        self._strangers: list[tuple[str, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    @property
    def port(self) -> int:
        """The port of the listening socket."""
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """Stops listening; open connections stay open."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._server.accept()
            except OSError as error:
                if self._server.fileno() < 0 or error.errno not in _PASSING:
                    return
                self._drop()  # too many file descriptors are open
                continue
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(end)
            if self._secret:
                self._admit(str(address[0]), end)
            self._start(end)

    def _start(self, end: socket.socket) -> None:
        try:
            threading.Thread(target=self._take, args=(end,), daemon=True).start()
        except RuntimeError:  # no more threads can be started
            end.close()

    def _admit(self, host: str, end: socket.socket) -> None:
        with self._lock:
            self._strangers.append((host, end))
            own = [x for x in self._strangers if x[0] == host]
            crowd = [
                *own[: max(0, len(own) - _STRANGERS_OF_ONE_HOST)],
                *self._strangers[: max(0, len(self._strangers) - _STRANGERS)],
            ]
        for _, old in crowd:
            hang_up(old)

    def _drop(self) -> None:
        with self._lock:
            crowd = list(self._strangers)
        for _, old in crowd:
            hang_up(old)

    def _take(self, end: socket.socket) -> None:
        taken: End = end
        if self._secret:
            try:
                end.settimeout(_GREETING_S)
                taken = TlsSocket(end, self._secret, called=True)
                taken.settimeout(None)
            except (OSError, ValueError):
                end.close()
                return
            finally:
                with self._lock:
                    self._strangers = [x for x in self._strangers if x[1] is not end]
        self._serve(taken)


# Errors of `accept` that may go away: no file descriptor or memory is free, or the
# other side has already closed the connection.
_PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ECONNABORTED,
        errno.EINTR,
    }
)


def keep_alive(end: socket.socket) -> None:
    """Makes the kernel notice within a minute that the other host is gone.

    The kernel then probes an idle connection, and ends a connection whose bytes are not
    acknowledged in time.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def pass_on(taken: End, given: End) -> None:
    """Copies bytes from one connection to another until one ends; then ends both."""
    with contextlib.suppress(OSError):
        while data := taken.recv(_PIECE):
            given.sendall(data)
    hang_up(given)
    hang_up(taken)


def hang_up(end: End) -> None:
    """Ends a connection, so that threads that wait for it wake up."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """How a process of a run listens for other processes and connects to them.

    Attributes:
      host: address at which other processes reach this process's host.
      secret: PEM text; '': all processes run on this machine and use loopback.
    """

    host: str = _LOOPBACK
    secret: str = dataclasses.field(default="", repr=False)

    @classmethod
    def of_environment(cls) -> Network:
        """Reads the network that `autopar worker` set for its workers, or loopback."""
        secret = os.environ.get(SECRET_VARIABLE, "")
        host = os.environ.get(HOST_VARIABLE, "")
        return cls(host, secret) if secret and host else cls()

    @property
    def is_local(self) -> bool:
        """Whether all processes run on this machine."""
        return not self.secret

    def variables(self) -> Mapping[str, str]:
        """The environment variables that `of_environment` reads."""
        if self.is_local:
            return {}
        return {SECRET_VARIABLE: self.secret, HOST_VARIABLE: self.host}

    def address(self, port: int) -> str:
        """The address by which other processes reach a port of this process.

        >>> Network("fd00::1", "...").address(7000)
        '[fd00::1]:7000'
        """
        return join_address(self.host, port)

    def listen(
        self, serve: Callable[[End], None], port: int = 0, host: str = ""
    ) -> Listener:
        """Starts to accept connections.

        Args:
          serve: function that is called in a thread with each connection.
          port: port to listen on; 0: any free port.
          host: address to listen on; '': the address of this process's host.

        Raises:
          OSError: the port is in use, or the address does not belong to this host.
        """
        return Listener(open_listener(host or self.host, port), self.secret, serve)

    def connect(self, address: str, timeout_s: float) -> End:
        """Connects to a process of the run; the result has no timeout.

        Args:
          address: ``HOST:PORT``.
          timeout_s: longest time to wait for the connection.

        Raises:
          OSError: no process listens there, or the process lacks the secret.
        """
        end = socket.create_connection(split_address(address), timeout=timeout_s)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(end)
        if self.is_local:
            end.settimeout(None)
            return end
        made = TlsSocket(end, self.secret, called=False)
        made.settimeout(None)
        return made


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
      OSError: the port is in use, or the address does not belong to this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def join_address(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
      InputError: the text is not ``HOST:PORT``.

    >>> split_address("[fd00::1]:7000")
    ('fd00::1', 7000)
    """
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"{address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def route_to(address: str) -> str:
    """The address of the interface by which this host reaches another host.

    Raises:
      OSError: there is no route.
    """
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def inodes(pid: int) -> dict[int, int]:
    """Inode -> file descriptor of each socket of a process; empty if it has ended."""
    found: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found
