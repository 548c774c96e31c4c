"""A supervisor with simulated workers and a clock that does not advance."""

from __future__ import annotations

import pathlib
from typing import Any

from autopar.elastic.processes.console import Console
from autopar.elastic.processes.members import MemberLimits
from autopar.elastic.processes.supervisor import Supervisor


class Fake:
    """Simulated workers that do nothing, and a clock that does not advance."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        self._console = Console(pathlib.Path("run"))
        self.printed: list[str] = []
        self.rows = 0
        self.sent: list[tuple[int, str, dict[str, Any]]] = []
        self.killed: list[int] = []
        self.started: list[int] = []
        self.said: list[Any] = []
        self.recorded: list[Any] = []
        self.agrees = True
        self.filled: list[tuple[int, list[int]]] = []
        self.supervisor = Supervisor(MemberLimits(**limits), self, lambda: self.now)
        self.supervisor.begin()

    def spawn(self, worker: int) -> None:
        self.started.append(worker)

    def send(self, worker: int, kind: str, **data: Any) -> None:
        self.sent.append((worker, kind, data))

    def kill(self, worker: int) -> None:
        self.killed.append(worker)

    def open(self, generation: int, pids: list[int]) -> str:
        return f"127.0.0.1:{generation}"

    def fill(self, generation: int, ranks: list[int]) -> None:
        self.filled.append((generation, ranks))

    def close(self, generation: int) -> None:
        pass

    def on_measured(self, worker: int, message: Any) -> None:
        self.said.append((worker, message))

    def dropped_cluster(self, reason: str) -> None:
        self.said.append(reason)

    def log(self, event: str, **data: Any) -> None:
        self.printed += self._console.lines(event, data)

    def record(self, notes: Any) -> bool:
        self.recorded.append(notes)
        return self.agrees

    def formed_world(self, message: Any) -> None:
        self.said.append(message)

    def heard(self, event: Any) -> None:
        self.said.append(event)

    def tell(self, worker: int, kind: str, **data: Any) -> None:
        """Passes a message of a worker to the supervisor."""
        self.supervisor.take(worker, {"kind": kind, "worker": worker, **data})

    def ready(self, *workers: int, holds: Any = None) -> None:
        for worker in workers:
            self.tell(
                worker,
                "ready",
                generation=-1,
                holds=holds or {},
                address=f"127.0.0.1:{9000 + worker}",
                pid=100 + worker,
                devices=1,
                rows=self.rows,
            )

    def formed(self, *workers: int, step: int = 0) -> None:
        generation = self.supervisor.generation
        for worker in workers:
            self.tell(worker, "formed", generation=generation, step=step)

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        """The orders of a kind: the worker to which each was sent, and its data."""
        return [(w, data) for w, k, data in self.sent if k == kind]

    def world(self) -> list[int]:
        """The workers of the last world, in the order of their ranks."""
        return [m["worker"] for m in self.of("form")[-1][1]["members"]]


def holding(step: int, generation: int, *tiles: Any, size: int = 4) -> dict[str, Any]:
    return {
        f"{step}.{generation}": {
            "step": step,
            "shapes": {"w": [[size], "float32"]},
            "tiles": {"w": list(tiles)},
            "extra": {"position": 8 * step},
        }
    }


WHOLE, LEFT, RIGHT = [[0], [4]], [[0], [2]], [[2], [4]]


def running(count: int = 2, **limits: Any) -> Fake:
    """A run whose first world trains."""
    fake = Fake(processes=count, **limits)
    fake.ready(*range(count))
    fake.formed(*range(count))
    return fake
