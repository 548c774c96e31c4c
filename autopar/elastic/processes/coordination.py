"""The process that hosts the coordination services of all worlds.

It is apart from the supervisor, whose death workers must survive: JAX ends a process
that loses its coordination service. Commands come as JSON lines on stdin: ``open`` a
service for so many processes, ``fill`` a world with processes that stand for those
that died before they connected, and ``close`` a service that nobody uses any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from autopar_passes import jax_processes

_POLL_S = 1.0


class Services:
    """The services by generation."""

    def __init__(self) -> None:
        """Hosts none."""
        self._running: dict[int, tuple[str, Any]] = {}
        self._pids: set[int] = set()
        self._fillers: list[Any] = []

    def open(self, generation: int, count: int, pids: list[int]) -> str:
        """Starts a service and returns its address."""
        self._pids |= set(pids)
        for attempt in range(8):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            try:
                service = jax_processes.coordination_service(address, count)
            except Exception:
                if attempt == 7:
                    raise
                continue
            self._running[generation] = address, service
            return address
        raise AssertionError

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Connects in the place of processes that are gone, without waiting."""
        if generation not in self._running:
            return
        address = self._running[generation][0]

        def connect(rank: int) -> None:
            with contextlib.suppress(Exception):
                client = jax_processes.coordination_client(address, rank, connect_s=5)
                self._fillers.append(client)
                client.connect()
                client.shutdown()

        for rank in ranks:
            threading.Thread(target=connect, args=(rank,), daemon=True).start()

    def close(self, generation: int) -> None:
        """Ends a service that no process is connected to."""
        if generation in self._running:
            _, service = self._running.pop(generation)
            service.shutdown()

    def wait_for_workers(self) -> None:
        """Returns once all processes that used a service are gone."""
        while any(os.path.exists(f"/proc/{pid}") for pid in self._pids):
            time.sleep(_POLL_S)


def main() -> None:
    """Obeys until stdin ends, and hosts until nobody needs it."""
    services = Services()
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("kind")
        answer = getattr(services, kind)(**command)
        if kind == "open":
            print(json.dumps({"address": answer}), flush=True)
    services.wait_for_workers()
    os._exit(0)  # destructors of services wait for clients


if __name__ == "__main__":
    main()
