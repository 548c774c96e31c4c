"""The setting of a step: cluster, plan and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.cluster import Cluster
from autopar.planner.options import (
    PlanOptions,
    fitting_layouts,
    sent_by_hand,
    with_codecs_of,
)
from autopar.plans import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The cluster, the plan and the devices that a step is given.

    Attributes:
      cluster: the cluster; None: as many of the backend's devices as there are.
      plan: a plan to use as it is, instead of planning.
      devices: the devices to run on, or their ids; None: those that the cluster
        names, or the first of the world.
      codecs: whose choice of codecs, and of layouts to keep, holds in place of the
        planner's; None: its own.
      sent: a plan whose codecs hold gradient by gradient; None: none.
    """

    cluster: Cluster | None = None
    plan: Plan | None = None
    devices: tuple[Any, ...] | None = None
    codecs: PlanOptions | None = None
    sent: Plan | None = None


def moved_setting(
    setting: Setting,
    options: PlanOptions,
    cluster: Cluster,
    devices: tuple[Any, ...] | None,
    given: Plan | None,
) -> Setting:
    """The setting on another cluster, with the codecs that were asked for.

    Args:
      setting: what the step was planned for.
      options: what was said about planning it.
      cluster: the cluster to move to.
      devices: the devices to run on there.
      given: a plan for it.

    Raises:
      PlanError: the codecs of a plan were asked for by nobody in one word.
    """
    codecs, sent = setting.codecs, setting.sent
    if setting.plan is not None:
        model = given or setting.plan
        codecs, sent = with_codecs_of(options, model), sent_by_hand(model)
    asked = codecs or options
    if asked.layouts is not None and given is None:
        codecs = fitting_layouts(asked, cluster)
    return Setting(cluster=cluster, devices=devices, codecs=codecs, sent=sent)
