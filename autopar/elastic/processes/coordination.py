"""The process that hosts the coordination services of all worlds.

It is apart from the supervisor, whose death workers must survive, and ends with the
workers. JAX's services know no secret, so they listen on loopback. Workers of other
hosts reach them through a door with TLS. Commands come as JSON lines on stdin: ``open``
a service for some processes, ``fill`` a world with processes that stand for those that
died before they connected, ``close`` a service that nobody uses any more, and ``ping``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from autopar.elastic.processes import members
from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.network import (
    End,
    Listener,
    Network,
    hang_up,
    pass_on,
    split_address,
)
from autopar.errors import RunError

# The supervisor's side of the process that hosts coordination services.

# How often it is asked whether it lives, and how long it may take to start.
_ASK_S, _START_S = 2.0, 120.0
_TRIES = 3


class ServiceProcess:
    """Starts the process, again where it has died, and gives it commands.

    Attributes:
      up: whether it has answered.
    """

    def __init__(self, silent_s: float, network: Network) -> None:
        """Has started none.

        Args:
          silent_s: longest without an answer before it is killed.
          network: on which workers reach it.
        """
        self._silent_s, self._network = silent_s, network
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._heard_s = self._asked_s = 0.0
        self.up = False

    def start(self) -> None:
        """Starts it where it does not run."""
        if self._child is not None and self._child.poll() is None:
            return
        child = subprocess.Popen(
            [sys.executable, "-m", "autopar.elastic.processes.coordination"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **self._network.variables(), "JAX_PLATFORMS": "cpu"},
        )
        self._child, self._answers, self.up = child, queue.SimpleQueue(), False
        self._heard_s = time.monotonic() + _START_S
        threading.Thread(
            target=self._read, args=(child, self._answers), daemon=True
        ).start()

    def _read(
        self, child: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]
    ) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if child is self._child:
                self._heard_s, self.up = time.monotonic(), True
            with contextlib.suppress(ValueError, KeyError):
                answers.put(json.loads(line)["address"])
        answers.put(None)

    @property
    def process(self) -> ProcessId | None:
        """Which process it is; None: it does not run."""
        child = self._child
        if child is None or child.poll() is not None:
            return None
        return ProcessId.of(child.pid)

    def has_died(self) -> bool:
        """Whether it has ended by itself, said once; a silent one is killed."""
        child, now = self._child, time.monotonic()
        if child is None:
            return False
        if child.poll() is not None:
            self._child = None
            return True
        if now - self._heard_s > self._silent_s:
            child.kill()
        elif now - self._asked_s > _ASK_S:
            self._asked_s = now
            self._tell(kind="ping")
        return False

    def open(self, generation: int, processes: Sequence[ProcessId | None]) -> str:
        """Starts the service of a world; returns its address.

        Args:
          generation: number of the world.
          processes: that will connect.

        Raises:
          RunError: the process does not start.
        """
        known = [None if x is None else x.to_data() for x in processes]
        for _ in range(_TRIES):
            self.start()
            self._tell(kind="open", generation=generation, processes=known)
            limit_s = max(self._silent_s, self._heard_s - time.monotonic())
            with contextlib.suppress(queue.Empty):
                if (address := self._answers.get(timeout=limit_s)) is not None:
                    return address
            self.stop()
        raise RunError(
            f"the coordination service did not start in {_TRIES} attempts: run "
            "`python -m autopar.elastic.processes.coordination` to see why."
        )

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Lets a world connect whose processes of these ranks are gone."""
        self._tell(kind="fill", generation=generation, ranks=ranks)

    def close(self, generation: int) -> None:
        """Ends the service of a world that all have left."""
        self._tell(kind="close", generation=generation)

    def stop(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def _tell(self, **command: Any) -> None:
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.write(json.dumps(command) + "\n")
                child.stdin.flush()


# How long a world may take to connect: XLA ends a process that does not get so far.
_CONNECT_S = 50


class Services:
    """The services by generation."""

    def __init__(self) -> None:
        """Hosts none."""
        # The supervisor, which shares this module, starts without JAX.
        from autopar_passes import jax_processes

        self._jax, self._network = jax_processes, Network.of_environment()
        self._running: dict[int, tuple[str, Any]] = {}
        self._doors: dict[int, Door] = {}
        # A descriptor of each worker that used a service.
        self._workers: dict[ProcessId, int] = {}

    def open(self, generation: int, processes: list[Any]) -> str:
        """Starts a service and returns its address."""
        self._watch(processes)
        address, service = self._jax.open_service(len(processes))
        self._running[generation] = address, service
        if self._network.is_local:
            return address
        self._doors[generation] = door = Door(address, self._network)
        return door.address

    def _watch(self, processes: list[Any]) -> None:
        for worker, descriptor in list(self._workers.items()):
            if members.has_ended(descriptor):
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
                target=self._jax.fill_place, args=given, daemon=True
            ).start()

    def close(self, generation: int) -> None:
        """Ends a service that no process is connected to."""
        if generation in self._running:
            _, service = self._running.pop(generation)
            if (door := self._doors.pop(generation, None)) is not None:
                door.close()
            service.shutdown()

    def wait_for_workers(self) -> None:
        """Returns once all processes that used a service are gone."""
        for descriptor in self._workers.values():
            members.has_ended(descriptor, wait_s=None)
        # Workers of other hosts are known by their connections alone.
        alone_s = time.monotonic()
        while self._doors and time.monotonic() - alone_s < _CONNECT_S:
            if any(door.is_used for door in self._doors.values()):
                alone_s = time.monotonic()
            time.sleep(1.0)


class Door:
    """Passes connections of workers, which have the secret, to a service on loopback.

    Attributes:
      address: where workers connect to.
    """

    def __init__(self, service: str, network: Network) -> None:
        """Opens.

        Args:
          service: address of the service.
          network: on which it is reached.
        """
        self._service = split_address(service)
        self._lock = threading.Lock()
        self._ends: list[End] = []
        self._listener: Listener = network.listen(self._serve)
        self.address = network.address(self._listener.port)

    @property
    def is_used(self) -> bool:
        """Whether a worker is connected."""
        with self._lock:
            return bool(self._ends)

    def close(self) -> None:
        """Takes no more connections, and ends those there are."""
        self._listener.close()
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            hang_up(end)

    def _serve(self, end: End) -> None:
        try:
            service = socket.create_connection(self._service, _CONNECT_S)
        except OSError:
            end.close()
            return
        service.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        service.settimeout(None)
        with self._lock:
            self._ends.append(end)
        threading.Thread(target=pass_on, args=(service, end), daemon=True).start()
        pass_on(end, service)
        with self._lock:
            self._ends.remove(end)
        end.close()
        service.close()


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
