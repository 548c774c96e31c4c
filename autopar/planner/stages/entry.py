"""Plans a step as the pipeline that the options ask for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from autopar.cluster import Cluster
from autopar.cluster.slices import shapes
from autopar.compression.cut_codes import parse_cut_codecs
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.codecs.choose import CodecRequest, request_of
from autopar.planner.options import PlanOptions, layers_asked
from autopar.planner.record import another_step
from autopar.planner.stages.boundaries import NO_CODECS, SearchCodecs
from autopar.planner.stages.cut_choice import (
    COTANGENT_WEIGHT,
    DEFAULT_CUT_BUDGET,
    smallest_codec,
)
from autopar.planner.stages.cut_codecs import with_codes, with_planned_codes
from autopar.planner.stages.layer_map import LayerMap, batch_inputs
from autopar.planner.stages.plan import (
    SCHEDULES,
    NotFasterError,
    PipelineChoice,
    layers_of,
    microbatch_counts,
    plan_stages,
)
from autopar.planner.stages.stage_search import StageSite, hints_of
from autopar.planner.stages.staged import (
    WantedPipeline,
    layers_by_pressure,
    schedule_of,
    staged_plan,
)
from autopar.planner.stages.submeshes import place
from autopar.plans import Plan
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.for_devices import stages_for_devices
from autopar.steps.microbatches import one_microbatch, over_microbatches
from autopar.steps.remat import layer_starts
from autopar.steps.stages import (
    CutStep,
    cut_step,
    even_pieces,
    sizes_from_paths,
    with_pieces,
)
from autopar_passes.graph.operators import update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.layer_loops.split import piece_arguments
from autopar_passes.remat.copies import FULL, KERNELS
from autopar_passes.stages.layers import top_level
from autopar_passes.stages.parts import CutError, Flow
from autopar_solver import Schedule, ScheduleKind

# Places where the parts of a pipeline begin, in a step whose loops over layers are cut
# into pieces.


def parts_at_loops(
    whole: Analysis, layers: LayerMap, parts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts a step so that each part has one piece of the loop with most work.

    Args:
      whole: the step with each loop in as many pieces as there are parts.
      layers: the layers of the step.
      parts: number of parts.

    Returns:
      The forward equations at which layers begin, and the layers at which parts begin.
    """
    loops = _heaviest(whole, parts)
    starts = tuple(sorted({*layers.starts, *loops[1:]}))
    return starts, (0, *(starts.index(loop) for loop in loops[1:]))


def _heaviest(whole: Analysis, parts: int) -> list[int]:
    """The forward equations of the loop over layers with most work, in program order.

    The result has one equation for each piece of the loop.
    """
    pieces = _piece_numbers(whole)
    graph = whole.graph
    once = update_equations(whole.program, graph)
    batch = frozenset(batch_inputs(whole))
    flow = Flow(whole.program, graph, batch, once)
    work: dict[int, float] = defaultdict(float)
    above = top_level(whole.program)
    for op in graph.operators:
        work[above.get(op.equation, -1)] += op.flops * op.trips
    # Number of a piece -> the loops over the piece, in program order.
    found: dict[int, list[int]] = defaultdict(list)
    for index, eqn in flow.equations.items():
        if eqn.primitive != "scan" or flow.roles[index] is not Role.FORWARD:
            continue
        read = {
            pieces[v]
            for a in eqn.inputs
            if isinstance(a, int)
            for v in flow.of_state.get(a, ())
            if v in pieces
        }
        if len(read) == 1:
            found[read.pop()].append(index)
    chains = list(zip(*(found[k] for k in range(parts)), strict=False))
    if not chains:
        raise PlanError(
            f"no loop can be cut into {parts} parts: each loop runs only some of its "
            "stacked layers, and some part would have none. Ask for fewer stages, or "
            "for schedule='1f1b', which has one part a stage."
        )
    return sorted(max(chains, key=lambda loops: sum(work[k] for k in loops)))


