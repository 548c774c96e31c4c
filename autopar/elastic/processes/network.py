"""How the processes of a run reach each other: on loopback, or over TLS.

A run of one machine stays on loopback. A run of several hosts has a secret: a private
key and a certificate that all its processes share. Each side of a connection shows the
certificate and takes no other one, so a process without the secret reads nothing.
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

# The secret, as PEM text, and the address of a worker's own host.
SECRET_VARIABLE = "AUTOPAR_SECRET"
HOST_VARIABLE = "AUTOPAR_HOST"
_LOOPBACK = "127.0.0.1"
_PIECE = 1 << 18
# Longest that a stranger may take to show the certificate, and how many may be at it.
_GREETING_S = 5.0
_STRANGERS, _STRANGERS_OF_ONE_HOST = 256, 64


def read_secret(path: pathlib.Path | None) -> str:
    """The secret of a file, or of `SECRET_VARIABLE` where there is no path.

    Raises:
      PlanError: there is none, it is no secret, or strangers can read it.
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
        # Where a file is another one's, a group may be how this user reads it.
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
    """For the side that is called, for the side that calls, and the certificate.

    Raises:
      ssl.SSLError: the secret is damaged.
      ValueError: it has no certificate.
    """
    start = secret.index("-----BEGIN CERTIFICATE-----")
    certificate = secret[start:]
    made: list[ssl.SSLContext] = []
    # A file without a name: OpenSSL reads a key from nothing but a file.
    descriptor = os.memfd_create("secret", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, secret.encode())
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the certificate itself is compared
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            context.load_verify_locations(cadata=certificate)
            made.append(context)
    finally:
        os.close(descriptor)
    made[0].num_tickets = 0  # no connection is taken up again
    return made[0], made[1], ssl.PEM_cert_to_DER_cert(certificate.strip())


class TlsSocket:
    """A connected socket with TLS; any thread may send while another one receives.

    `ssl.SSLSocket` may not be used by two threads at once.
    """

    def __init__(self, end: socket.socket, secret: str, *, called: bool) -> None:
        """Greets the other side.

        Args:
          end: a connected socket, which this one owns from now on.
          secret: of the run.
          called: whether the other side has called.

        Raises:
          OSError: the other side has no secret, another one, or is gone.
        """
        server, client, certificate = _contexts(secret)
        self._end = end
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = server if called else client
        self._tls = context.wrap_bio(self._in, self._out, server_side=called)
        # Held to use the object, and to send what it has made in its order.
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
                    self._flush()  # says why
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
        """Waits for bytes of the other side."""
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
        """Receives up to as many bytes as fit; 0: the other side has ended."""
        view = memoryview(buffer).cast("B")
        while len(view):
            try:
                with self._using:
                    # The stubs know no buffers that are views.
                    return int(self._tls.read(len(view), view))  # type: ignore[arg-type]
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            # What TLS itself may answer goes out with what is sent next.
            self._hear()
        return 0

    def recv(self, size: int) -> bytes:
        """Receives up to so many bytes; none: the other side has ended."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def makefile(self, mode: str) -> io.BufferedReader:
        """A reader; `mode` is ``rb``."""
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
        """Closes it."""
        self._end.close()


class _Received(io.RawIOBase):
    """The bytes that come, for a buffered reader."""

    def __init__(self, end: TlsSocket) -> None:
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._end.recv_into(buffer)


End = socket.socket | TlsSocket


class Listener:
    """Takes connections of processes that have the secret, each in a thread.

    A stranger has a few seconds to show the certificate. Where too many are at it, the
    oldest ones of the same address are hung up on, so nobody else waits.
    """

    def __init__(
        self, server: socket.socket, secret: str, serve: Callable[[End], None]
    ) -> None:
        """Listens from now on.

        Args:
          server: a socket that listens.
          secret: of the run; '': connections have no TLS.
          serve: is called in a thread with each connection.
        """
        self._server, self._secret, self._serve = server, secret, serve
        self._lock = threading.Lock()
        self._strangers: list[tuple[str, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    @property
    def port(self) -> int:
        """The port."""
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """Listens no more; connections stay."""
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
                self._drop()  # too many descriptors are open
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
        except RuntimeError:  # no more threads
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


# Errors of `accept` behind which others may come: no descriptor or no memory is left,
# or the caller has hung up.
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
    """Lets the kernel notice within a minute that the other host is gone.

    It asks a connection that is quiet, and waits for what it has sent.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def pass_on(taken: End, given: End) -> None:
    """Passes bytes on until one side ends, and ends the other."""
    with contextlib.suppress(OSError):
        while data := taken.recv(_PIECE):
            given.sendall(data)
    hang_up(given)
    hang_up(taken)


def hang_up(end: End) -> None:
    """Ends a connection, and the waits of threads for it."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """What a process of a run knows of the network between them.

    Attributes:
      host: address of this process's host, at which others reach it.
      secret: PEM text; '': all processes are on this machine, and on loopback.
    """

    host: str = _LOOPBACK
    secret: str = dataclasses.field(default="", repr=False)

    @classmethod
    def of_environment(cls) -> Network:
        """The network that `autopar worker` told its workers of; else loopback."""
        secret = os.environ.get(SECRET_VARIABLE, "")
        host = os.environ.get(HOST_VARIABLE, "")
        return cls(host, secret) if secret and host else cls()

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine."""
        return not self.secret

    def variables(self) -> Mapping[str, str]:
        """What `of_environment` reads."""
        if self.is_local:
            return {}
        return {SECRET_VARIABLE: self.secret, HOST_VARIABLE: self.host}

    def address(self, port: int) -> str:
        """A port of this process as others name it.

        >>> Network("fd00::1", "...").address(7000)
        '[fd00::1]:7000'
        """
        return join_address(self.host, port)

    def listen(
        self, serve: Callable[[End], None], port: int = 0, host: str = ""
    ) -> Listener:
        """Takes connections from now on.

        Args:
          serve: is called in a thread with each connection.
          port: to listen at; 0: one that is free.
          host: address to listen at; '': that of this process's host.

        Raises:
          OSError: the port is taken, or the address is not one of this host.
        """
        return Listener(open_listener(host or self.host, port), self.secret, serve)

    def connect(self, address: str, timeout_s: float) -> End:
        """Connects to a process of the run; later waits have no limit.

        Args:
          address: ``HOST:PORT``.
          timeout_s: longest to wait.

        Raises:
          OSError: nobody listens there, or somebody without the secret does.
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
    """A socket that listens.

    Raises:
      OSError: the port is taken, or the address is not one of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def join_address(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
      InputError: it is none.

    >>> split_address("[fd00::1]:7000")
    ('fd00::1', 7000)
    """
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"{address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def route_to(address: str) -> str:
    """The address of this host on the way to another one.

    Raises:
      OSError: there is no way.
    """
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])


def inodes(pid: int) -> dict[int, int]:
    """Inode -> descriptor of each socket of a process; none of one that is gone."""
    found: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found
