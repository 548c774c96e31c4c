"""Which node of a Ray cluster takes the next worker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

# Ray shows a dead node as alive for about 15 s: one that lost a worker is left alone.
_SHUNNED_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A node that is alive.

    Attributes:
      name: Ray's id.
      address: of its machine.
      room: how many workers it may have.
    """

    name: str
    address: str
    room: int


def alive(
    listed: Sequence[Mapping[str, Any]], cpus: float, address: str
) -> tuple[list[LiveNode], int]:
    """The nodes that can take workers.

    Args:
      listed: as ``ray.nodes()`` says.
      cpus: CPUs that a worker needs.
      address: of the machine whose nodes are asked for: all processes of a run are on
        one machine.

    Returns:
      The nodes, and how many there are besides on other machines.
    """
    nodes = [
        LiveNode(
            name=x["NodeID"],
            address=x["NodeManagerAddress"],
            room=int(x["Resources"].get("CPU", 0) // cpus),
        )
        for x in listed
        if x["Alive"]
    ]
    able = [x for x in nodes if x.room > 0]
    here = [x for x in able if x.address == address]
    return here, len(able) - len(here)


class Placer(Protocol):
    """Says which node takes a worker."""

    def update(self, nodes: Sequence[LiveNode]) -> int:
        """Takes the nodes that are alive; returns how many workers more to take."""
        ...

    def place(self, worker: int) -> LiveNode | None:
        """Gives a worker a node; None: no room anywhere."""
        ...

    def on_end(self, worker: int, *, lost: bool) -> bool:
        """A worker has ended; returns whether another may take its place unasked."""
        ...


class Places:
    """The nodes, and the workers on them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows no nodes yet."""
        self._clock = clock
        self._nodes: dict[str, LiveNode] = {}
        self._seen: set[str] = set()
        self._used: set[str] = set()
        self._lost_s: dict[str, float] = {}
        self._of: dict[int, str] = {}

    def update(self, nodes: Sequence[LiveNode]) -> int:
        """Takes the nodes that are alive now; returns how many were never seen."""
        self._nodes = {x.name: x for x in nodes}
        new = self._nodes.keys() - self._seen
        self._seen |= new
        return len(new)

    def place(self, worker: int) -> LiveNode | None:
        """Gives a worker a node: that with fewest workers; None: no room anywhere."""
        counts = self._counts()
        free = [x for x in self._open() if counts.get(x.name, 0) < x.room]
        if not free:
            return None
        node = min(free, key=lambda x: counts.get(x.name, 0))
        self._of[worker] = node.name
        self._used.add(node.name)
        return node

    def on_end(self, worker: int, *, lost: bool) -> bool:
        """A worker has ended.

        Args:
          worker: its number.
          lost: whether its actor died, and perhaps its node.

        Returns:
          Whether a worker was lost and there is a node that never had one.
        """
        name = self._of.pop(worker, None)
        if not lost:
            return False
        if name is not None:
            self._lost_s[name] = self._clock()
        return any(x.name not in self._used for x in self._open())

    def _open(self) -> list[LiveNode]:
        now = self._clock()
        return [
            x
            for x in self._nodes.values()
            if now - self._lost_s.get(x.name, -_SHUNNED_S) >= _SHUNNED_S
        ]

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name in self._of.values():
            counts[name] = counts.get(name, 0) + 1
        return counts