def _piece_numbers(whole: Analysis) -> dict[int, int]:
    """Value of an input that is a piece -> the number of the piece within its array."""
    inputs, behind = whole.graph.inputs, len(whole.graph.inputs)
    behind -= sum(len(own) - 1 for own in whole.pieces.values())
    out: dict[int, int] = {}
    for k, places in piece_arguments(behind, whole.pieces).items():
        assert places[0] == k
        out.update({inputs[p].value: n for n, p in enumerate(places)})
    return out


# Number of chunks of a stage under the interleaved schedule.
_CHUNKS = 2
# The most pieces into which loops over layers are cut for the search of the best
# stages.
_MOST_PIECES = 16
# Default number of microbatches per stage: with it, stages are idle for less than a
# fifth of a step under 1F1B.
_PER_STAGE = 4
# Seconds of launching a task: of calling a compiled function with its arrays
# (docs/record/stages.md, `python benchmarks/pipeline_dispatch.py`).
_ISSUE_S = 110e-6


def plan_pipeline(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    stages: int,
    codecs: CodecRequest | None = None,
    *,
    schedule: Schedule | None = None,
) -> Plan:
    """Plans a step in a given number of stages with equally many devices.

    Args:
      analysis: the step on the whole batch.
      cluster: the devices to plan for.
      options: hints and limits.
      stages: number of stages; 2 or more.
      codecs: the request about codecs; None: the request in the options.
      schedule: the schedule; None: the schedule of the options, with two chunks of a
        stage if it is interleaved.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
      PlanError: the step cannot be cut or split in this way.
    """
    whole, wanted, count = even_pipeline(analysis, cluster, options, stages, schedule)
    return plan_wanted(whole, cluster, options, wanted, count, codecs)


