"""Audits plans: the programs of each stage, and the bytes sent between stages."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

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
from autopar.runtime.planned import lowering_platform, planned_step
from autopar.runtime.stages.pipeline import StageCopy, StagePipeline
from autopar.runtime.stages.planned import audited_pipeline
from autopar.runtime.stages.stage import RESULT, Sent, Stage, wide
from autopar.steps.analysis import Analysis
from autopar_passes.audit.compiled import CompiledAudit, compiled_audit
from autopar_passes.audit.partitioned import AuditedCollective, shardy_collectives
from autopar_passes.jax_compat import itemsize, lowered_without_devices
from autopar_passes.stages.cut import Phase


@dataclasses.dataclass(frozen=True, slots=True)
class AuditedProgram:
    """A program of a stage.

    Attributes:
      stage: number of the stage.
      lowered: JAX's ``Lowered`` of the program.
      times: number of runs of the program in a step.
    """

    stage: int
    lowered: Any
    times: int


def programs(pipeline: StagePipeline, plan: Plan) -> Iterator[AuditedProgram]:
    """Lowers the programs that communicate within a stage.

    These are the tasks of the stage, the programs that finish its running sums, and the
    programs that reshard values before they are sent. The programs that split a batch
    into microbatches are left out.

    Args:
      pipeline: the tasks (`autopar.runtime.stages.planned.audited_pipeline`).
      plan: the plan of the pipeline.

    Raises:
      PlanError: no platform has all kernels of a stage.
    """
    kind, count = plan.cluster.read().device.kind, pipeline.microbatches

    def lower_times(
        stage: int, function: Any, structs: Any, times: int
    ) -> AuditedProgram:
        return AuditedProgram(
            stage,
            _lower_function(pipeline.stages[stage], function, structs, kind),
            times,
        )

    for key, call in pipeline.calls.items():
        if not call.idle:
            times = 1 if key.phase is Phase.UPDATE else count
            yield lower_times(
                key.stage, call.code.function, call.code.in_structs, times
            )
    for stage, finish in pipeline.finish.items():
        yield lower_times(stage, finish, _end_structs(pipeline, stage), 1)
    batch = pipeline.cut.parts.flow.batch
    for copy in (*pipeline.copies, *pipeline.late_copies):
        own = pipeline.stages[copy.stage]
        times = count if batch.issuperset(copy.sent.values) else 1
        yield lower_times(copy.stage, _lay_copy(own, copy), _read(own, copy), times)


def _end_structs(pipeline: StagePipeline, stage: int) -> list[Any]:
    """Returns the argument structs of the program that finishes a stage's sums."""
    own = pipeline.stages[stage]
    totals: list[Any] = [wide(own.struct(v)) for v in pipeline.sums[stage]]
    if own.sums is None:
        return totals
    state, where = own.sums.structs(), own.sums.shardings()
    placed = jax.tree.map(
        lambda s, lies: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=lies),
        state["gradients"],
        where["gradients"],
    )
    return [state["step"], placed, *totals]


def _lay_copy(stage: Stage, copy: StageCopy) -> Any:
    """Returns a program that reshards values of a stage to the layout of sending."""
    values = copy.sent.values
    return jax.jit(
        lambda *arrays: list(arrays),
        in_shardings=[stage.sharding(v) for v in values],
        out_shardings=list(copy.sent.source),
    )


def _read(stage: Stage, copy: StageCopy) -> list[Any]:
    return [stage.struct(v) for v in copy.sent.values]


def _lower_function(stage: Stage, function: Any, structs: Any, kind: str) -> Any:
    if not isinstance(stage.mesh, AbstractMesh):
        return function.lower(*structs)
    bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), structs)
    platform = lowering_platform(stage.assignment.graph, kind)
    with lowered_without_devices():
        return function.trace(*bare).lower(lowering_platforms=(platform,))


