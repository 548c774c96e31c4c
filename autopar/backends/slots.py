"""Chooses the node on which each worker of a run starts.

`Places` uses all nodes of a Ray cluster. `Slots` uses only the places on nodes that a
scheduler has given a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from autopar.elastic.processes.launching import Launcher, Reports
from autopar.elastic.processes.members import ProcessId

# After a node has lost a worker, it gets no new workers for this many seconds, because
# Ray lists a dead node as alive for about 15 s.
_SHUNNED_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A node that is alive.

    Attributes:
      name: Ray's id of the node.
      address: network address of the node's machine.
      room: the largest number of workers that fit on the node.
    """

    name: str
    address: str
    room: int


def live_nodes(
    listed: Sequence[Mapping[str, Any]],
    resources: Mapping[str, float],
    address: str | None,
    draining: Collection[str] = (),
) -> tuple[list[LiveNode], int]:
    """Selects the nodes that can run workers.

    Args:
      listed: the nodes as ``ray.nodes()`` returns them.
      resources: kind of a resource -> how much of it a worker takes.
      address: address of the machine whose nodes to return; None: all machines.
      draining: ids of the nodes that Ray drains; they take no more workers.

    Returns:
      The nodes of this machine that can run workers, and how many such nodes other
      machines have.
    """
    nodes = [
        LiveNode(
            name=x["NodeID"],
            address=x["NodeManagerAddress"],
            room=min(
                int(x["Resources"].get(kind, 0) // much)
                for kind, much in resources.items()
            ),
        )
        for x in listed
        if x["Alive"] and x["NodeID"] not in draining
    ]
    able = [x for x in nodes if x.room > 0]
    here = [x for x in able if address in (None, x.address)]
    return here, len(able) - len(here)


class Placer(Protocol):
    """Chooses the node of each worker."""

    def update(self, nodes: Sequence[LiveNode]) -> int:
        """Takes the nodes that are alive now; returns how many more workers to
        start.
        """
        ...

    def place(self, worker: int) -> LiveNode | None:
        """Chooses a node for a worker; None if no node has room."""
        ...

    def on_end(self, worker: int, *, lost: bool) -> bool:
        """Removes a worker that has ended; returns whether another may replace it."""
        ...

    def drain(self, names: Collection[str]) -> Sequence[tuple[int, bool]]:
        """Takes the ids of the nodes that Ray drains now.

        Returns:
          Each worker that has to leave, and whether another node has room for its
          replacement; a worker is returned once.
        """
        ...


class Places:
    """The nodes of a Ray cluster, and the workers on each node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts without nodes."""
        self._clock = clock
        self._nodes: dict[str, LiveNode] = {}
        self._seen: set[str] = set()
        self._used: set[str] = set()
        self._lost_s: dict[str, float] = {}
        self._of: dict[int, str] = {}
        self._draining: set[str] = set()

    def update(self, nodes: Sequence[LiveNode]) -> int:
        """Takes the nodes that are alive now; returns how many of them are new."""
        self._nodes = {x.name: x for x in nodes}
        new = self._nodes.keys() - self._seen
        self._seen |= new
        return len(new)

    def place(self, worker: int) -> LiveNode | None:
        """Chooses the node with the fewest workers; None if no node has room."""
        counts = self._counts()
        free = [x for x in self._open() if counts.get(x.name, 0) < x.room]
        if not free:
            return None
        node = min(free, key=lambda x: counts.get(x.name, 0))
        self._of[worker] = node.name
        self._used.add(node.name)
        return node

    def on_end(self, worker: int, *, lost: bool) -> bool:
        """Removes a worker that has ended.

        Args:
          worker: number of the worker.
          lost: whether its actor was lost, perhaps together with its node.

        Returns:
          Whether another worker can replace it: it was lost, and some node has never
          had a worker.
        """
        name = self._of.pop(worker, None)
        if not lost:
            return False
        if name is not None:
            self._lost_s[name] = self._clock()
        return any(x.name not in self._used for x in self._open())

    def drain(self, names: Collection[str]) -> list[tuple[int, bool]]:
        """See `Placer`; `update` must have got the nodes without the drained ones."""
        new, self._draining = set(names) - self._draining, set(names)
        leaving = sorted(worker for worker, name in self._of.items() if name in new)
        counts = self._counts()
        room = sum(max(0, x.room - counts.get(x.name, 0)) for x in self._open())
        return [(worker, place < room) for place, worker in enumerate(leaving)]

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


class Slots:
    """The places on nodes that a scheduler has given a job, and the worker at each.

    Unlike `Places`, this `Placer` uses only these places. `Slots` ignores nodes that
    join the cluster.
    """

    def __init__(self, places: Mapping[str, int], file: pathlib.Path | None) -> None:
        """Starts with these places and no workers.

        Args:
          places: name of a node -> number of the job's workers on it.
          file: a file in which to store the place of each worker, for a restarted
            supervisor; None: places are not stored.
        """
        self._file = file
        self._places = dict(places)
        self._of: dict[int, str] = {}
        self._lock = threading.Lock()
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._of = {int(k): v for k, v in json.loads(file.read_text()).items()}

    def update(self, nodes: Sequence[LiveNode]) -> int:
        """Returns 0: on new nodes no workers start, unless a scheduler gives the job
        places there.
        """
        del nodes
        return 0

    def place(self, worker: int) -> LiveNode | None:
        """Gives a worker a place; None if all places are taken.

        The worker keeps the place until it ends.
        """
        with self._lock:
            if worker not in self._of:
                counts = self._counts()
                free = [k for k, n in self._places.items() if counts.get(k, 0) < n]
                if not free:
                    return None
                self._of[worker] = free[0]
                self._write()
            return LiveNode(name=self._of[worker], address="", room=1)

    def drain(self, names: Collection[str]) -> list[tuple[int, bool]]:
        """Returns no worker: the scheduler moves its jobs away from draining nodes."""
        del names
        return []

    def on_end(self, worker: int, *, lost: bool = False) -> bool:
        """Removes a worker that has ended; returns False, as no other replaces it."""
        del lost
        with self._lock:
            if self._of.pop(worker, None) is not None:
                self._write()
        return False

    def move(self, places: Mapping[str, int]) -> list[int]:
        """Sets new places; returns the workers that have no place any more."""
        with self._lock:
            self._places = dict(places)
            left, leaving = dict(places), list[int]()
            for worker in sorted(self._of):
                name = self._of[worker]
                if left.get(name, 0) > 0:
                    left[name] -= 1
                else:
                    leaving.append(worker)
            # The places of these workers are free for others at once, before they have
            # ended.
            self._leave(leaving)
            return leaving

    def _leave(self, workers: Sequence[int]) -> None:
        for worker in workers:
            del self._of[worker]
        self._write()

    def forget(self) -> None:
        """Frees all places, for a new run."""
        with self._lock:
            self._leave(list(self._of))

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name in self._of.values():
            counts[name] = counts.get(name, 0) + 1
        return counts

    def _write(self) -> None:
        if self._file is None:
            return
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps({str(k): v for k, v in self._of.items()}))
        temporary.replace(self._file)


