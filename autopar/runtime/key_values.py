"""Exchanges between processes through the key-value store of `jax.distributed`.

The store lives in the coordination service, so that a process which has no program to
run, or which has failed, can still be heard.
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

# How long one request waits; Ctrl-C is noticed in between. One that may be called off
# asks more often.
_POLL_MS, _QUICK_MS = 500, 50
# After so many seconds a warning says that something is waited for.
_PATIENCE_S = 60
_ROOT = "autopar"


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValueExchange:
    """Exchanges of one process with the others, by number.

    Every process counts its own calls, in the store. Process 0 collects what the others
    pass and publishes all of it; a process that fails publishes that in its place.

    Attributes:
      client: of the coordination service.
      index: number of this process.
      count: number of processes.
      check: is called while this waits; raises an error to end the wait.
      lane: whose numbers these are (`autopar.runtime.world`).
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
        """Returns what each process passes; of failed ones alone if any has failed.

        Args:
          data: what this process passes.
          what: is being done; for a warning.

        Raises:
          RunError: the coordination service is gone.
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
        # Who has passed something now has read everything before.
        self.client.key_value_delete(f"{self._root}/{number - 1}")
        return self._read_published(number, what)

    def tell(self, data: bytes) -> None:
        """Passes a failure to the next exchange, and does not wait for the others."""
        # A service that is gone tells the others by itself.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._publish(self._next(), {self.index: data})

    def _next(self) -> int:
        return self.client.key_value_increment(f"{self._root}/calls/{self.index}", 1)

    def _publish(self, number: int, found: dict[int, bytes]) -> None:
        """Publishes unless somebody has failed and published before."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            data = msgspec.msgpack.encode(found)
            self.client.key_value_set_bytes(f"{self._root}/{number}/all", data)

    def _wait(self, number: int, process: int, what: str) -> bytes | None:
        """What a process passes; None if anybody has failed."""
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
        """A value, once it is there; None if it is not there in time."""
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
