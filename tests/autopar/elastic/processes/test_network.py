"""Tests that only processes with the secret can connect to a run on several hosts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import ssl
import threading
import time

import pytest

from autopar import PlanError
from autopar.elastic.processes import network
from autopar.elastic.processes.certificates import create_secret, new_secret
from autopar.elastic.processes.network import End, Network

SECRET = new_secret()
OWN = Network("127.0.0.1", SECRET)


def echo(end: End) -> None:
    """Sends back what comes."""
    with contextlib.suppress(OSError):
        while data := end.recv(1 << 16):
            end.sendall(data)


@pytest.fixture
def address() -> str:
    """The address of a server that sends back all bytes."""
    return OWN.address(OWN.listen(echo).port)


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
def test_threads_send_and_receive_at_once(address: str, size: int) -> None:
    end = OWN.connect(address, 5.0)
    data = os.urandom(size)
    sender = threading.Thread(target=end.sendall, args=(data,))
    sender.start()
    assert end.makefile("rb").read(size) == data
    sender.join()
    end.close()


def test_two_threads_send(address: str) -> None:
    """Pieces of both come whole, as records are sent in the order they were made."""
    end = OWN.connect(address, 5.0)
    pieces = [bytes([k]) * 1000 for k in range(2)]
    threads = [
        threading.Thread(target=lambda p=p: [end.sendall(p) for _ in range(300)])
        for p in pieces
    ]
    for thread in threads:
        thread.start()
    back = end.makefile("rb").read(600_000)
    found = [back[k : k + 1000] for k in range(0, len(back), 1000)]
    assert sorted(found) == sorted(pieces * 300)
    for thread in threads:
        thread.join()
    end.close()


def test_who_has_another_secret_is_sent_nothing(address: str) -> None:
    with pytest.raises(ssl.SSLError):
        Network("127.0.0.1", new_secret()).connect(address, 5.0).recv(1)


def test_who_calls_a_stranger_sends_nothing() -> None:
    """The caller looks at the certificate, too."""
    heard: list[bytes] = []
    other = Network("127.0.0.1", new_secret())
    listener = other.listen(lambda end: heard.append(end.recv(100)))
    with pytest.raises(ssl.SSLError):
        OWN.connect(OWN.address(listener.port), 5.0).sendall(b"state")
    assert not heard


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)])
def test_what_is_no_tls_is_hung_up_on(address: str, said: bytes) -> None:
    with socket.create_connection(network.split_address(address)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(20.0)
        with contextlib.suppress(ConnectionResetError):
            assert b"state" not in stranger.recv(1000)


def test_many_strangers_keep_nobody_out(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them are hung up on, and one who has the secret gets through."""
    monkeypatch.setattr(network, "_GREETING_S", 60.0)
    at = network.split_address(address)
    strangers = [socket.create_connection(at) for _ in range(200)]
    begin = time.monotonic()
    end = OWN.connect(address, 10.0)
    end.sendall(b"here")
    assert end.recv(4) == b"here"
    assert time.monotonic() - begin < 10.0
    ended = 0
    for stranger in strangers:
        stranger.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            ended += stranger.recv(1) == b""
        stranger.close()
    assert ended >= 200 - 64
    end.close()


def test_a_secret_is_its_owners_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert network.read_secret(path) == path.read_text()
    with pytest.raises(PlanError, match="exists"):
        create_secret(path)
    for mode in (0o644, 0o640):
        path.chmod(mode)
        with pytest.raises(PlanError, match="chmod 600"):
            network.read_secret(path)
    with pytest.raises(PlanError, match="cannot be written"):
        create_secret(tmp_path / "no" / "secret")


@pytest.mark.parametrize("text", ["", "secret", SECRET[:300], SECRET[-400:]])
def test_what_is_no_secret(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(PlanError, match="autopar secret"):
        network.read_secret(path)


def test_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="autopar secret"):
        network.read_secret(None)
    for name, value in OWN.variables().items():
        monkeypatch.setenv(name, value)
    assert network.read_secret(None) == SECRET
    assert Network.of_environment() == OWN
    assert SECRET not in repr(OWN)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:70000"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT"):
        network.split_address(text)


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7", "fd00::1"])
def test_addresses_are_read_as_they_are_written(host: str) -> None:
    assert network.split_address(network.join_address(host, 7000)) == (host, 7000)