class PlacedLauncher:
    """Starts workers by another launcher, each at a place in `Slots`."""

    def __init__(self, base: Launcher, slots: Slots) -> None:
        """Wraps a launcher.

        Args:
          base: the launcher that starts the workers. If it chooses nodes, it must use
            the same ``slots``.
          slots: the places of the workers.
        """
        self._base, self._slots = base, slots
        self._reports: Reports | None = None

    def begin(self, run: str, reports: Reports) -> None:
        """See `Launcher`."""
        self._reports = reports
        self._base.begin(run, self)

    def start(self, worker: int, environment: Mapping[str, str]) -> ProcessId | None:
        """See `Launcher`; if all places are taken, reports at once that the worker
        ended.
        """
        if self._slots.place(worker) is None:
            self.on_end(worker, None)
            return None
        return self._base.start(worker, environment)

    def watch(self, worker: int, process: ProcessId | None) -> bool:
        """See `Launcher`."""
        found = self._base.watch(worker, process)
        if not found:
            self._slots.on_end(worker)
        return found

    def signal(self, worker: int, number: int) -> None:
        """See `Launcher`."""
        self._base.signal(worker, number)

    def close(self) -> None:
        """See `Launcher`."""
        self._base.close()

    def move(self, places: Mapping[str, int]) -> Sequence[int]:
        """See `Placing`."""
        return self._slots.move(places)

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """See `Reports`."""
        self._slots.on_end(worker)
        assert self._reports is not None
        self._reports.on_end(worker, code, spare=spare)

    def on_join(self, machines: int) -> None:
        """See `Reports`; does nothing, as only the scheduler gives places on new
        nodes.
        """

    def on_leave(self, worker: int, *, spare: bool) -> None:
        """See `Reports`."""
        assert self._reports is not None
        self._reports.on_leave(worker, spare=spare)
