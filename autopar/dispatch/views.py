"""What a policy sees of jobs that run on a real cluster.

It is what it sees in a simulation: a policy knows of no backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.dispatch.backend import ClusterNode
from autopar.dispatch.store import JobRecord, Store
from autopar.goodput.curves import corrected
from autopar.scheduler.jobs import Allocation, Curve, JobView, Linear, Shape
from autopar.scheduler.nodes import Nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveTimes:
    """What moves cost, in seconds.

    Attributes:
      start_s: from a start, or another start, to the first step.
      change_s: the pause when a job that runs gets other devices.
    """

    start_s: float = 20.0
    change_s: float = 2.0

    def move_s(self, old: Shape, new: Shape) -> float:
        """Seconds of a move from a shape, (0, 0) for none, to another."""
        del new
        return self.start_s if old == (0, 0) else self.change_s


# What holds where nothing is measured.
MOVES = MoveTimes()


class Numbering:
    """The numbers by which policies know nodes; a node keeps its number."""

    def __init__(self, store: Store, places: Sequence[ClusterNode]) -> None:
        """Numbers the nodes that are there, and remembers those that were."""
        there = {
            store.number(place.name, place.devices, place.kind) for place in places
        }
        known = store.nodes()
        self._names = [name for name, _, _ in known]
        self.nodes = Nodes(
            tuple(d if k in there else 0 for k, (_, d, _) in enumerate(known)),
            tuple(kind for _, _, kind in known),
        )

    def allocation(self, places: Mapping[str, int]) -> Allocation:
        """The numbers of the nodes of each device."""
        numbers = sorted((self._names.index(name), n) for name, n in places.items())
        return tuple(k for k, n in numbers for _ in range(n))

    def places(self, allocation: Allocation) -> dict[str, int]:
        """The names of the nodes, and how many devices of each."""
        found: dict[str, int] = {}
        for number in allocation:
            name = self._names[number]
            found[name] = found.get(name, 0) + 1
        return found

    def there(self, places: Mapping[str, int]) -> dict[str, int]:
        """Those of some places whose nodes are there."""
        return {
            name: n
            for name, n in places.items()
            if self.nodes.devices[self._names.index(name)] >= n
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices that are there."""
        pairs = zip(self.nodes.kinds, self.nodes.devices, strict=True)
        return tuple(dict.fromkeys(kind for kind, n in pairs if n))


@dataclasses.dataclass(frozen=True, slots=True)
class AtLeast:
    """A curve of a job that cannot use fewer devices than so many."""

    curve: Curve
    least: int

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second; 0 on too few devices."""
        found = self.curve.goodput(nodes, devices)
        return np.where(np.asarray(devices) >= self.least, found, 0.0)


def view_of(
    job: JobRecord,
    now_s: float,
    kinds: tuple[str, ...],
    moves: MoveTimes,
    lines: Sequence[Mapping[str, Any]] = (),
) -> JobView:
    """What a policy sees of a job.

    Its curve is the planner's, corrected by what was measured: seconds, batches and the
    noise scale. Without one every device helps as much, and progress is device-seconds.

    Args:
      job: the job.
      now_s: seconds since the scheduler's start.
      kinds: of the devices that are there.
      moves: what moves cost.
      lines: of its progress.
    """
    handed, spec = job.handed, job.handed.spec
    curve = handed.curve and corrected(handed.curve, lines, job.noise_scale)
    most = max(handed.most(kinds, curve), 1)
    submitted_s = job.submitted_s
    shared: dict[str, Any] = {
        "name": job.name,
        "application": handed.application,
        "submitted_s": submitted_s,
        "age_s": max(now_s - submitted_s, 0.0),
        "served_device_s": job.served_device_s,
        "restarts": max(job.moves, 0),
        "asked": spec.devices,
        "most": most,
        "tried": most,
        "measured": True,
        "restart_s": moves.start_s,
        "guaranteed": spec.guaranteed,
        "user": handed.user,
        "priority": spec.priority,
        "least": spec.min,
        "moves": moves.move_s,
    }
    if curve is None:
        linear = AtLeast(Linear(), spec.min)
        return JobView(**shared, curve=linear, progress=job.served_device_s)
    by_kind = {kind: AtLeast(curve.on(kind), spec.min) for kind in kinds}
    return JobView(
        **shared,
        curve=by_kind[kinds[0]],
        by_kind=by_kind,
        # The curve counts rows of the base batch; a batch that follows is larger.
        progress=float(job.position if job.worth is None else job.worth),
    )
