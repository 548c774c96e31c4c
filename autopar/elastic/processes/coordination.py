"""The process that hosts the coordination services of all worlds.

It is apart from the supervisor, whose death workers must survive, and ends with the
workers. Commands come as JSON lines on stdin: ``open`` a service for some processes,
``fill`` a world with processes that stand for those that died before they connected,
``close`` a service that nobody uses any more, and ``ping``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from autopar.elastic.processes import identity
from autopar.elastic.processes.identity import ProcessId
from autopar_passes import jax_processes

# How long a world may take to connect: XLA ends a process that does not get so far.
_CONNECT_S = 50


class Services:
    """The services by generation."""

    def __init__(self) -> None:
        """Hosts none."""
        self._running: dict[int, tuple[str, Any]] = {}
        # A descriptor of each worker that used a service.
        self._workers: dict[ProcessId, int] = {}

    def open(self, generation: int, processes: list[Any]) -> str:
        """Starts a service and returns its address."""
        self._watch(processes)
        address, service = jax_processes.open_service(len(processes))
        self._running[generation] = address, service
        return address

    def _watch(self, processes: list[Any]) -> None:
        for worker, descriptor in list(self._workers.items()):
            if identity.ended(descriptor):
                os.close(self._workers.pop(worker))
        for worker in map(ProcessId.from_data, processes):
            if worker is None or worker in self._workers:
                continue
            if (descriptor := worker.open()) is not None:
                self._workers[worker] = descriptor

    def ping(self) -> str:
        """Says that this process lives."""
        return ""

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Connects in the place of processes that are gone, without waiting."""
        if generation not in self._running:
            return
        address = self._running[generation][0]

        for rank in ranks:
            given = address, rank, _CONNECT_S
            threading.Thread(
                target=jax_processes.fill_place, args=given, daemon=True
            ).start()

    def close(self, generation: int) -> None:
        """Ends a service that no process is connected to."""
        if generation in self._running:
            _, service = self._running.pop(generation)
            service.shutdown()

    def wait_for_workers(self) -> None:
        """Returns once all processes that used a service are gone."""
        for descriptor in self._workers.values():
            identity.ended(descriptor, wait_s=None)


def main() -> None:
    """Obeys until stdin ends, and hosts until nobody needs it."""
    services = Services()
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("kind")
        answer = getattr(services, kind)(**command)
        if answer is not None:
            word = {"open": "address"}.get(kind, "answer")
            print(json.dumps({word: answer}), flush=True)
    services.wait_for_workers()
    os._exit(0)  # destructors of services wait for clients


if __name__ == "__main__":
    main()
