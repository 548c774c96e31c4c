"""Makes the plan of a pipeline: plans the program of each stage and records the
result.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import msgspec

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.choose import (
    WORTHWHILE,
    CodecRequest,
    warn_if_unused,
)
from autopar.planner.deadline import is_over, leave_untried
from autopar.planner.record import make_plan
from autopar.planner.stages.codecs import StagedChoice, choose_staged, sending_of
from autopar.planner.stages.cut_choice import CutChoice, choose_cut_codecs
from autopar.planner.stages.cut_codecs import with_codes
from autopar.planner.stages.stage_costs import (
    StageCosts,
    recomputed_bytes,
    saved_bytes,
    stage_costs,
)
from autopar.planner.stages.stage_search import StageHints, StageSearch, StageSite
from autopar.plans import NO_SCHEDULE, PipelineData, Plan, StagePlan
from autopar.steps.for_devices import notes_of_stages
from autopar.steps.microbatches import over_microbatches
from autopar.steps.stages import CutStep, sizes_by_path
from autopar.units import seconds_text
from autopar_solver import (
    Schedule,
    ScheduleKind,
    ScheduleTable,
    TaskTimes,
    make_table,
    play,
)

# The most times that the stages are searched again. Each search allows less memory for
# one microbatch, until the activations that the schedule keeps fit, too.
_ROUNDS = 4
# A limit of memory that no stage reaches, in bytes.
_NO_LIMIT = 1e18


@dataclasses.dataclass(frozen=True, kw_only=True)
class WantedPipeline:
    """The pipeline to plan.

    Attributes:
      layers: the forward equation at which each layer begins.
      parts: the layer at which each part begins.
      recomputed: layers that are rematerialised.
      schedule: the order in which stages run microbatches.
      sites: where the stages run.
      activation_codecs: for each part except the last, the codec of activations that
        leave it; empty: all are sent exactly.
      cotangent_codecs: likewise of the cotangents that the next part sends back.
    """

    layers: tuple[int, ...]
    parts: tuple[int, ...]
    schedule: Schedule
    sites: tuple[StageSite, ...]
    recomputed: tuple[int, ...] = ()
    activation_codecs: tuple[str, ...] = ()
    cotangent_codecs: tuple[str, ...] = ()


def schedule_of(plan: Plan) -> Schedule:
    """Returns the schedule of a plan, with the number of chunks per stage.

    Raises:
      PlanError: the plan has one stage, or its stages have too many or too few parts
        for its schedule.
    """
    if plan.pipeline is None or plan.schedule == NO_SCHEDULE:
        raise PlanError("a plan of one stage has no schedule.")
    parts, kind = len(plan.pipeline.parts), ScheduleKind(plan.schedule)
    chunks, rest = divmod(parts, len(plan.stages))
    if rest or (chunks > 1) is not (kind is ScheduleKind.INTERLEAVED):
        raise PlanError(
            f"schedule {plan.schedule}: the plan has {parts} parts in "
            f"{len(plan.stages)} stages; interleaved stages have two parts or more "
            "each, and those of other schedules one. Plan again with schedule=."
        )
    return Schedule(kind, chunks)


@dataclasses.dataclass(frozen=True)
class _Laid:
    """The stages of a pipeline with layouts, and with codecs if codecs were requested.

    Attributes:
      found: the layouts of each stage.
      costs: costs of the pipeline.
      memory: the most bytes that a device of each stage holds.
      choice: the codecs; None: no codecs were requested.
    """

    found: list[Candidate]
    costs: StageCosts
    memory: list[float]
    choice: StagedChoice | None = None


def staged_plan(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    codecs: CodecRequest,
    hints: StageHints,
    cut_budget: float | None = None,
) -> Plan:
    """Plans every stage of a cut step, and records the plan.

    Args:
      cut: the step, cut into the stages of ``wanted``.
      cluster: all devices.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      codecs: the user's request about codecs.
      hints: hints about layouts.
      cut_budget: the budget of errors within which codecs of cuts are chosen
        (`autopar.planner.stages.cut_choice`); None: they are those of ``wanted``.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
      PlanError: no stage can use the requested codec, or a pin does not fit.
    """
    start = time.perf_counter()
    table = make_table(wanted.schedule, len(wanted.sites), cut.found.microbatches)
    search = StageSearch(cut=cut, sites=wanted.sites, hints=hints)
    laid = _lay_stages(cut, cluster, wanted, table, search)
    said: tuple[str, ...] = ()
    if cut_budget is not None:
        cut, wanted, laid, text = _with_chosen_codecs(
            cut, cluster, wanted, table, laid, cut_budget
        )
        search, said = dataclasses.replace(search, cut=cut), (text,)
    if codecs.mode != "none":
        own = dataclasses.replace(search, codecs=codecs, known={})
        every = [laid]
        if is_over():
            leave_untried("layouts of stages for codecs")
        else:
            every.append(_lay_stages(cut, cluster, wanted, table, own))
        sent = [_send_by_codecs(cut, table, x, codecs) for x in every]
        laid = min(sent, key=lambda x: play(table, x.costs.tasks).makespan_s)
        assert laid.choice is not None
        parts = zip(cut.stages, laid.choice.choices, strict=True)
        warn_if_unused(list(parts), codecs)
    made = _finish_plan(cut, cluster, wanted, laid, table, time.perf_counter() - start)
    return msgspec.structs.replace(made, decided=(*made.decided, *said))


def _with_chosen_codecs(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    table: ScheduleTable,
    laid: _Laid,
    budget: float,
) -> tuple[CutStep, WantedPipeline, _Laid, str]:
    """Chooses codecs of cuts for given layouts.

    Returns:
      The step and the pipeline with these codecs, the layouts with their new costs, and
      the reason for the choice.
    """
    devices = [site.devices for site in wanted.sites]
    choice = choose_cut_codecs(cut, cluster, devices, laid.found, table, budget)
    text = _cut_text(choice)
    if choice.is_exact:
        choice = dataclasses.replace(choice, activations=(), cotangents=())
    wanted = dataclasses.replace(
        wanted,
        activation_codecs=choice.activations,
        cotangent_codecs=choice.cotangents,
    )
    cut = with_codes(cut, choice.activations, choice.cotangents)
    return cut, wanted, _price_stages(cut, cluster, wanted, table, laid.found), text


def _cut_text(choice: CutChoice) -> str:
    """Returns the reason for chosen codecs of cuts, for human readers."""
    if choice.is_exact:
        return (
            "cut codecs: none, because within the budget of errors none makes the step "
            f"faster by {WORTHWHILE:.0%}"
        )
    return (
        f"cut codecs: {seconds_text(choice.step_s)} instead of "
        f"{seconds_text(choice.exact_s)}, error {choice.error:.3f} of all cuts together"
    )


def _lay_stages(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    table: ScheduleTable,
    search: StageSearch,
) -> _Laid:
    """Searches the layouts of all stages such that the schedule's activations fit."""
    # The search of a stage does not know about rematerialisation. So a stage with
    # rematerialised layers is searched without a memory limit.
    rooms = [
        _NO_LIMIT if _again(cut, wanted, k) else float(site.cluster.device.memory_bytes)
        for k, site in enumerate(wanted.sites)
    ]
    found = search.all(rooms)
    for _ in range(_ROUNDS):
        laid = _price_stages(cut, cluster, wanted, table, found)
        if not (over := _over(wanted, laid.memory)):
            break
        left = _rooms(wanted, laid.costs, laid.memory)
        rooms = [left[k] if k in over else room for k, room in enumerate(rooms)]
        try:
            found = search.all(rooms)
        except InfeasibleError:
            break  # `_check_memory` reports what does not fit
    laid = _price_stages(cut, cluster, wanted, table, found)
    return dataclasses.replace(laid, found=_with_equal_names(cut, found))


