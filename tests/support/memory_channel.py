"""Simulates the processes of a world by threads of one process."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar import PlanError
from autopar.runtime import world
from autopar.runtime.key_values import KeyValueExchange
from autopar.runtime.world import World


class Store:
    """A key-value store like that of a coordination service, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.changed = threading.Condition()

    def key_value_increment(self, key: str, by: int) -> int:
        with self.changed:
            self.counts[key] += by
            return self.counts[key]

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1e3):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_try_get_bytes(self, key: str) -> bytes:
        with self.changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError("NOT_FOUND")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for found in [k for k in self.values if k.startswith(f"{key}/")]:
                del self.values[found]


class Memory:
    """The memory that all channels of a world share."""

    def __init__(self, count: int) -> None:
        self.store = Store()
        self.sent: list[bytes] = [b""] * count
        self.barrier = threading.Barrier(count, timeout=120)

    def exchange(self, process: int, data: bytes) -> list[bytes]:
        self.sent[process] = data
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found


@dataclasses.dataclass(frozen=True)
class MemoryChannel:
    """A channel between threads: gathers use a barrier, exchanges use the store."""

    memory: Memory
    process: int

    def broadcast(self, data: bytes) -> bytes:
        return self.memory.exchange(self.process, data)[0]

    def gather(self, data: bytes) -> list[bytes]:
        return self.memory.exchange(self.process, data)

    def _service(self) -> KeyValueExchange:
        count = len(self.memory.sent)
        lane = world.current_lane()
        return KeyValueExchange(self.memory.store, self.process, count, lane=lane)

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        return self._service().exchange(data, what)

    def tell(self, data: bytes) -> None:
        self._service().tell(data)


def everywhere(
    run: Callable[[World], Any], devices: Sequence[Any], count: int
) -> list[Any]:
    """The result of each simulated process, or the error that it raised."""
    memory = Memory(count)

    def one(process: int) -> Any:
        channel = MemoryChannel(memory, process)
        try:
            return run(World(tuple(devices), process, count, channel))
        except (PlanError, ZeroDivisionError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """The duration and the result of a function."""
    began = time.monotonic()
    found = run()
    return time.monotonic() - began, found
