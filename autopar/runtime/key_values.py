"""Exchanges between processes through the key-value store of `jax.distributed`.

The store is part of the coordination service, not of the devices. Therefore a process
that has failed, or that has no program to run, can still send messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import msgspec

from autopar.errors import RunError

# The longest wait of one request to the store, in milliseconds. Ctrl-C takes effect
# only between requests. The second, shorter time is for exchanges with a ``check``,
# which runs between requests.
_POLL_MS, _QUICK_MS = 500, 50
# Seconds of waiting for another process, after which a warning is given.
_PATIENCE_S = 60
_ROOT = "autopar"


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValueExchange:
    """Exchanges data of one process with all other processes, again and again.

    Exchanges are numbered: each process counts its calls, and calls with equal numbers
    belong to the same exchange. Process 0 collects the data of all processes and
    publishes them under one key. A process that fails publishes its failure under this
    key instead.

    Attributes:
      client: the client of the coordination service.
      index: number of this process.
      count: number of processes.
      check: called repeatedly during a wait; raises an error to end the wait.
      lane: a name that keeps the exchanges of different threads apart
        (`autopar.runtime.world`).
    """

    client: Any
    index: int
    count: int
    check: Callable[[], None] | None = None
    lane: str = ""

    @property
    def _root(self) -> str:
        return f"{_ROOT}/lanes/{self.lane}" if self.lane else _ROOT

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """Returns process number -> data; only the failures if a process has failed.

        Args:
          data: the data of this process.
          what: the work that this process does, named in the warning after a long wait.

        Raises:
          RunError: the coordination service has ended.
        """
        number = self._next()
        if self.index:
            self.client.key_value_set_bytes(f"{self._root}/{number}/{self.index}", data)
            return self._read_published(number, what)
        found = {0: data}
        for process in range(1, self.count):
            own = self._wait(number, process, what)
            if own is None:
                return self._read_published(number, what)
            found[process] = own
        self._publish(number, found)
        # A process that sent data for this exchange has read the results of all
        # earlier exchanges. So the results of the last exchange can be deleted.
        self.client.key_value_delete(f"{self._root}/{number - 1}")
        return self._read_published(number, what)

    def tell(self, data: bytes) -> None:
        """Sends a failure in place of data for the next exchange.

        Does not wait for the other processes.
        """
        # If the service has ended, the other processes notice this themselves.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._publish(self._next(), {self.index: data})

    def _next(self) -> int:
        return self.client.key_value_increment(f"{self._root}/calls/{self.index}", 1)

    def _publish(self, number: int, found: dict[int, bytes]) -> None:
        """Publishes an exchange's result, unless a failed process has published."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            data = msgspec.msgpack.encode(found)
            self.client.key_value_set_bytes(f"{self._root}/{number}/all", data)

    def _wait(self, number: int, process: int, what: str) -> bytes | None:
        """Waits for the data of a process; returns None if any process has failed."""
        for turn in range(1 << 30):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.client.key_value_try_get_bytes(f"{self._root}/{number}/all")
                return None
            found = self._get(f"{self._root}/{number}/{process}")
            if found is not None:
                return found
            self._complain(turn, f"process {process}", what)
        return None

    def _read_published(self, number: int, what: str) -> dict[int, bytes]:
        for turn in range(1 << 30):
            found = self._get(f"{self._root}/{number}/all")
            if found is not None:
                return msgspec.msgpack.decode(found, type=dict[int, bytes])
            self._complain(turn, "the others", what)
        return {}

    def _get(self, key: str) -> bytes | None:
        """Waits for a value; returns None if it does not arrive in time."""
        if self.check is not None:
            self.check()
        try:
            return self.client.blocking_key_value_get_bytes(key, self._poll_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise RunError(
                f"process {self.index} has lost the coordination service of "
                f"jax.distributed: {error}"
            ) from error

    @property
    def _poll_ms(self) -> int:
        return _POLL_MS if self.check is None else _QUICK_MS

    def _complain(self, turn: int, whom: str, what: str) -> None:
        if turn + 1 == _PATIENCE_S * 1000 // self._poll_ms:
            warnings.warn(
                f"process {self.index} has waited {_PATIENCE_S} s "
                f"for {whom} ({what}). Every process must call the same step, with "
                "arguments of the same shapes, as often.",
                stacklevel=2,
            )
