"""Checks that a plan fits the step that it names, decision by decision.

A file may have been edited by hand; what does not fit is refused as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.plans import NodeDecision, Plan, Spec
from autopar.steps.analysis import Analysis
from autopar.steps.remat import modules_again


def check_consistent(analysis: Analysis, plan: Plan) -> None:
    """Checks the mesh, and each decision of a plan, against the step's graph.

    Raises:
      PlanError: the plan does not fit; the message names the first thing wrong.
    """
    _check_runs(plan)
    axes = plan.mesh["axes"]
    nodes = analysis.contraction.nodes
    if len(nodes) != len(plan.nodes):
        raise _wrong(f"it decides {len(plan.nodes)} nodes, the step has {len(nodes)}")
    for node, decision in zip(nodes, plan.nodes, strict=True):
        _check_node([size for size, _ in node.factors], decision, axes)
    for copy in plan.copies:
        if (copy.producer, copy.slot) not in analysis.sources:
            raise _wrong(f"nothing reads the copy '{copy.name}'")
        _check_axes(copy.name, copy.axes, axes)
    if plan.stage.rematerialisation != modules_again(analysis):
        raise _wrong("it computes other modules again than its layers have")
    if list(plan.inputs) != [i.path for i in analysis.graph.inputs]:
        raise _wrong("its inputs are not those of the step")


def _check_runs(plan: Plan) -> None:
    """Raises `PlanError` for what a plan may say and cannot be carried out yet."""
    stage = plan.stage
    if stage.devices != tuple(range(len(stage.devices))):
        raise PlanError(
            f"the plan is for devices {stage.devices} of its cluster, and plans of one "
            "stage run on the first devices, in order."
        )


def _check_node(
    factors: Sequence[int], decision: NodeDecision, axes: dict[str, int]
) -> None:
    if list(decision.factors) != list(factors) or len(decision.axes) != len(factors):
        raise _wrong(
            f"'{decision.name}' has factors {tuple(factors)}, the plan gives axes "
            f"{decision.axes} to {decision.factors}"
        )
    _check_axes(decision.name, decision.axes, axes)
    for size, names in zip(factors, decision.axes, strict=True):
        parts = math.prod(axes[n] for n in names)
        if size % parts:
            raise _wrong(f"'{decision.name}': {size} cannot be split {parts} ways")


def _check_axes(name: str, spec: Spec, axes: dict[str, int]) -> None:
    used = [n for names in spec for n in names]
    for n in used:
        if n not in axes:
            raise _wrong(f"'{name}': mesh axis '{n}' is not one of {', '.join(axes)}")
    if len(set(used)) < len(used):
        raise _wrong(f"'{name}': {spec} uses a mesh axis twice")


def _wrong(what: str) -> PlanError:
    return PlanError(
        f"the plan does not fit its step: {what}. It may have been edited; make a new "
        "plan with autopar.plan."
    )
