"""Attacks a run over hosts from a host that does not have the run's secret.

    python benchmarks/network/strangers.py --out strangers.json

Two hosts train, a third host runs the supervisor, and a fourth host has no secret and
attacks. It connects to every open port and sends nothing, or messages of autopar's
protocol with a guessed token. It presents the certificate of another run. It replays
messages that were sent with the secret. And it opens thousands of connections. Each row
counts the answers with any content. It also has the longest time between two steps
during the attack, next to that before the attack. The run must continue, and its losses
must be those of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import netns
import soak
from bed import Bed
from soak_figures import losses, plain_losses
from soak_hosts import PORT, HostSoak

from autopar.elastic.processes.certificates import new_secret
from autopar.elastic.processes.network import Network

TRAINING, STRANGER = 2, 3
QUIET_S = 4.0


class Strangers:
    """An attacker without the secret, on its own host."""

    def __init__(self, run: HostSoak) -> None:
        """Starts before any attack."""
        self._run = run
        self._space = run.bed.hosts[STRANGER].namespace
        self.rows: list[dict[str, Any]] = []

    def listening(self) -> list[tuple[str, int]]:
        """Address and port of each listening socket on the other hosts."""
        found: list[tuple[str, int]] = []
        for host in self._run.bed.hosts:
            words = ("ip", "netns", "exec", host.namespace, "ss", "-Htln")
            for line in netns.output(*words).splitlines():
                at, _, port = line.split()[3].rpartition(":")
                if host.rank != STRANGER and not at.startswith("127."):
                    found.append((host.address, int(port)))
        return sorted(set(found))

    def attack(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Runs an attack; records the steps during and after it."""
        before = self.longest(lambda: time.sleep(QUIET_S))
        found: dict[str, Any] = {}

        def act() -> None:
            found.update(netns.inside(self._space, work))
            time.sleep(QUIET_S)

        during = self.longest(act)
        row = {"what": name, **found, "before_s": before, "during_s": during}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def longest(self, act: Callable[[], None]) -> float:
        """The longest time between two steps while a function runs."""
        begin = time.time()
        act()
        times = [t for _, _, t in losses(self._run.results) if t >= begin]
        ends = sorted({round(t, 3) for t in [begin, *times, time.time()]})
        gaps = [b - a for a, b in itertools.pairwise(ends)]
        return round(max(gaps), 3)

    def say(self, words: bytes) -> dict[str, Any]:
        """Connects to each port and sends bytes; counts answers."""
        answers = ports = 0
        for at in self.listening():
            ports += 1
            with contextlib.suppress(OSError), socket.create_connection(at, 2) as end:
                end.sendall(words)
                end.settimeout(1.0)
                answers += len(end.recv(4096)) > 0
        return {"ports": ports, "answers": answers}

    def greet(self) -> dict[str, Any]:
        """Presents the certificate of another run at each port."""
        other = Network("127.0.0.1", new_secret())
        ports = got = 0
        for host, port in self.listening():
            ports += 1
            with contextlib.suppress(OSError):
                end = other.connect(f"{host}:{port}", 2.0)
                end.settimeout(1.0)
                end.sendall(b'{"kind": "command", "command": "status"}\n')
                got += len(end.recv(4096)) > 0
        return {"ports": ports, "answers": got}

    def crowd(self, count: int) -> dict[str, Any]:
        """Opens thousands of connections to the supervisor, and keeps them open."""
        at, held = (self._run.home.address, PORT), list[socket.socket]()
        refused = 0
        for _ in range(count):
            try:
                held.append(socket.create_connection(at, 2))
            except OSError:
                refused += 1
        for end in held:
            end.close()
        return {"connections": count, "refused": refused, "answers": 0}

    def replay(self) -> dict[str, Any]:
        """Replays the bytes of an agent, which were passed through this host."""
        at, heard = (self._run.home.address, PORT), bytearray()
        server = socket.create_server(("0.0.0.0", PORT))

        def pass_through() -> None:
            caller, _ = server.accept()
            target = socket.create_connection(at)
            threading.Thread(target=copy, args=(target, caller, None)).start()
            copy(caller, target, heard)

        threading.Thread(target=pass_through, daemon=True).start()
        address = f"{self._run.bed.hosts[STRANGER].address}:{PORT}"
        secret = Network("127.0.0.1", self._run.secret.read_text())
        end = secret.connect(address, 5.0)
        token = self._run.notes()["token"]
        line = {"kind": "command", "command": "status", "token": token}
        end.sendall(json.dumps(line).encode() + b"\n")
        first = len(end.recv(4096)) > 0
        end.close()
        server.close()
        again = socket.create_connection(at, 2)
        again.settimeout(2.0)
        again.sendall(bytes(heard))
        sealed = b""
        with contextlib.suppress(OSError):
            while data := again.recv(4096):
                sealed += data
        # The answer is the TLS greeting of the other side, which needs the secret to
        # decrypt.
        found = b"workers" in sealed or b"state" in sealed
        return {"ports": 1, "answers": int(found), "recorded_call_answered": first}


def copy(source: socket.socket, target: socket.socket, into: bytearray | None) -> None:
    """Copies bytes from one socket to another until one side ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            if into is not None:
                into += data
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Trained(HostSoak):
    """A run on two hosts."""

    def start_agent(self, host: int) -> None:
        """Starts the agent of a host, if the host trains."""
        if host < TRAINING:
            super().start_agent(host)


def main() -> None:
    """Runs the attacks, and reports the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    data = pathlib.Path(__file__).parents[2] / "docs" / "data" / "strangers.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    soak.MOST = TRAINING
    with tempfile.TemporaryDirectory() as temporary, Bed(5) as bed:
        run = Trained(pathlib.Path(temporary), 1, bed, processes=TRAINING)
        strangers = Strangers(run)
        guess = b'{"kind": "command", "command": "stop", "token": "guess"}\n'
        numbers = b"".join(k.to_bytes(8, "little") for k in range(8))
        strangers.attack("a scan", lambda: strangers.say(b""))
        strangers.attack("a guessed token", lambda: strangers.say(guess))
        strangers.attack("another run's certificate", strangers.greet)
        strangers.attack("numbers as gloo's", lambda: strangers.say(numbers))
        strangers.attack("a recorded call", strangers.replay)
        strangers.attack("a crowd", lambda: strangers.crowd(given.connections))
        worlds = run.notes()["generation"]
        run.finish()
        found = losses(run.results)
        last = max(step for step, _, _ in found)
        plain = plain_losses(run.folder, last + 1)
        worst = max(abs(x - plain[k]) / abs(plain[k]) for k, x, _ in found)
        run.close()
    made = {
        "command": "python benchmarks/network/strangers.py",
        "rows": strangers.rows,
        "worlds": worlds,
        "steps": last + 1,
        "worst_relative_difference_of_losses": worst,
    }
    print(json.dumps(made, indent=1))
    given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
