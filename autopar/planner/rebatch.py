"""Carries a plan to another batch size of the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from autopar.planner.record import another_step, only_batch_differs, split_as
from autopar.plans import NodeDecision, Plan, StagePlan
from autopar.plans.files import checks_of
from autopar.plans.specs import check_divides, spec_of
from autopar.steps.analysis import Analysis


def rebatch_plan(analysis: Analysis, plan: Plan) -> Plan:
    """Returns a plan with the shapes of a step that differs in its batch alone.

    Layouts stay; what they cost there is not known yet. Edits stay edits.

    Raises:
      PlanError: the step has another structure, or an axis does not divide a size.
    """
    analysis = split_as(analysis, plan)
    if plan.fingerprint == analysis.fingerprint:
        return plan
    values = analysis.graph.values
    shapes = {i.path: tuple(values[i.value].shape) for i in analysis.graph.inputs}
    stage = plan.stage
    if only_batch_differs(analysis, plan):
        _check_inputs(stage, plan.shapes, shapes)
    if plan.structure != analysis.structure:
        raise another_step(analysis, plan)
    _check_copies(analysis, stage)
    edited = plan.edited
    made = msgspec.structs.replace(
        plan.with_stage(nodes=_nodes(analysis, stage)),
        shapes=shapes,
        fingerprint=analysis.fingerprint,
    )
    kept = {part: plan.checks[part] for part in edited if part in plan.checks}
    return msgspec.structs.replace(made, checks=checks_of(made, made.stages) | kept)


def _check_inputs(
    stage: StagePlan,
    before: Mapping[str, Sequence[int]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for path, shape in shapes.items():
        was = "x".join(map(str, before.get(path, ())))
        owner = f"the plan's layouts do not carry over: input '{path}' (was {was})"
        spec_of(stage.inputs[path], shape, stage.mesh["axes"], owner)


def _nodes(analysis: Analysis, stage: StagePlan) -> tuple[NodeDecision, ...]:
    axes = stage.mesh["axes"]
    made: list[NodeDecision] = []
    for node, decision in zip(analysis.contraction.nodes, stage.nodes, strict=True):
        factors = tuple(size for size, _ in node.factors)
        owner = f"the plan's layouts do not carry over: '{decision.name}'"
        for size, names in zip(factors, decision.axes, strict=True):
            check_divides(size, names, axes, owner)
        made.append(msgspec.structs.replace(decision, factors=factors))
    return tuple(made)


def _check_copies(analysis: Analysis, stage: StagePlan) -> None:
    for copy in stage.copies:
        source = analysis.sources[copy.producer, copy.slot]
        shape = analysis.graph.values[source.example].shape
        owner = f"the plan's layouts do not carry over: a copy of '{copy.name}'"
        spec_of(copy.axes, shape, stage.mesh["axes"], owner)
