"""The setting of a step: cluster, plan and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.cluster import Cluster
from autopar.planner.options import PlanOptions
from autopar.plans import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The cluster, the plan and the devices that a step is given.

    Attributes:
      cluster: the cluster; None: as many of the backend's devices as there are.
      plan: a plan to use as it is, instead of planning.
      devices: the devices to run on, or their ids; None: those that the cluster
        names, or the first of the world.
      codecs: whose choice of codecs holds in place of the planner's; None: its own.
    """

    cluster: Cluster | None = None
    plan: Plan | None = None
    devices: tuple[Any, ...] | None = None
    codecs: PlanOptions | None = None
