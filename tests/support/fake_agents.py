"""Simulated agents of hosts, which record the orders that they receive."""

from __future__ import annotations

import threading
from typing import Any


class Agent:
    """The supervisor's or scheduler's end of a connection to a simulated agent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.is_open = True
        self._told = threading.Semaphore(0)
        self._says: list[Any] = []

    def send(self, kind: str, **data: Any) -> bool:
        self.sent.append((kind, data))
        return True

    def patience(self, seconds: float | None) -> None:
        pass

    def say(self, kind: str, **data: Any) -> None:
        """Adds a message that the supervisor will receive from the agent."""
        self._says.append({"kind": kind, **data})
        self._told.release()

    def receive(self) -> Any:
        self._told.acquire()
        return self._says.pop(0)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._says.append(None)
            self._told.release()

    def started(self) -> list[int]:
        return [data["worker"] for kind, data in self.sent if kind == "start"]