def even_pipeline(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    stages: int,
    schedule: Schedule | None = None,
) -> tuple[Analysis, WantedPipeline, int]:
    """A pipeline of equal slices of the cluster and about equal numbers of layers.

    Args:
      analysis: the step on the whole batch.
      cluster: the devices to plan for.
      options: options, of which only the schedule and the microbatches are read.
      stages: number of stages; 2 or more.
      schedule: as for `plan_pipeline`.

    Returns the step on the whole batch with its loops in pieces, the pipeline, and the
    number of microbatches.

    Raises:
      PlanError: the step has too few layers, or the cluster has no such slices.
    """
    whole = analysis.whole or analysis
    schedule = schedule or _schedule(options.schedule or ScheduleKind.ONE_F_ONE_B.value)
    count = _microbatches(whole, options, stages)
    parts = stages * schedule.chunks
    whole = with_pieces(whole, even_pieces(whole, parts))
    layers = layers_of(whole, cluster)
    if whole.pieces:
        starts, cuts = parts_at_loops(whole, layers, parts)
    elif parts > layers.count:
        raise PlanError(
            f"stages={stages}: the step has {layers.count} layers, and schedule "
            f"{schedule.name} needs {parts} parts of at least one layer each. Ask for "
            f"fewer stages{_loops_text(whole)}."
        )
    else:
        starts, cuts = tuple(layers.starts), _balance(_weights(layers), parts)
    sites = _sites(cluster, stages)
    wanted = WantedPipeline(layers=starts, parts=cuts, schedule=schedule, sites=sites)
    return whole, wanted, count


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Limits of the pipelines to consider.

    Attributes:
      stages: the most stages; None: no limit.
      microbatches: number of microbatches.
      alone: whether to consider one stage, too.
    """

    stages: int | None = None
    microbatches: int | None = None
    alone: bool = True


def best_pipeline(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    codecs: CodecRequest | None = None,
    *,
    most_s: float = math.inf,
    limits: PipelineLimits = PipelineLimits(),
) -> Plan | None:
    """Finds the best pipeline of a step; None if one stage is better or necessary.

    If the user did not ask for microbatches, only numbers that leave the step's result
    unchanged are tried. If there is no such number, the step has one microbatch.

    Args:
      analysis: the step on the whole batch.
      cluster: the devices to plan for.
      options: hints and limits; their microbatches and schedule, if given, are kept.
      codecs: the request about codecs; None: the request in the options.
      most_s: the most seconds of a step, including the launch of its tasks.
      limits: limits of the pipelines to consider.

    Raises:
      InfeasibleError: neither a pipeline nor a plan of one stage fits.
      PlanError: the step cannot be cut into layers.
    """
    whole = analysis.whole or analysis
    in_loops = bool(whole.stacked_inputs) and not cluster.groups
    most = _most_pieces(whole, _MOST_PIECES) if in_loops else None
    pieces = whole if most is None else with_pieces(whole, even_pieces(whole, most))
    asked = options.microbatches
    schedules = (
        SCHEDULES if options.schedule is None else (_schedule(options.schedule),)
    )

    def choose_counts(counts: list[int] | None) -> PipelineChoice:
        return plan_stages(
            pieces,
            cluster,
            microbatches=counts,
            schedules=schedules,
            stages=min(filter(None, (most, limits.stages)), default=None),
            most_microbatches=limits.microbatches,
            alone=limits.alone,
            seconds=options.seconds,
            alone_again=False,
            below_s=most_s - issue_s(2, 1),
            codecs=search_codecs(options),
        )

    def is_slow(stages: int, count: int, step_s: float) -> bool:
        return step_s + issue_s(stages, count) >= most_s

    def is_worse(found: PipelineChoice) -> bool:
        stages = len(found.stages)
        return stages == 1 or is_slow(stages, found.microbatches, found.step_s)

    try:
        choice = choose_counts([asked] if isinstance(asked, int) else None)
        if is_worse(choice):  # Fewer microbatches would be worse, too.
            return None
        if not isinstance(asked, int) and not _is_exact(whole, options, choice):
            choice = choose_counts([1])
    except NotFasterError:
        return None
    if is_worse(choice):
        return None
    if in_loops:
        made = _of_loops(whole, cluster, options, choice, codecs)
    else:
        wanted, count = wanted_of(choice), choice.microbatches
        made = plan_wanted(whole, cluster, options, wanted, count, codecs)
        made = _with_report(made, choice)
    if made is None:
        return None
    slow = is_slow(len(made.stages), made.microbatches, made.predicted.step_s)
    return None if slow else made


def issue_s(stages: int, microbatches: int) -> float:
    """Returns the seconds of launching those tasks that wait for each other.

    Args:
      stages: number of stages.
      microbatches: number of microbatches.
    """
    return _ISSUE_S * (2 * (stages - 1) + 2 * microbatches + 1)


def _is_exact(whole: Analysis, options: PlanOptions, choice: PipelineChoice) -> bool:
    """Whether microbatches keep the result of a step exact, or the user accepts inexact
    microbatches.
    """
    if choice.microbatches == 1 or options.coupled == "microbatch":
        return True
    try:
        split = one_microbatch(whole, choice.microbatches).split
    except PlanError as error:
        say(f"the batch is not split: {error}")
        return False
    return split is None or not split.local


def _of_loops(
    whole: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    choice: PipelineChoice,
    codecs: CodecRequest | None,
) -> Plan | None:
    """Plans the chosen pipeline of a step that has loops over layers; None: no number
    of stages fits its loops.

    All parts have the same number of layers of each loop, because arrays of stacked
    layers are split evenly over devices. If the schedule is interleaved and the user
    did not ask for it, the plan without chunks is taken if it is faster, because the
    search assumes more copies of layers than a step makes.
    """
    schedules = [choice.schedule]
    if choice.schedule.chunks > 1 and options.schedule is None:
        schedules.append(Schedule(ScheduleKind.ONE_F_ONE_B))
    made: list[Plan] = []
    errors: list[InfeasibleError] = []
    for schedule in schedules:
        stages = _even_stages(whole, cluster, len(choice.stages), schedule.chunks)
        if stages == 1:
            continue
        asked_for = dataclasses.replace(
            options,
            stages=stages,
            microbatches=choice.microbatches,
            schedule=schedule.kind.value,
        )
        try:
            made.append(
                plan_pipeline(
                    whole, cluster, asked_for, stages, codecs, schedule=schedule
                )
            )
        except InfeasibleError as error:
            errors.append(error)
    if errors and not made:
        raise errors[0]
    return min(made, key=lambda plan: plan.predicted.step_s, default=None)


def _even_stages(whole: Analysis, cluster: Cluster, most: int, chunks: int) -> int:
    """Returns the largest number of stages that divides devices and layers.

    The number is at most ``most`` and divides the number of devices. Its parts divide
    some stack of layers evenly. The result is 1 if there is no such number.
    """
    stacks = set(whole.stacked_inputs.values())
    return max(
        n
        for n in range(1, most + 1)
        if n == 1
        or (
            cluster.num_devices % n == 0
            and any(layers % (n * chunks) == 0 for layers in stacks)
        )
    )


def _most_pieces(whole: Analysis, most: int) -> int:
    """Returns the largest number of pieces that divides some stack's number of layers.

    Stacks of layers that this number does not divide are not cut.
    """
    stacks = set(whole.stacked_inputs.values())
    return max(
        n for n in range(1, most + 1) if n == 1 or any(s % n == 0 for s in stacks)
    )


def _loops_text(whole: Analysis) -> str:
    """Returns the message about loops that have fewer layers than there are stages."""
    if not whole.stacked_inputs:
        return ""
    return f": its loops have at most {max(whole.stacked_inputs.values())} layers"


def _with_report(plan: Plan, choice: PipelineChoice) -> Plan:
    """Adds the bounds and times of other pipelines to a plan.

    Stages are planned again after the choice, so the step time differs a little from
    that of the choice.
    """
    step_s = plan.predicted.step_s
    bound_s = min(choice.bound_s, step_s)
    solver = msgspec.structs.replace(
        plan.solver,
        status=choice.status,
        gap=max(0.0, 1.0 - bound_s / step_s) if step_s else 0.0,
        bound=bound_s,
    )
    return msgspec.structs.replace(plan, solver=solver)


def plan_wanted(
    whole: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    wanted: WantedPipeline,
    count: int,
    codecs: CodecRequest | None = None,
) -> Plan:
    """Plans the stages of a pipeline that was chosen already.

    Args:
      whole: the step on the whole batch.
      cluster: all devices.
      options: hints and limits.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      count: the number of microbatches.
      codecs: the request about codecs; None: the request in the options.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
      PlanError: the step cannot be cut or split in this way.
    """
    if options.remat is not None:
        wanted = _with_recomputed(whole, cluster, options, wanted, count)
    wanted = with_given_codecs(wanted, str(options.cut_codecs))
    cut = cut_for(whole, options, wanted, count)
    asked = codecs or request_of(options)
    return staged_plan(
        cut, cluster, wanted, asked, hints_of(options), cut_budget(options)
    )


def search_codecs(options: PlanOptions) -> SearchCodecs:
    """The codecs of cuts with which the search of stages counts.

    If codecs are chosen, the search counts with the codecs of the fewest bytes that the
    two directions of one cut may have, with half of the budget's square for each.
    """
    budget = cut_budget(options)
    if budget is None:
        given = str(options.cut_codecs)
        return SearchCodecs(*parse_cut_codecs(given)) if given != "none" else NO_CODECS
    most = budget / math.sqrt(2.0)
    texts = smallest_codec(most), smallest_codec(most / COTANGENT_WEIGHT)
    return SearchCodecs(*texts, optional=True)


def cut_budget(options: PlanOptions) -> float | None:
    """The budget of errors within which codecs of cuts are chosen; None: they are not
    chosen.
    """
    if options.cut_codecs != "auto":
        return None
    given = options.cut_error_budget
    return DEFAULT_CUT_BUDGET if given is None else given


def with_given_codecs(wanted: WantedPipeline, text: str) -> WantedPipeline:
    """Returns the pipeline with codecs that the user gave for all cuts.

    Args:
      wanted: the pipeline.
      text: ``none``, ``auto``, or the codecs as text.
    """
    if text in ("none", "auto"):
        return wanted
    activations, cotangents = parse_cut_codecs(text)
    count = len(wanted.parts) - 1
    return dataclasses.replace(
        wanted,
        activation_codecs=(activations,) * count,
        cotangent_codecs=(cotangents,) * count,
    )


def _with_recomputed(
    whole: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    wanted: WantedPipeline,
    count: int,
) -> WantedPipeline:
    """Returns the pipeline with the rematerialised layers that the options ask for.

    ``auto`` keeps the rematerialised layers of ``wanted`` if there are any, and
    otherwise takes as many as are needed to fit the memory. The layers are those of
    `layer_starts`, as for plans of one stage.

    Raises:
      PlanError: the step has fewer layers, or its layers are a loop.
    """
    asked = options.remat
    number, level = (None, FULL) if asked == "auto" else layers_asked(asked)
    if number == 0 and level == KERNELS:
        raise PlanError(
            f"remat={asked!r}: stages compute again what the step's own jax.checkpoint "
            "says, with its attention kernels. Leave remat out, or say stages=1."
        )
    if number == 0 or (asked == "auto" and wanted.recomputed):
        return wanted if asked == "auto" else dataclasses.replace(wanted, recomputed=())
    couple = options.coupled == "microbatch"
    found = layer_starts(whole, count, couple=couple)
    if whole.pieces or len(set(found)) < len(found):
        if asked == "auto":
            return wanted
        raise PlanError(
            f"remat={asked!r}: the layers of the step are a loop, which a stage "
            "computes as a whole. Leave remat out, say stages=1, or put "
            "jax.checkpoint around the body of the loop."
        )
    if level != FULL:
        raise PlanError(
            f"remat={asked!r}: stages keep nothing of the layers that they compute "
            "again. Give a number or 'all', or say stages=1."
        )
    if number is not None and number > len(found):
        raise PlanError(
            f"remat={asked!r}: the step has {len(found)} layers. Give fewer, or 'all'."
        )
    begins = [wanted.layers[part] for part in wanted.parts]
    layers = tuple(sorted({*found, *begins}))
    plain = dataclasses.replace(
        wanted, layers=layers, parts=tuple(map(layers.index, begins)), recomputed=()
    )
    every = dataclasses.replace(plain, recomputed=tuple(range(len(layers))))
    if asked != "auto" and number in (None, len(found)):
        return every
    cut = cut_for(whole, options, plain, count)
    again = cut_for(whole, options, every, count)
    hints = hints_of(options)
    taken = layers_by_pressure(cut, again, cluster, plain, hints, number)
    return dataclasses.replace(plain, recomputed=taken)


def cut_for(
    whole: Analysis, options: PlanOptions, wanted: WantedPipeline, count: int
) -> CutStep:
    """Returns the step, cut into the stages of a pipeline.

    Args:
      whole: the step on the whole batch.
      options: options, of which only ``couple`` is read: whether values that couple
        rows may be computed per microbatch.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      count: the number of microbatches.

    Raises:
      PlanError: the step cannot be cut or split in this way.
    """
    couple = options.coupled == "microbatch"
    devices = max(len(site.devices) for site in wanted.sites)
    micro = stages_for_devices(one_microbatch(whole, count, couple=couple), devices)
    try:
        cut = _cut(
            micro,
            wanted.layers,
            wanted.parts,
            wanted.recomputed,
            wanted.schedule,
            len(wanted.sites),
        )
    except CutError as error:
        raise PlanError(f"the step cannot be cut into stages: {error}") from error
    return with_wanted_codes(cut, wanted)


def with_wanted_codes(cut: CutStep, wanted: WantedPipeline) -> CutStep:
    """Returns the step whose stages send each other values by the pipeline's codecs."""
    return with_codes(cut, wanted.activation_codecs, wanted.cotangent_codecs)


