"""Tests that a lost coordination service keeps no process waiting, and ends none."""

from __future__ import annotations

import subprocess
import sys

# XLA ends a process in some of these cases, so that they run in a process of their own.
# A forwarder stands for the network: once it is told to, it passes on nothing more, as
# if the host of the service were off.
_SCRIPT = """
import socket, sys, threading, time
from autopar.elastic.processes.network import Network
from autopar.elastic.processes.relay import Relay, shut_down
from autopar_passes import jax_processes

address, service = jax_processes.open_service(1)
silent = threading.Event()
server = socket.create_server(("127.0.0.1", 0))

def pass_on(a, b):
    while data := a.recv(1 << 16):
        if not silent.is_set():
            b.sendall(data)

def accept():
    while True:
        here, _ = server.accept()
        host, port = address.split(":")
        there = socket.create_connection((host, int(port)))
        for ends in ((here, there), (there, here)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()

threading.Thread(target=accept, daemon=True).start()
relay = Relay(f"127.0.0.1:{server.getsockname()[1]}", Network(), 0, 1, 60)
client = jax_processes.coordination_client(relay.address, 0, 60)
if sys.argv[1] == "connected":
    client.connect()
    relay.on_client(client)
    assert client.key_value_increment("a", 1) == 1
    silent.set()
    failed = threading.Event()

    polls_end = threading.Event()

    def call():
        try:
            client.key_value_increment("a", 1)
        except Exception:
            failed.set()

    def poll():
        while True:  # as exchanges do
            try:
                client.blocking_key_value_get_bytes("b", 50)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    polls_end.set()
                    return

    for work in (call, poll):
        threading.Thread(target=work, daemon=True).start()
    assert not failed.wait(1.0)
    relay.lose()
    assert failed.wait(20.0)
    assert polls_end.wait(20.0)
    time.sleep(1.0)
else:
    silent.set()
    threading.Timer(1.0, relay.lose).start()
    begin = time.monotonic()
    client.connect()
    assert relay.alone
    assert time.monotonic() - begin < 40.0
    shut_down(client)
relay.close()
print("went on", flush=True)
import os
os._exit(0)
"""


def _run(what: str) -> str:
    command = [sys.executable, "-c", _SCRIPT, what]
    made = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_a_call_that_waits_for_a_lost_service_fails() -> None:
    assert _run("connected") == "went on\n"


def test_a_process_that_connects_to_a_lost_service_is_alone() -> None:
    """The relay answers instead of the service, or XLA would end the process."""
    assert _run("connecting") == "went on\n"
