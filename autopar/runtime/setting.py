"""The setting of a step: cluster, plan and devices."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.codecs.choose import EDITED
from autopar.planner.options import PlanOptions
from autopar.planner.search import plan_mesh
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


def with_codecs_of(options: PlanOptions, plan: Plan) -> PlanOptions:
    """The options with the choice of codecs that a plan was made with.

    Where it has several that nobody asked for in one word (`sent_by_hand`), layouts are
    found for the one that sends most.
    """
    mode = plan.compression.mode
    if mode == "none" or _by_hand(plan):
        sent = _dense_bytes(plan)
        mode = max(sent, key=lambda text: sent[text], default="none")
    budget = plan.compression.error_budget if mode == "auto" else None
    return dataclasses.replace(options, compression=mode, error_budget=budget)


def sent_by_hand(plan: Plan) -> Plan | None:
    """The plan if each gradient has the codec that it was given; else None."""
    several = plan.compression.mode == "none" and len(_dense_bytes(plan)) > 1
    return plan if several or (_by_hand(plan) and _dense_bytes(plan)) else None


def _by_hand(plan: Plan) -> bool:
    return plan.compression.mode == EDITED or "gradients" in plan.edited


def _dense_bytes(plan: Plan) -> dict[str, float]:
    """By codec, what one device would send of its gradients without it.

    What a codec cannot send, or not with profit, is sent beside it as it is.
    """
    found: dict[str, float] = {}
    for g in plan.gradients:
        if g.codec:
            found[g.codec] = found.get(g.codec, 0.0) + g.dense_bytes
    return {text: found[text] for text in set(found) - {"dense"}} or found


def fitting_layouts(options: PlanOptions, cluster: Cluster) -> PlanOptions:
    """The options without layouts to keep, where these do not fit another cluster.

    Layouts are for one mesh. On another new ones are found, which a warning says.
    """
    kept = options.layouts
    if kept is None:
        return options
    try:
        plan_mesh(cluster, kept.axis_names, kept.axis_sizes)
    except PlanError as error:
        warnings.warn(
            f"layouts=: {error} New layouts are found for it, with the same codecs. "
            "Give replan(..., plan=) for layouts of your own.",
            stacklevel=4,
        )
        return dataclasses.replace(options, layouts=None)
    return options
