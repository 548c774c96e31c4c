"""The channel between the processes of a world that may break at any time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.runtime.key_values import KeyValueExchange
from autopar.runtime.world import JaxChannel


@dataclasses.dataclass(frozen=True, slots=True)
class WorldChannel:
    """As `JaxChannel`, but an exchange ends when the world is left.

    Attributes:
      client: of the world's coordination service.
      index: number of this process.
      count: number of processes.
      check: raises an error once the world is to be left.
    """

    client: Any
    index: int
    count: int
    check: Callable[[], None]

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`; what is broken ends collectives with an error."""
        return JaxChannel().broadcast(data)

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        return JaxChannel().gather(data)

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        return self._store().exchange(data, what)

    def tell(self, data: bytes) -> None:
        """See `Channel`."""
        self._store().tell(data)

    def _store(self) -> KeyValueExchange:
        return KeyValueExchange(self.client, self.index, self.count, self.check)