def _cut(
    micro: Analysis,
    layers: Sequence[int],
    parts: Sequence[int],
    recomputed: Sequence[int],
    schedule: Schedule,
    stages: int,
) -> CutStep:
    assert micro.split is not None
    return cut_step(
        micro,
        micro.split,
        layers=layers,
        parts=parts,
        stages=stages,
        recomputed=recomputed,
        split_backward=schedule.splits_backward,
    )


def cut_as(analysis: Analysis, plan: Plan) -> CutStep:
    """Returns the step, cut into the stages of a plan.

    Args:
      analysis: the step on the whole batch.
      plan: a plan of several stages.

    Raises:
      PlanError: the plan was made for another step.
    """
    whole, data = analysis.whole or analysis, plan.pipeline
    if data is None:
        raise PlanError("the plan has several stages, and does not say what they run.")
    whole = with_pieces(whole, sizes_from_paths(whole, data.pieces))
    micro = one_microbatch(whole, plan.microbatches, couple=bool(plan.local))
    devices = max(len(stage.devices) for stage in plan.stages)
    micro = stages_for_devices(micro, devices)
    assert micro.split is not None
    counted = over_microbatches(micro, micro.split)
    if plan.fingerprint != counted.fingerprint:
        raise another_step(counted, plan)
    schedule, stages = schedule_of(plan), len(plan.stages)
    try:
        cut = _cut(micro, data.layers, data.parts, data.recomputed, schedule, stages)
    except CutError as error:
        raise PlanError(f"the plan does not fit the step: {error}") from error
    return with_planned_codes(cut, data)