def sent_between(
    pipeline: StagePipeline, names: Mapping[Phase | None, str], batch: str
) -> dict[tuple[int, int, str], float]:
    """Returns the bytes that one device of a stage sends to other stages in a step.

    The keys are the sending stage, the receiving stage and the name of the values.

    Args:
      pipeline: the tasks.
      names: phase -> name of its results; None -> name of all other values.
      batch: name of the rows of the batch that later stages read.
    """
    out: dict[tuple[int, int, str], float] = defaultdict(float)
    count, split = pipeline.microbatches, pipeline.cut.parts.flow.batch

    def add(stage: int, sent: Sent, what: Callable[[int], str], times: int) -> None:
        for value, target in zip(sent.values, sent.target, strict=True):
            other = _receiver(pipeline, stage, sent, value)
            if other != stage:
                nbytes = _shard_bytes(pipeline, value, target)
                out[stage, other, what(value)] += times * nbytes

    for key, call in pipeline.calls.items():
        name = names.get(key.phase, names[None])
        times = 1 if key.phase is Phase.UPDATE else count
        for sent in call.code.sent:
            add(key.stage, sent, lambda _, name=name: name, times)
    for stage, every in pipeline.finish_sent.items():
        for sent in every:
            add(stage, sent, lambda _: names[None], 1)
    for copy in pipeline.copies:
        rows = [v for v in copy.sent.values if v in split]
        for value, target in zip(copy.sent.values, copy.sent.target, strict=True):
            alone = Sent(copy.sent.stage, (value,), (target,), (target,))
            what, times = (batch, count) if value in rows else (names[None], 1)
            add(copy.stage, alone, lambda _, what=what: what, times)
    for copy in pipeline.late_copies:
        add(copy.stage, copy.sent, lambda _: names[None], 1)
    return dict(out)


def _receiver(pipeline: StagePipeline, stage: int, sent: Sent, value: int) -> int:
    """Returns the stage that receives a value; the same stage if the value stays."""
    if sent.stage != RESULT:
        return sent.stage
    given = pipeline.given.get(value)
    return stage if given is None else pipeline.cut.owners[given]


def _shard_bytes(pipeline: StagePipeline, value: int, sharding: Any) -> float:
    """Returns the bytes of a value on one device."""
    known = pipeline.cut.program.values[value]
    size = math.prod(sharding.shard_shape(tuple(known.shape)))
    rows = pipeline.microbatches if value in pipeline.crossed.rows else 1
    return float(rows * size * itemsize(known.dtype))


# The name of a task's results that are sent to other stages, by phase of the task.
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
    """Audits an analysed step; see `autopar.audit`.

    Args:
      analysis: the step on the whole batch.
      plan: the plan.
      cluster: the cluster of the plan.
      compiled: whether the programs are also compiled for this process's devices.
      target: an accelerator whose compiler also compiles the step; None for none.

    Raises:
      PlanError: the plan is for another step or cluster, there are too few devices, or
        the compiler of the target cannot compile such a plan.
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
    """Returns the accelerator whose compiler is to compile a plan with one stage.

    Raises:
      PlanError: the compiler cannot compile such a plan.
    """
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
    """Audits a plan with several stages (`audit_analysis`)."""
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
    """Returns the audit of each stage.

    Args:
      stages: the stages as plans.
      expected: the same stages, with the dtypes in which their devices send values.
      lowered: the programs of all stages.
      here: lowers the programs for this process's devices, to compile them; None if
        they are not compiled.
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
    """Returns a program's collectives, counted for all its runs in a step."""
    return [dataclasses.replace(c, trips=c.trips * program.times) for c in found]


def _together(one: CompiledAudit | None, other: CompiledAudit) -> CompiledAudit:
    """Joins two programs of a stage: the sum of communication, the larger memory."""
    if one is None:
        return other
    larger = max(one, other, key=lambda a: a.peak_memory_bytes)
    return dataclasses.replace(
        larger,
        collectives=(*one.collectives, *other.collectives),
        communication_bytes=one.communication_bytes + other.communication_bytes,
        exceptions=tuple(sorted({*one.exceptions, *other.exceptions})),
    )
