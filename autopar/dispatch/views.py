"""Describes jobs on a real cluster by `JobView`, which a policy reads.

The simulator describes its jobs by the same class. So a policy need not know whether
the cluster is real.
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
    """How many seconds a start and a change of devices (a move) cost a job.

    Attributes:
      start_s: seconds from the start or restart of a job to its first step.
      change_s: seconds for which a running job pauses when its devices change.
    """

    start_s: float = 20.0
    change_s: float = 2.0

    def move_s(self, old: Shape, new: Shape) -> float:
        """Seconds to move from ``old`` to ``new`` (nodes, devices).

        An ``old`` of (0, 0) means that the job starts.
        """
        del new
        return self.start_s if old == (0, 0) else self.change_s


# The costs to assume if none are measured.
MOVES = MoveTimes()


class Numbering:
    """Gives nodes the numbers by which policies name them."""

    def __init__(self, store: Store, places: Sequence[ClusterNode]) -> None:
        """Numbers the present nodes; a node never gets another number, even if it
        leaves.
        """
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
        """For each device on the given nodes, the number of its node."""
        numbers = sorted((self._names.index(name), n) for name, n in places.items())
        return tuple(k for k, n in numbers for _ in range(n))

    def places(self, allocation: Allocation) -> dict[str, int]:
        """Name of a node -> how many of its devices an allocation has."""
        found: dict[str, int] = {}
        for number in allocation:
            name = self._names[number]
            found[name] = found.get(name, 0) + 1
        return found

    def there(self, places: Mapping[str, int]) -> dict[str, int]:
        """Those of the given nodes that the cluster still has, with enough devices."""
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
    """A goodput curve that is set to 0 below a least number of devices."""

    curve: Curve
    least: int

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second; 0 if there are too few devices."""
        found = self.curve.goodput(nodes, devices)
        return np.where(np.asarray(devices) >= self.least, found, 0.0)


def view_of(
    job: JobRecord,
    now_s: float,
    kinds: tuple[str, ...],
    moves: MoveTimes,
    lines: Sequence[Mapping[str, Any]] = (),
) -> JobView:
    """Describes a job for a policy.

    The job's goodput curve is the planner's curve, corrected by measured step times,
    batch sizes and noise scale. If a job has no curve, its goodput is assumed to be
    proportional to the number of devices, and its progress is counted in
    device-seconds.

    Args:
      job: the job.
      now_s: the present time, in seconds since the scheduler's first start.
      kinds: kinds of devices that the cluster has now.
      moves: how many seconds moves cost.
      lines: the job's last lines of progress.
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
    progress = float(job.position if job.worth is None else job.worth)
    left = spec.steps * curve.base_batch - progress
    by_kind = {kind: AtLeast(curve.on(kind), spec.min) for kind in kinds}
    return JobView(
        **shared,
        curve=by_kind[kinds[0]],
        by_kind=by_kind,
        # The curve counts progress in rows of the base batch. A row of a larger batch
        # makes less progress.
        progress=progress,
        left=left if left > 0 else None,
    )