def _schedule(name: str) -> Schedule:
    kind = ScheduleKind(name)
    return Schedule(kind, _CHUNKS if kind is ScheduleKind.INTERLEAVED else 1)


def _microbatches(analysis: Analysis, options: PlanOptions, stages: int) -> int:
    """Returns the user's number of microbatches; by default a few per stage."""
    asked = options.microbatches
    if isinstance(asked, int):
        return asked
    possible = microbatch_counts(analysis)
    enough = [n for n in possible if n >= _PER_STAGE * stages]
    return min(enough, default=max(possible))


def _sites(cluster: Cluster, stages: int) -> tuple[StageSite, ...]:
    """Equal slices of a cluster, next to each other.

    Raises:
      PlanError: the cluster has no such slices.
    """
    if cluster.groups:
        raise PlanError(
            f"stages={stages}: {cluster} has devices of several kinds; plan with "
            "stages='auto', which gives each kind its own share."
        )
    each = cluster.num_devices // stages
    found = [s for s in shapes(cluster.levels) if int(np.prod(s)) == each]
    if each * stages != cluster.num_devices or not found:
        raise PlanError(
            f"stages={stages}: {cluster} cannot be cut into so many equal slices. Ask "
            "for a number that divides its hosts or the devices of a host."
        )
    return tuple(
        StageSite(devices=devices, cluster=cluster.slice(found[0], min(devices)))
        for devices in place(cluster, [(0, found[0])] * stages)
    )


