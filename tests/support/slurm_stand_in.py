"""Replaces autopar in Slurm jobs: a supervisor and agents that train nothing.

Usage: slurm_stand_in.py secret FILE | run ... --folder DIR ... | worker ...
| workers ...

While an agent is connected, the supervisor counts ten steps per second, up to the
number in the file ``most`` of the folder. It writes to ``events`` when agents connect
or leave. On SIGUSR1 it writes the number of steps to ``saved``. Agents fail if a file
``fail`` exists. A standby takes over once two agents that have lost the supervisor call
it. Agents tell standbys of the end of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
import time


def main() -> int:
    command, *words = sys.argv[1:]
    if command == "secret":
        pathlib.Path(words[0]).write_text("secret")
        return 0
    if command == "workers":
        folder, processes = words[words.index("--folder") + 1], words[-1]
        with (pathlib.Path(folder) / "events").open("a") as file:
            file.write(f"asked for {processes}\n")
        return 0
    parser = argparse.ArgumentParser()
    for name in ("listen", "supervisor", "secret", "processes", "min", "max", "folder"):
        parser.add_argument(f"--{name}", default="")
    for name in ("standby", "anew"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--slots")
    parser.add_argument("script", nargs="*")
    given = parser.parse_args(words)
    if command == "run":
        listen, folder = given.listen, pathlib.Path(given.folder)
        return supervise(listen, folder, given.processes, standby=given.standby)
    return work(given.supervisor, pathlib.Path(given.folder))


def supervise(listen: str, own: pathlib.Path, processes: str, *, standby: bool) -> int:
    """Counts steps while agents are connected."""
    own.mkdir(exist_ok=True)
    # All supervisors of the job write to its folder.
    folder = own if (own / "secret.pem").exists() else own.parent
    events, saved = folder / "events", folder / "saved"

    def note(text: str) -> None:
        with events.open("a") as file:
            file.write(f"{text}\n")

    asked, leads, over = (threading.Event() for _ in range(3))
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    host, port = listen.rsplit(":", 1)
    server = socket.create_server((host, int(port)))
    agents: dict[str, socket.socket] = {}
    calls: set[str] = set()

    def receive(end: socket.socket) -> None:
        state, _, name = end.recv(100).decode().partition(" ")
        if state == "over":
            over.set()
        if state == "lost" and not leads.is_set():
            calls.add(name)
        if not name or not leads.is_set():
            end.close()
            return
        end.sendall(b"welcome")
        agents[name] = end
        note(f"joined {name}")
        try:
            word = end.recv(100)
        except OSError:
            word = b""
        if agents.pop(name, None) is not None:
            note(f"{'left' if word == b'leave' else 'lost'} {name}")
            end.close()

    def accept() -> None:
        while True:
            end, _ = server.accept()
            threading.Thread(target=receive, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    if standby:
        note(f"standby {os.environ['SLURMD_NODENAME']}")
        while len(calls) < 2:
            if over.is_set():
                return 0
            time.sleep(0.1)
        with (own / "log.jsonl").open("a") as file:
            file.write('{"time_s": 0.0, "event": "take over"}\n')
    leads.set()
    step = int(saved.read_text()) if saved.exists() else 0
    note(f"supervisor {os.getpid()} of {processes} from {step}")
    while not asked.is_set() and step < int((folder / "most").read_text()):
        time.sleep(0.1)
        step += bool(agents)
    # Python restores the default handlers at exit, so another signal would kill it
    # then.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    new = folder / "saved.new"
    new.write_text(str(step))
    new.rename(saved)
    note(f"{'suspended' if asked.is_set() else 'done'} at {step}")
    for end in list(agents.values()):
        end.sendall(b"end")
    return 75 if asked.is_set() else 0


def work(address: str, folder: pathlib.Path) -> int:
    """Stays connected until the run ends or the agent is told to leave."""
    name, connected = os.environ["SLURMD_NODENAME"], None
    if (folder / "fail").exists():
        return 1

    def leave(*_: object) -> None:
        if connected is not None:
            connected.sendall(b"leave")
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    calls, state = address.split(","), "new"
    end = time.monotonic() + 10
    while time.monotonic() < end:
        host, port = calls[0].rsplit(":", 1)
        try:
            connected = socket.create_connection((host, int(port)), 2)
            connected.sendall(f"{state} {name}".encode())
            connected.settimeout(None)
            if connected.recv(len("welcome")) == b"welcome":
                state = "lost"
                if connected.recv(100) == b"end":
                    tell_end(calls[1:])
                    return 0
                end = time.monotonic() + 10
        except OSError:
            pass
        calls.append(calls.pop(0))
        time.sleep(0.2)
    print("no supervisor", file=sys.stderr)
    return 1


def tell_end(standbys: list[str]) -> None:
    """Tells standbys that the run has ended."""
    for call in standbys:
        host, port = call.rsplit(":", 1)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), 2) as end,
        ):
            end.sendall(b"over")


if __name__ == "__main__":
    sys.exit(main())
