"""Replaces autopar in Slurm jobs: a supervisor and agents that train nothing.

Usage: slurm_stand_in.py secret FILE | run ... --folder DIR ... | worker ...
| workers ...

While an agent is connected, the supervisor counts ten steps per second, up to the
number in the file ``most`` of the folder. It writes to ``events`` when agents connect
or leave. On SIGUSR1 it writes the number of steps to ``saved``. Agents fail if a file
``fail`` exists.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--slots")
    parser.add_argument("script", nargs="*")
    given = parser.parse_args(words)
    if command == "run":
        return supervise(given.listen, pathlib.Path(given.folder), given.processes)
    return work(given.supervisor, pathlib.Path(given.folder))


def supervise(listen: str, folder: pathlib.Path, processes: str) -> int:
    """Counts steps while agents are connected."""
    events, saved = folder / "events", folder / "saved"

    def note(text: str) -> None:
        with events.open("a") as file:
            file.write(f"{text}\n")

    asked = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    host, port = listen.rsplit(":", 1)
    server = socket.create_server((host, int(port)))
    agents: dict[str, socket.socket] = {}

    def receive(end: socket.socket) -> None:
        name = end.recv(100).decode()
        if not name:
            return  # The peer only checked whether somebody listens.
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
    host, port = address.rsplit(":", 1)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            connected = socket.create_connection((host, int(port)), 2)
            connected.sendall(name.encode())
            connected.settimeout(None)
            if connected.recv(100) == b"end":
                return 0
            end = time.monotonic() + 10
        except OSError:
            pass
        time.sleep(0.2)
    print("no supervisor", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
