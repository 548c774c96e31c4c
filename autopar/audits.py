"""Audits of plans of several stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from autopar.cluster import Cluster
from autopar.plans import Plan
from autopar.reports.audit import Audit, bytes_by_kind, predicted_by_kind
from autopar.reports.staged import BoundStages, bind_stages, links
from autopar.reports.staged_audit import (
    ACTIVATIONS,
    BATCH,
    COTANGENTS,
    ONCE,
    StagedAudit,
    Transfer,
    transfers_of,
)
from autopar.runtime.planned import abstract_mesh
from autopar.runtime.stages.audited import AuditedProgram, programs, sent_between
from autopar.runtime.stages.pipeline import Pipeline
from autopar.runtime.stages.planned import audited_pipeline, stage_meshes
from autopar.steps.analysis import Analysis
from autopar_passes.audit.collectives import AuditedCollective
from autopar_passes.audit.compiled import CompiledAudit, compiled_audit
from autopar_passes.audit.partitioned import shardy_collectives
from autopar_passes.stages.cut import Phase

# What the results of a task are called that go to other stages.
_NAMES = {
    Phase.FORWARD: ACTIVATIONS,
    Phase.BACKWARD: COTANGENTS,
    Phase.BACKWARD_INPUT: COTANGENTS,
    Phase.BACKWARD_WEIGHT: COTANGENTS,
    None: ONCE,
}


def audit_stages(
    analysis: Analysis, plan: Plan, cluster: Cluster, *, compiled: bool = False
) -> StagedAudit:
    """Audits a plan of several stages.

    Args:
      analysis: the step on the whole batch.
      plan: the plan.
      cluster: all devices.
      compiled: also compiles the tasks for this process's devices.

    Raises:
      PlanError: the plan is for another step or cluster, or there are too few devices.
    """
    bound = bind_stages(analysis, plan, cluster)
    meshes = [abstract_mesh(stage.plan) for stage in bound.stages]
    pipeline = audited_pipeline(bound.cut, plan, meshes)
    shardy = [list[AuditedCollective]() for _ in bound.stages]
    for program in programs(pipeline, plan):
        shardy[program.stage] += _often(program, shardy_collectives(program.lowered))
    done = _compiled(bound) if compiled else [None for _ in bound.stages]
    stages = tuple(
        Audit(stage.plan, predicted_by_kind(stage), bytes_by_kind(own), made)
        for stage, own, made in zip(bound.stages, shardy, done, strict=True)
    )
    return StagedAudit(plan, stages, _transfers(bound, pipeline))


def _transfers(bound: BoundStages, pipeline: Pipeline) -> tuple[Transfer, ...]:
    sent = sent_between(pipeline, _NAMES, BATCH)
    return transfers_of(links(bound), sent, bound.plan.microbatches)


def _often(
    program: AuditedProgram, found: Sequence[AuditedCollective]
) -> list[AuditedCollective]:
    """The collectives of a program, as often as it runs in a step."""
    return [dataclasses.replace(c, trips=c.trips * program.times) for c in found]


def _compiled(bound: BoundStages) -> list[CompiledAudit | None]:
    """By stage, what its compiled programs communicate, and the neediest one's memory.

    Raises:
      PlanError: there are too few devices.
    """
    plan = bound.plan
    pipeline = audited_pipeline(bound.cut, plan, stage_meshes(plan, jax.devices()))
    found: list[CompiledAudit | None] = [None for _ in bound.stages]
    for program in programs(pipeline, plan):
        axes = tuple(bound.stages[program.stage].plan.mesh["axes"].items())
        one = compiled_audit(program.lowered.compile(), axes)
        own = tuple(_often(program, one.collectives))
        one = dataclasses.replace(
            one, collectives=own, communication_bytes=sum(c.sent_bytes for c in own)
        )
        found[program.stage] = _together(found[program.stage], one)
    return found


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