def wanted_of(choice: PipelineChoice) -> WantedPipeline:
    """Converts a choice of `plan_stages` to the pipeline to plan."""
    return WantedPipeline(
        layers=choice.layer_starts,
        parts=choice.cuts[:-1],
        recomputed=tuple(sorted(k for s in choice.stages for k in s.recomputed)),
        schedule=choice.schedule,
        sites=tuple(
            StageSite(
                devices=s.devices,
                cluster=s.submesh.pricer.cluster,
                mesh=s.submesh.pricer.mesh,
            )
            for s in choice.stages
        ),
    )


def _weights(layers: LayerMap) -> list[float]:
    """Returns the work of each layer, in floating-point operations."""
    out = [0.0] * layers.count
    for op in layers.analysis.graph.operators:
        layer = int(layers.layer[op.index])
        if layer >= 0:
            out[layer] += op.flops * op.trips
    return out


def _balance(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """The layers at which parts begin, such that the heaviest part is as light as
    possible.

    >>> _balance([1, 1, 1, 3], 2)
    (0, 3)
    """
    count = len(weights)
    before = [0.0, *itertools.accumulate(weights)]
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for end in range(k, count + 1):
            for begin in range(k - 1, end):
                worst = max(best[k - 1][begin], before[end] - before[begin])
                if worst < best[k][end]:
                    best[k][end], cut[k][end] = worst, begin
    out: list[int] = []
    end = count
    for k in range(parts, 0, -1):
        end = cut[k][end]
        out.append(end)
    return tuple(reversed(out))