def _with_equal_names(cut: CutStep, found: list[Candidate]) -> list[Candidate]:
    """Gives the mesh axes of stages equal names, if the stages share an array.

    An array of which every stage has a piece is laid over one mesh of all stages. A
    stage in the middle gives the names for the axes of all stages.
    """
    shared = sizes_by_path(cut.analysis.whole or cut.analysis)
    if not shared or len({c.pricer.mesh for c in found}) > 1:
        return found
    mesh = found[len(found) // 2].mesh
    return [
        dataclasses.replace(c, pricer=dataclasses.replace(c.pricer, mesh=mesh))
        for c in found
    ]


def _send_by_codecs(
    cut: CutStep, table: ScheduleTable, laid: _Laid, codecs: CodecRequest
) -> _Laid:
    """Returns the layouts, with codecs chosen for them."""
    choice = choose_staged(cut, laid.found, laid.memory, laid.costs, table, codecs)
    pairs = zip(laid.memory, choice.choices, strict=True)
    memory = [nbytes + sending_of(own).memory_bytes for nbytes, own in pairs]
    return _Laid(laid.found, choice.costs, memory, choice)


def layers_by_pressure(
    cut: CutStep,
    every: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    hints: StageHints,
    number: int | None,
) -> tuple[int, ...]:
    """The layers to rematerialise, those of the stages with least free memory first.

    Takes one layer after the other, each from the stage that needs the largest part of
    its devices' memory with the layers taken so far. In the stage, the layer with the
    most bytes is taken.

    Args:
      cut: the step as stages, without rematerialised layers.
      every: the step as stages, with all layers rematerialised.
      cluster: all devices.
      wanted: the pipeline, without rematerialised layers.
      hints: hints about layouts.
      number: how many layers to take; None: as many as are needed to fit.

    Raises:
      PlanError: fewer layers save memory, or a pin does not fit.
    """
    table = make_table(wanted.schedule, len(wanted.sites), cut.found.microbatches)
    search = StageSearch(cut=cut, sites=wanted.sites, hints=hints)
    stages = range(len(wanted.sites))
    laid = _price_stages(
        cut, cluster, wanted, table, search.all([_NO_LIMIT for _ in stages])
    )
    peaks = play(table, laid.costs.tasks).peak_bytes
    layers = range(len(wanted.layers))
    again = dataclasses.replace(wanted, recomputed=tuple(layers))
    left: list[dict[int, float]] = []
    times: list[float] = []
    for k in stages:
        own = _again(every, again, k)
        left.append(recomputed_bytes(every, wanted.layers, own, laid.found[k]))
        once = sum(laid.costs.activation_bytes[k :: len(stages)])
        times.append(float(peaks[k]) / once if once else 1.0)
    taken: list[dict[int, float]] = [{} for _ in stages]

    def pressure(k: int) -> float:
        sizes = taken[k].values()
        held = laid.memory[k] - times[k] * sum(sizes) + max(sizes, default=0.0)
        return held / wanted.sites[k].cluster.device.memory_bytes

    while number is None or sum(map(len, taken)) < number:
        giving = [k for k in stages if left[k]]
        if number is None and (not giving or max(map(pressure, stages)) <= 1.0):
            break  # `_check_memory` reports what does not fit
        if not giving:
            raise PlanError(
                f"{sum(map(len, taken))} layers of the step keep activations that can "
                f"be computed again, and remat= asks for {number}. Give fewer, or "
                "'all'."
            )
        k = max(giving, key=lambda k: (pressure(k), -k))
        layer = max(left[k], key=lambda layer: (left[k][layer], -layer))
        taken[k][layer] = left[k].pop(layer)
    return tuple(sorted(layer for own in taken for layer in own))


def kept_plan(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    codecs: CodecRequest,
    found: Sequence[Candidate],
    cut_budget: float | None = None,
) -> Plan:
    """Returns the plan of stages with given layouts, for which codecs are chosen.

    Args:
      cut: the step, cut into the stages of ``wanted``.
      cluster: all devices.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      codecs: the user's request about codecs.
      found: the layouts of each stage.
      cut_budget: as for `staged_plan`.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
    """
    start = time.perf_counter()
    table = make_table(wanted.schedule, len(wanted.sites), cut.found.microbatches)
    laid = _price_stages(cut, cluster, wanted, table, found)
    said: tuple[str, ...] = ()
    if cut_budget is not None:
        cut, wanted, laid, text = _with_chosen_codecs(
            cut, cluster, wanted, table, laid, cut_budget
        )
        said = (text,)
    if codecs.mode != "none":
        laid = _send_by_codecs(cut, table, laid, codecs)
    made = _finish_plan(cut, cluster, wanted, laid, table, time.perf_counter() - start)
    return msgspec.structs.replace(made, decided=(*made.decided, *said))


def rooms_left(
    cut: CutStep, cluster: Cluster, wanted: WantedPipeline, found: Sequence[Candidate]
) -> list[int]:
    """By stage, the bytes that a device may hold while one microbatch runs.

    The search of a stage does not know about rematerialisation. So a stage with
    rematerialised layers has no limit.

    Args:
      cut: the step, cut into the stages of ``wanted``.
      cluster: all devices.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      found: the layouts of each stage.
    """
    table = make_table(wanted.schedule, len(wanted.sites), cut.found.microbatches)
    laid = _price_stages(cut, cluster, wanted, table, found)
    return [
        round(_NO_LIMIT) if _again(cut, wanted, k) else math.floor(room)
        for k, room in enumerate(_rooms(wanted, laid.costs, laid.memory))
    ]


def price_pipeline(
    cut: CutStep, cluster: Cluster, wanted: WantedPipeline, found: Sequence[Candidate]
) -> tuple[float, list[float]]:
    """The seconds of a step without codecs, and by stage the most bytes on a device.

    Args:
      cut: the step, cut into the stages of ``wanted``.
      cluster: all devices.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      found: the layouts of each stage.
    """
    table = make_table(wanted.schedule, len(wanted.sites), cut.found.microbatches)
    laid = _price_stages(cut, cluster, wanted, table, found)
    return play(table, laid.costs.tasks).makespan_s, laid.memory


def _price_stages(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    table: ScheduleTable,
    found: Sequence[Candidate],
) -> _Laid:
    """Returns the stages with given layouts and without codecs, and their costs."""
    devices = [site.devices for site in wanted.sites]
    again = [_again(cut, wanted, k) for k in range(len(wanted.sites))]
    costs = stage_costs(cut, cluster, devices, found)
    memory = _memory_bytes(table, costs, _saved_by_remat(cut, wanted, again, found))
    return _Laid(list(found), costs, memory)


def _finish_plan(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    laid: _Laid,
    table: ScheduleTable,
    seconds: float,
) -> Plan:
    """Returns the plan of stages that have layouts.

    Args:
      cut: the step as stages.
      cluster: all devices.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      laid: the layouts and codecs of the stages.
      table: the schedule.
      seconds: duration of the planning.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
    """
    _check_memory(wanted, laid.found, laid.memory)
    timeline = play(table, laid.costs.tasks)
    made = _write_stages(
        cut, cluster, wanted, laid.found, laid.costs, laid.memory, timeline, seconds
    )
    return made if laid.choice is None else _with_codecs(cut, made, laid.choice)


def _with_codecs(cut: CutStep, plan: Plan, choice: StagedChoice) -> Plan:
    """Returns the plan with the codecs of its stages."""
    pairs = zip(plan.stages, choice.decisions(cut.analysis.graph), strict=True)
    stages = tuple(msgspec.structs.replace(s, gradients=g) for s, g in pairs)
    return msgspec.structs.replace(
        plan, stages=stages, compression=choice.compression
    ).with_checks()


def _over(wanted: WantedPipeline, memory: Sequence[float]) -> list[int]:
    """Returns the stages that need more memory than their devices have."""
    return [
        k
        for k, (site, nbytes) in enumerate(zip(wanted.sites, memory, strict=True))
        if nbytes > site.cluster.device.memory_bytes
    ]


def _rooms(
    wanted: WantedPipeline, costs: StageCosts, memory: Sequence[float]
) -> list[float]:
    """Returns, by stage, the memory that kept activations leave for one microbatch."""
    return [
        max(1.0, site.cluster.device.memory_bytes - (nbytes - once))
        for site, nbytes, once in zip(
            wanted.sites, memory, costs.step_bytes, strict=True
        )
    ]


def _again(cut: CutStep, wanted: WantedPipeline, stage: int) -> frozenset[int]:
    """Returns the layers of a stage that are rematerialised."""
    ends = (*wanted.parts[1:], len(wanted.layers))
    own = {
        layer
        for part, (begin, end) in enumerate(zip(wanted.parts, ends, strict=True))
        for layer in range(begin, end)
        if cut.cut.stage_of[part] == stage
    }
    return frozenset(own.intersection(wanted.recomputed))


def _saved_by_remat(
    cut: CutStep,
    wanted: WantedPipeline,
    again: Sequence[frozenset[int]],
    found: Sequence[Candidate],
) -> list[float]:
    """Returns, by stage, the bytes that rematerialisation saves (`saved_bytes`)."""
    return [
        saved_bytes(cut, wanted.layers, layers, candidate) if layers else 0.0
        for layers, candidate in zip(again, found, strict=True)
    ]


def _memory_bytes(
    table: ScheduleTable, costs: StageCosts, saved: Sequence[float]
) -> list[float]:
    """Returns, by stage, the most bytes that a device holds.

    The search of a stage counts the activations of one microbatch for each part of the
    stage. The schedule may keep the activations of several microbatches.
    """
    peaks = play(table, costs.tasks).peak_bytes
    stages = len(peaks)
    out: list[float] = []
    for stage in range(stages):
        once = sum(costs.activation_bytes[stage::stages])
        more = max(0.0, float(peaks[stage]) - once)
        nbytes = costs.step_bytes[stage] - saved[stage] + more
        out.append(max(nbytes, costs.copy_bytes[stage]))
    return out


def _check_memory(
    wanted: WantedPipeline, found: Sequence[Candidate], memory: Sequence[float]
) -> None:
    for number, (site, nbytes) in enumerate(zip(wanted.sites, memory, strict=True)):
        limit = site.cluster.device.memory_bytes
        if nbytes > limit:
            raise InfeasibleError(
                f"stage {number} of {len(found)} does not fit: a device holds "
                f"{nbytes / 1e9:.2f} GB with the activations that the schedule "
                f"{wanted.schedule.name} keeps, and has {limit / 1e9:.2f} GB.\n"
                "  try: more stages or microbatches, schedule='1f1b', or remat='auto', "
                "with which layers compute their activations again"
            )


def _write_stages(
    cut: CutStep,
    cluster: Cluster,
    wanted: WantedPipeline,
    found: Sequence[Candidate],
    costs: StageCosts,
    memory: Sequence[float],
    timeline: TaskTimes,
    seconds: float,
) -> Plan:
    """Returns the plan as data: all stages, added to the plan of the first stage."""
    plans = [
        make_plan(analysis, SearchResult(c, ((c.pricer.mesh, c),), seconds))
        for analysis, c in zip(cut.stages, found, strict=True)
    ]
    whole = over_microbatches(cut.analysis, cut.analysis.split or cut.found)
    first, step_s = plans[0], timeline.makespan_s
    compute_s = max(p.predicted.compute_s for p in plans)
    slowest = max((p.predicted for p in plans), key=lambda found: found.step_s)
    low_s, high_s = slowest.scaled_interval(step_s)
    predicted = msgspec.structs.replace(
        first.predicted,
        step_s=step_s,
        compute_s=min(compute_s, step_s),
        communication_s=max(0.0, step_s - min(compute_s, step_s)),
        hidden_s=0.0,
        communication_bytes=max(costs.sent_bytes),
        peak_memory_bytes=max(memory),
        low_s=low_s,
        high_s=high_s,
    )
    gaps = [p.solver.gap for p in plans]
    solver = msgspec.structs.replace(
        first.solver,
        status="stages as they were given",
        gap=max(gaps),
        seconds=seconds,
        cost=step_s,
        bound=0.0,
        meshes={},
    )
    inputs = whole.graph.inputs
    return msgspec.structs.replace(
        first,
        cluster=type(first.cluster).of(cluster),
        stages=tuple(
            _name_stage(p.stage, number, site)
            for number, (p, site) in enumerate(zip(plans, wanted.sites, strict=True))
        ),
        predicted=predicted,
        solver=solver,
        seconds=msgspec.structs.replace(
            first.seconds,
            trace=cut.analysis.trace_s,
            graph=cut.analysis.graph_s,
            solve=seconds,
            total=cut.analysis.trace_s + cut.analysis.graph_s + seconds,
        ),
        roles={i.path: i.role.value for i in inputs},
        shapes={i.path: tuple(whole.graph.values[i.value].shape) for i in inputs},
        unsupported_ops=whole.graph.unsupported,
        assumed=(*whole.graph.assumed_trips, *notes_of_stages(cut.analysis)),
        local=cut.found.local,
        fingerprint=whole.fingerprint,
        structure=whole.structure,
        microbatches=cut.found.microbatches,
        schedule=wanted.schedule.kind.value,
        pipeline=_pipeline(cut, wanted, costs, memory),
        worth=None,
        checks={},
    ).with_checks()


def _name_stage(stage: StagePlan, number: int, site: StageSite) -> StagePlan:
    return msgspec.structs.replace(stage, name=f"stage {number}", devices=site.devices)


def _pipeline(
    cut: CutStep, wanted: WantedPipeline, costs: StageCosts, memory: Sequence[float]
) -> PipelineData:
    tasks = costs.tasks
    split = wanted.schedule.kind is ScheduleKind.ZERO_BUBBLE
    columns = tasks.task_s.T
    forward, backward, first_half, second_half = (tuple(map(float, c)) for c in columns)
    pieces = sizes_by_path(cut.analysis.whole or cut.analysis)
    return PipelineData(
        layers=wanted.layers,
        parts=wanted.parts,
        homes={
            given.path: cut.cut.owners[given.value]
            for given in cut.analysis.graph.inputs[: cut.found.own]
        },
        recomputed=wanted.recomputed,
        pieces=pieces,
        forward_s=forward,
        backward_s=first_half if split else backward,
        weight_s=second_half if split else (),
        forward_link_s=tuple(map(float, tasks.forward_link_s)),
        backward_link_s=tuple(map(float, tasks.backward_link_s)),
        latency_s=tuple(map(float, tasks.latency_s)),
        step_s=tuple(map(float, tasks.step_s)),
        memory_bytes=tuple(memory),
        activation_bytes=costs.activation_bytes,
        activation_codecs=wanted.activation_codecs,
        cotangent_codecs=wanted.cotangent_codecs,
    )
