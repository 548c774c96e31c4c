"""Audits plans: the programs of each stage, and the bytes sent between stages."""

from __future__ import annotations

import dataclasses
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
from autopar.planner.replicas import sites_of, slowest_of
from autopar.planner.stages.stage_costs import copied_layers, sent_layers
from autopar.plans import Plan
from autopar.reports.audit import (
    ACTIVATIONS,
    BATCH,
    COTANGENTS,
    LAYERS,
    ONCE,
    Audit,
    ProgramRuns,
    StageAudit,
    TargetAudit,
    Transfer,
    bytes_by_kind,
    predicted_by_kind,
    target_audit,
    transfers_of,
    without_rounding,
)
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.reports.staged import bind_stages, links
from autopar.runtime.placement import abstract_mesh, stage_meshes
from autopar.runtime.planned import lowering_platform, planned_step
from autopar.runtime.stages.held_bytes import held_bytes
from autopar.runtime.stages.pipeline import StageCopy, StagePipeline
from autopar.runtime.stages.planned import audited_pipeline
from autopar.runtime.stages.stage import RESULT, Sent, Stage, wide
from autopar.steps.analysis import Analysis
from autopar.steps.stages import ArrayCode
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
      held_bytes: bytes of all arrays that a device of the stage holds as the program
        begins; None: the device holds only the program's arguments.
    """

    stage: int
    lowered: Any
    times: int
    held_bytes: int | None = None


def programs(
    pipeline: StagePipeline, plan: Plan, platform: str | None = None
) -> Iterator[AuditedProgram]:
    """Lowers the programs that communicate within a stage.

    The lowered programs are the tasks of the stage, the programs that finish its
    running sums, and the programs that reshard values before they are sent. The
    programs that split a batch into microbatches are left out.

    Args:
      pipeline: the tasks (`autopar.runtime.stages.planned.audited_pipeline`).
      plan: the plan of the pipeline.
      platform: JAX's name of the platform for which to lower the programs; no device of
        this platform is needed. None for a platform that can run the hand-written
        kernels of the stage.

    Raises:
      PlanError: no platform has all kernels of a stage.
    """
    kind, count = plan.cluster.read().device.kind, pipeline.microbatches
    held = held_bytes(pipeline)

    def lower_times(
        stage: int, function: Any, structs: Any, times: int, nbytes: int | None = None
    ) -> AuditedProgram:
        own = pipeline.stages[stage]
        on = platform or lowering_platform(own.assignment.graph, kind)
        return AuditedProgram(
            stage, _lower_function(own, function, structs, on), times, nbytes
        )

    for key, call in pipeline.calls.items():
        if not call.idle:
            times = 1 if key.phase is Phase.UPDATE else count
            code = call.code
            yield lower_times(
                key.stage, code.function, code.in_structs, times, held[key]
            )
    for stage, finish in pipeline.finish.items():
        yield lower_times(stage, finish, _end_structs(pipeline, stage), 1, held[stage])
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
    """Returns a program that reshards values of a stage to the layout in which they are
    sent.
    """
    values = copy.sent.values
    return jax.jit(
        lambda *arrays: list(arrays),
        in_shardings=[stage.sharding(v) for v in values],
        out_shardings=list(copy.sent.source),
    )


def _read(stage: Stage, copy: StageCopy) -> list[Any]:
    return [stage.struct(v) for v in copy.sent.values]


def _lower_function(stage: Stage, function: Any, structs: Any, platform: str) -> Any:
    if not isinstance(stage.mesh, AbstractMesh):
        return function.lower(*structs)
    bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), structs)
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
                nbytes = _shard_bytes(pipeline, value, target, sent.codes.get(value))
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


def _shard_bytes(
    pipeline: StagePipeline,
    value: int,
    sharding: Any,
    code: ArrayCode | None = None,
) -> float:
    """Returns the bytes of a value, or of its code, on one device."""
    if code is not None:
        return float(math.prod(sharding.shard_shape(code.struct.shape)))
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

# A function that lowers the programs of all stages. Its arguments are the mesh of each
# stage, or None for abstract meshes without devices; and the platform to lower for.
_Lower = Callable[[Sequence[Any] | None, str | None], Iterable[AuditedProgram]]


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A plan whose programs are audited.

    Attributes:
      plan: the plan.
      stages: each stage as a plan of its own. For a plan with replicas, the only stage
        is that of one replica.
      lower: lowers the programs.
      transfers: the communication between stages.
      replica: number of the replica whose program is audited.
    """

    plan: Plan
    stages: tuple[BoundPlan, ...]
    lower: _Lower
    transfers: tuple[Transfer, ...] = ()
    replica: int | None = None


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
        no stage or replica of the plan runs on devices of the target.
    """
    device = None if target is None else target_of(target)
    if len(plan.stages) > 1:
        subject = _several_stages(analysis, plan, cluster)
    else:
        subject = _one_stage(analysis, plan, cluster, device)
    made: dict[int, TargetAudit] = {}
    if device is not None:
        made = _audits_of_target(subject, device, cluster)
    shardy = [list[AuditedCollective]() for _ in subject.stages]
    for program in subject.lower(None, None):
        shardy[program.stage] += _often(program, shardy_collectives(program.lowered))
    here = _compiled_here(subject) if compiled else {}
    stages = [
        StageAudit(
            bound.plan,
            predicted_by_kind(bound if number in made else without_rounding(bound)),
            bytes_by_kind(shardy[number]),
            here.get(number),
            made.get(number),
        )
        for number, bound in enumerate(subject.stages)
    ]
    return Audit(plan, tuple(stages), subject.transfers, subject.replica)


def _one_stage(
    analysis: Analysis, plan: Plan, cluster: Cluster, device: Target | None
) -> _Subject:
    """The program of a plan of one stage; for a plan with replicas, of one replica.

    The replica is the slowest of those that run on the target's devices.
    """
    replica = _replica_on(plan, cluster, device) if plan.replicas else None
    bound = bind_plan(analysis, plan, cluster, replica)

    def lower(
        meshes: Sequence[Any] | None, platform: str | None
    ) -> list[AuditedProgram]:
        mesh = abstract_mesh(plan) if meshes is None else meshes[0]
        step = planned_step(analysis, plan, mesh, turns=bound.analysis.turns)
        return [AuditedProgram(0, step.lower(platform), 1)]

    return _Subject(plan, (bound,), lower, replica=replica)


def _replica_on(plan: Plan, cluster: Cluster, device: Target | None) -> int:
    """The slowest replica; with a target, the slowest that runs on the target's
    devices.
    """
    if device is None:
        return slowest_of(plan)
    names = [site.part.device.name for site in sites_of(cluster)]
    found = [k for k, name in enumerate(names) if name == device.name]
    if not found:
        raise _other_devices(device, "replica", names)
    return max(found, key=lambda k: plan.replicas[k].step_s)


def _other_devices(device: Target, what: str, names: Iterable[str]) -> PlanError:
    return PlanError(
        f"target {device.name}: no {what} of the plan runs on such devices; there are "
        f"{', '.join(dict.fromkeys(names))}. Name one of these that is a target."
    )


def _several_stages(analysis: Analysis, plan: Plan, cluster: Cluster) -> _Subject:
    """The programs of a plan of several stages."""
    bound = bind_stages(analysis, plan, cluster)
    abstract = [abstract_mesh(stage.plan) for stage in bound.stages]
    pipeline = audited_pipeline(bound.cut, plan, abstract)

    def lower(
        meshes: Sequence[Any] | None, platform: str | None
    ) -> Iterator[AuditedProgram]:
        made = pipeline
        if meshes is not None:
            made = audited_pipeline(bound.cut, plan, meshes)
        for program in programs(made, plan, platform):
            nbytes = program.held_bytes
            if nbytes is not None:
                nbytes += round(held[program.stage])
            yield dataclasses.replace(program, held_bytes=nbytes)

    # Bytes of copied layers on each stage: some stages run copies of layers whose
    # stacked arrays another stage keeps.
    held: dict[int, float] = defaultdict(float)
    sent = sent_between(pipeline, _NAMES, BATCH)
    for holder, stage, value in copied_layers(bound.cut):
        where = pipeline.stages[stage].sharding(value)
        nbytes = _shard_bytes(pipeline, value, where)
        held[holder] += nbytes
        for way in ((holder, stage), (stage, holder)):
            if holder != stage:
                sent[*way, LAYERS] = sent.get((*way, LAYERS), 0.0) + nbytes
    layers = sent_layers(bound.cut, [stage.assignment for stage in bound.stages])
    moved = transfers_of(links(bound), layers, sent, plan.microbatches)
    return _Subject(plan, bound.stages, lower, moved)


def _audits_of_target(
    subject: _Subject, device: Target, cluster: Cluster
) -> dict[int, TargetAudit]:
    """The audit of each stage that an accelerator's compiler compiles.

    On a cluster of groups of unequal devices, these are the stages on the target's
    devices. On other clusters all stages are compiled.

    Raises:
      PlanError: the compiler is not installed, or no stage runs on such devices.
      CompileError: the compiler refuses a program.
    """
    parts = [bound.pricer.cluster for bound in subject.stages]
    wanted = [
        number
        for number, part in enumerate(parts)
        if not cluster.groups or part.device.name == device.name
    ]
    if not wanted:
        raise _other_devices(device, "stage", (part.device.name for part in parts))
    # The devices of a stage may be a part of a TPU slice that has no shape of a slice.
    # Then the programs are compiled for the whole slice.
    where = {n: parts[n] if cluster.groups else cluster for n in wanted}
    for number in wanted:
        check_target(device, where[number])
    own: dict[int, list[AuditedProgram]] = {number: [] for number in wanted}
    for program in subject.lower(None, device.platform):
        if program.stage in own:
            own[program.stage].append(program)
    out: dict[int, TargetAudit] = {}
    for number, lowered in own.items():
        places = None if cluster.groups else subject.plan.stages[number].devices
        every = [p.lowered for p in lowered]
        made = compile_for(
            every, device, where[number], places, subject.plan.compiler_options
        )
        runs = [
            ProgramRuns(program, p.times, p.held_bytes)
            for program, p in zip(made, lowered, strict=True)
        ]
        out[number] = target_audit(subject.stages[number], device, runs)
    return out


def _compiled_here(subject: _Subject) -> dict[int, CompiledAudit]:
    """The audit of each stage, compiled for this process's devices."""
    done: dict[int, CompiledAudit] = {}
    for program in subject.lower(stage_meshes(subject.plan, jax.devices()), None):
        axes = tuple(subject.stages[program.stage].plan.mesh["axes"].items())
        one = compiled_audit(program.lowered.compile(), axes)
        own = tuple(_often(program, one.collectives))
        held = one.argument_bytes if program.held_bytes is None else program.held_bytes
        one = dataclasses.replace(
            one,
            collectives=own,
            communication_bytes=sum(c.sent_bytes for c in own),
            peak_memory_bytes=one.peak_memory_bytes - one.argument_bytes + held,
        )
        done[program.stage] = _together(done.get(program.stage), one)
    return done


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
