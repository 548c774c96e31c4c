"""Audits of plans: the programs of each stage, and what goes between stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from autopar.cluster import Cluster
from autopar.compilers.compiled import check_target, compile_for
from autopar.compilers.targets import Target, target_of
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.reports.audit import (
    ACTIVATIONS,
    BATCH,
    COTANGENTS,
    ONCE,
    Audit,
    StageAudit,
    bytes_by_kind,
    predicted_by_kind,
    target_audit,
    transfers_of,
    without_rounding,
)
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.reports.staged import bind_stages, links
from autopar.runtime.placement import abstract_mesh, device_mesh, stage_meshes
from autopar.runtime.planned import planned_step
from autopar.runtime.stages.audited import AuditedProgram, programs, sent_between
from autopar.runtime.stages.planned import audited_pipeline
from autopar.steps.analysis import Analysis
from autopar_passes.audit.compiled import CompiledAudit, compiled_audit
from autopar_passes.audit.partitioned import AuditedCollective, shardy_collectives
from autopar_passes.stages.cut import Phase

# What the results of a task are called that go to other stages.
_NAMES = {
    Phase.FORWARD: ACTIVATIONS,
    Phase.BACKWARD: COTANGENTS,
    Phase.BACKWARD_INPUT: COTANGENTS,
    Phase.BACKWARD_WEIGHT: COTANGENTS,
    None: ONCE,
}

# Lowers the programs of all stages, with devices or without.
_Lower = Callable[[], Iterable[AuditedProgram]]


def audit_analysis(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster,
    *,
    compiled: bool = False,
    target: str | None = None,
) -> Audit:
    """`autopar.audit`, for a step that is already analysed.

    Args:
      analysis: the step on the whole batch.
      plan: the plan.
      cluster: all devices.
      compiled: also compiles the programs for this process's devices.
      target: an accelerator whose compiler compiles the step, too.

    Raises:
      PlanError: the plan is for another step or cluster, or there are too few devices,
        or the target cannot compile it.
    """
    if len(plan.stages) > 1:
        return _audit_stages(analysis, plan, cluster, compiled=compiled, target=target)
    bound = bind_plan(analysis, plan, cluster)
    turns = bound.analysis.turns

    def _lower_program(mesh: Any) -> list[AuditedProgram]:
        step = planned_step(analysis, plan, mesh, turns=turns)
        return [AuditedProgram(0, step.lower(), 1)]

    made = None
    if target is not None:
        device = _device(plan, cluster, target)
        step = planned_step(analysis, plan, abstract_mesh(plan), turns=turns)
        program = compile_for(step.lower(device.platform), device, cluster)
        made = target_audit(bound, device, program)
    expected = bound if made is not None else without_rounding(bound)
    here = functools.partial(_lower_program, device_mesh(plan)) if compiled else None
    (stage,) = _audits_of_stages(
        [bound], [expected], _lower_program(abstract_mesh(plan)), here
    )
    return Audit(plan, (dataclasses.replace(stage, target=made),))


def _device(plan: Plan, cluster: Cluster, target: str) -> Target:
    """The accelerator whose compiler is to compile a plan of one stage."""
    if plan.replicas:
        raise PlanError(
            f"target {target}: the compilers of accelerators take steps for devices of "
            "one kind, and the plan has replicas of several. Leave target out."
        )
    device = target_of(target)
    check_target(device, cluster)
    return device


def _audit_stages(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster,
    *,
    compiled: bool,
    target: str | None,
) -> Audit:
    """`audit_analysis` of a plan of several stages."""
    if target is not None:
        raise PlanError(
            f"target {target}: the compilers of accelerators take steps of one "
            f"stage, and this plan has {len(plan.stages)}. Leave target out."
        )
    bound = bind_stages(analysis, plan, cluster)
    meshes = [abstract_mesh(stage.plan) for stage in bound.stages]
    pipeline = audited_pipeline(bound.cut, plan, meshes)

    def here() -> Iterable[AuditedProgram]:
        own = stage_meshes(plan, jax.devices())
        return programs(audited_pipeline(bound.cut, plan, own), plan)

    stages = _audits_of_stages(
        bound.stages, bound.stages, programs(pipeline, plan), here if compiled else None
    )
    sent = sent_between(pipeline, _NAMES, BATCH)
    return Audit(plan, stages, transfers_of(links(bound), sent, plan.microbatches))


def _audits_of_stages(
    stages: Sequence[BoundPlan],
    expected: Sequence[BoundPlan],
    lowered: Iterable[AuditedProgram],
    here: _Lower | None,
) -> tuple[StageAudit, ...]:
    """The audit of each stage.

    Args:
      stages: the stages as plans.
      expected: the same, as their devices send values.
      lowered: their programs.
      here: lowers them for this process's devices, to be compiled; None: they are not.
    """
    shardy = [list[AuditedCollective]() for _ in stages]
    for program in lowered:
        shardy[program.stage] += _often(program, shardy_collectives(program.lowered))
    done: list[CompiledAudit | None] = [None for _ in stages]
    for program in here() if here is not None else ():
        axes = tuple(stages[program.stage].plan.mesh["axes"].items())
        one = compiled_audit(program.lowered.compile(), axes)
        own = tuple(_often(program, one.collectives))
        one = dataclasses.replace(
            one, collectives=own, communication_bytes=sum(c.sent_bytes for c in own)
        )
        done[program.stage] = _together(done[program.stage], one)
    return tuple(
        StageAudit(stage.plan, predicted_by_kind(own), bytes_by_kind(sent), made)
        for stage, own, sent, made in zip(stages, expected, shardy, done, strict=True)
    )


def _often(
    program: AuditedProgram, found: Sequence[AuditedCollective]
) -> list[AuditedCollective]:
    """The collectives of a program, as often as it runs in a step."""
    return [dataclasses.replace(c, trips=c.trips * program.times) for c in found]


def _together(one: CompiledAudit | None, other: CompiledAudit) -> CompiledAudit:
    """Two programs of a stage: the communication of both, the memory of the larger."""
    if one is None:
        return other
    larger = max(one, other, key=lambda a: a.peak_memory_bytes)
    return dataclasses.replace(
        larger,
        collectives=(*one.collectives, *other.collectives),
        communication_bytes=one.communication_bytes + other.communication_bytes,
        exceptions=tuple(sorted({*one.exceptions, *other.exceptions})),
    )
