"""A process that hosts JAX's coordination services for the workers of a run.

Each set of processes that train together (a world) has its own service. The services
run in a process of their own and not in the supervisor, because workers must survive
the supervisor's death. This process ends after all workers have ended. JAX's services
check no secret, so they listen only on loopback. Workers on other hosts connect to a
service through a `Door`, a TLS listener that forwards bytes. The supervisor writes
commands to stdin, one line of JSON each: ``open`` starts a service for a number of
processes, ``fill`` connects in place of processes that died before they connected,
``close`` ends a service that no process uses any more, and ``ping`` only requests an
answer.
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

# The class by which the supervisor controls the process that hosts the services.

# Seconds between two ``ping`` commands, and the longest time that the process may take
# to start.
_ASK_S, _START_S = 2.0, 120.0
_TRIES = 3


class ServiceProcess:
    """Starts the process that hosts services, restarts it, and sends it commands.

    Attributes:
      up: whether the process has started and answered.
    """

    def __init__(self, silent_s: float, network: Network) -> None:
        """Starts no process yet.

        Args:
          silent_s: longest time without an answer before the process is killed.
          network: addresses and secret with which workers connect to the process.
        """
        self._silent_s, self._network = silent_s, network
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._heard_s = self._asked_s = 0.0
        self.up = False

    def start(self) -> None:
        """Starts the process unless it is running."""
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
        """The identity of the process; None: the process does not run."""
        child = self._child
        if child is None or child.poll() is not None:
            return None
        return ProcessId.of(child.pid)

    def has_died(self) -> bool:
        """Whether the process has died since the last call; kills a silent one."""
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
          generation: number of the world; each new world gets a higher number.
          processes: the processes that will connect to the service.

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
        """Connects to a world's service in place of the dead processes ``ranks``."""
        self._tell(kind="fill", generation=generation, ranks=ranks)

    def close(self, generation: int) -> None:
        """Ends the service of a world that all processes have left."""
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


# Seconds within which all processes of a world must connect to its service. XLA ends a
# process that does not connect in time.
_CONNECT_S = 50


class Services:
    """The coordination services of all worlds, by the worlds' numbers."""

    def __init__(self) -> None:
        """Starts without services."""
        # This import loads JAX. It is not at the top of the module, because the
        # supervisor imports the module and must not load JAX.
        from autopar_passes import jax_processes

        self._jax, self._network = jax_processes, Network.of_environment()
        self._running: dict[int, tuple[str, Any]] = {}
        self._doors: dict[int, Door] = {}
        # A process descriptor (pidfd) of each local worker that has used a service.
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
        """Answers, which shows that this process is alive."""
        return ""

    def fill(self, generation: int, ranks: list[int]) -> None:
        """Connects in place of dead processes, in background threads."""
        if generation not in self._running:
            return
        address = self._running[generation][0]

        for rank in ranks:
            given = address, rank, _CONNECT_S
            threading.Thread(
                target=self._jax.fill_place, args=given, daemon=True
            ).start()

    def close(self, generation: int) -> None:
        """Ends a service to which no process is connected."""
        if generation in self._running:
            _, service = self._running.pop(generation)
            if (door := self._doors.pop(generation, None)) is not None:
                door.close()
            service.shutdown()

    def wait_for_workers(self) -> None:
        """Returns once all processes that used a service are gone."""
        for descriptor in self._workers.values():
            members.has_ended(descriptor, wait_s=None)
        # A worker on another host is known only by its connection, which must end.
        alone_s = time.monotonic()
        while self._doors and time.monotonic() - alone_s < _CONNECT_S:
            if any(door.is_used for door in self._doors.values()):
                alone_s = time.monotonic()
            time.sleep(1.0)


class Door:
    """A TLS listener that connects workers with the secret to a loopback service.

    Attributes:
      address: address that workers connect to.
    """

    def __init__(self, service: str, network: Network) -> None:
        """Starts to listen.

        Args:
          service: address of the service.
          network: address to listen on and secret to require.
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
        """Stops listening, and ends the open connections."""
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
    """Runs commands until stdin ends, and hosts services until all workers are gone."""
    services = Services()
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("kind")
        answer = getattr(services, kind)(**command)
        if answer is not None:
            word = {"open": "address"}.get(kind, "answer")
            print(json.dumps({word: answer}), flush=True)
    services.wait_for_workers()
    os._exit(0)  # destructors would wait for the clients


if __name__ == "__main__":
    main()
