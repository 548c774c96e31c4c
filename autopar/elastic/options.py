"""The plans that a re-plan compares, and which of them is worth most.

Moving and compiling cost time in which nothing is trained; a better plan gains it back
step by step. So options are compared by the steps that they finish until the next
change is expected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.plans import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanOption:
    """A plan that a run may go on under.

    Attributes:
      name: ``stay`` (go on as it is), ``layouts`` (the same layouts, other codecs),
        ``known`` (a plan made before), ``new`` (made for this change), ``fewer`` (on
        fewer devices, which divide the batch).
      cluster: the devices that it uses.
      plan: the plan.
      step_s: seconds of a step; predicted, and corrected by what the running plan was
        measured to take.
      move_bytes: of the state, over all devices.
      move_s: seconds of moving it.
      compiled: whether the program is compiled already.
      compile_s: seconds of compiling it.
    """

    name: str
    cluster: Cluster
    plan: Plan
    step_s: float
    move_bytes: float
    move_s: float
    compiled: bool
    compile_s: float

    @property
    def cost_s(self) -> float:
        """Seconds before the first step can run."""
        return self.move_s + self.compile_s

    def steps(self, horizon_s: float) -> float:
        """Steps that are finished within so many seconds from now."""
        return max(0.0, horizon_s - self.cost_s) / self.step_s

    def to_data(self, horizon_s: float) -> dict[str, Any]:
        """The option as a line of the ledger has it."""
        return {
            "name": self.name,
            "cluster": str(self.cluster),
            "meshes": meshes_of(self.plan),
            "step_s": self.step_s,
            "move_bytes": self.move_bytes,
            "move_s": self.move_s,
            "compiled": self.compiled,
            "compile_s": self.compile_s,
            "steps": self.steps(horizon_s),
        }


def best_option(
    found: Sequence[ReplanOption], horizon_s: float, left_s: float = math.inf
) -> ReplanOption:
    """Returns the option that finishes most steps.

    Where time is short before devices go, an option that is ready in time comes before
    one that is not; where none is, the one that is ready first.

    Args:
      found: the options, at least one; of equal ones the first is taken.
      horizon_s: seconds until the next change is expected.
      left_s: seconds until devices go.
    """
    ready = [x for x in found if x.cost_s <= left_s]
    if not ready:
        return min(found, key=lambda x: x.cost_s)
    return max(ready, key=lambda x: x.steps(horizon_s))


def meshes_of(plan: Plan) -> list[dict[str, int]]:
    """The mesh of each stage: its axes and their sizes."""
    return [
        dict(zip(stage.axis_names, stage.axis_sizes, strict=True))
        for stage in plan.stages
    ]


def dividing_part(cluster: Cluster, rows: int) -> Cluster | None:
    """The largest part of a cluster that divides a batch, where the whole does not.

    The last devices stay idle.

    >>> str(dividing_part(Cluster.parse("6:cpu"), 32))
    '4:cpu (devices 0-3 of 6)'
    >>> dividing_part(Cluster.parse("8:cpu"), 32)
    """
    if rows % cluster.num_devices == 0:
        return None
    for count in range(cluster.num_devices - 1, 0, -1):
        if rows % count == 0:
            part = cluster.without(devices=cluster.ids[count:])
            if rows % part.num_devices == 0:
                return part
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Horizon:
    """Expects the next change from those that there were.

    Attributes:
      usual_s: seconds between changes that are expected before any is seen.
      changes: how many were seen.
      seen_s: over how many seconds.
    """

    usual_s: float = 600.0
    changes: int = 0
    seen_s: float = 0.0

    def expected_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next change, or the end of the run in ``rest_s``."""
        return min(rest_s, (self.usual_s + self.seen_s) / (1 + self.changes))
