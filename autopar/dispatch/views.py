"""Converts jobs on a real cluster to the `JobView`s that a policy reads.

A policy reads the same views in a simulation, and knows nothing about backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.dispatch.backend import ClusterNode
from autopar.dispatch.store import JobRecord, Store
from autopar.goodput.curves import correct_curve
from autopar.scheduler.jobs import Allocation, Curve, JobView, Linear, Shape
from autopar.scheduler.nodes import Nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveTimes:
    """The costs of starts and moves, in seconds.

    Attributes:
      start_s: seconds from a start or restart of a job to its first step.
      change_s: seconds that a running job pauses when its devices change.
    """

    start_s: float = 20.0
    change_s: float = 2.0

    def move_s(self, old: Shape, new: Shape) -> float:
        """Returns the seconds of a move between shapes; (0, 0) means no devices."""
        del new
        return self.start_s if old == (0, 0) else self.change_s


# Default costs of moves, without measurements.
MOVES = MoveTimes()


class Numbering:
    """The numbers of nodes for policies; a node always keeps its number."""

    def __init__(self, store: Store, places: Sequence[ClusterNode]) -> None:
        """Numbers the current nodes; nodes that have left keep their numbers."""
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
        """Returns, for each device of some places, the number of its node."""
        numbers = sorted((self._names.index(name), n) for name, n in places.items())
        return tuple(k for k, n in numbers for _ in range(n))

    def places(self, allocation: Allocation) -> dict[str, int]:
        """Returns name of a node -> number of its devices in an allocation."""
        found: dict[str, int] = {}
        for number in allocation:
            name = self._names[number]
            found[name] = found.get(name, 0) + 1
        return found

    def there(self, places: Mapping[str, int]) -> dict[str, int]:
        """Returns those places whose nodes still have enough devices."""
        return {
            name: n
            for name, n in places.items()
            if self.nodes.devices[self._names.index(name)] >= n
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices that the cluster has now."""
        pairs = zip(self.nodes.kinds, self.nodes.devices, strict=True)
        return tuple(dict.fromkeys(kind for kind, n in pairs if n))


@dataclasses.dataclass(frozen=True, slots=True)
class AtLeast:
    """A goodput curve that is 0 below a least number of devices."""

    curve: Curve
    least: int

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Returns progress per second; 0 on too few devices."""
        found = self.curve.goodput(nodes, devices)
        return np.where(np.asarray(devices) >= self.least, found, 0.0)


def view_of(
    job: JobRecord,
    now_s: float,
    kinds: tuple[str, ...],
    moves: MoveTimes,
    lines: Sequence[Mapping[str, Any]] = (),
) -> JobView:
    """Returns the view of a job for a policy.

    The goodput curve of the view is the planner's curve, corrected by the measured
    times, batches and noise scale. For a job without a curve, goodput is proportional
    to the number of devices, and progress is counted in device-seconds.

    Args:
      job: the job.
      now_s: seconds since the scheduler's first start.
      kinds: kinds of the cluster's current devices.
      moves: the costs of moves.
      lines: lines of the job's progress.
    """
    handed, spec = job.handed, job.handed.spec
    curve = handed.curve and correct_curve(handed.curve, lines, job.noise_scale)
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
        # The curve counts rows of the base batch. A row of a larger batch counts less.
        progress=float(job.position if job.worth is None else job.worth),
    )
