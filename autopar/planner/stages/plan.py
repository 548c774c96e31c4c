"""Plans the stages of a pipeline: layers, submeshes, microbatches and schedule."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.deadline import limited_s, stop_if_over
from autopar.planner.stages.boundaries import NO_CODECS, SearchCodecs
from autopar.planner.stages.costs import (
    Priced,
    price_layers,
    stage_problem,
    with_copied_layers,
)
from autopar.planner.stages.layer_map import LayerMap, batch_inputs, layer_map
from autopar.planner.stages.submeshes import (
    Submesh,
    batch_splits,
    divides,
    place,
    submeshes,
)
from autopar.planner.weights import partly
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.units import seconds_text
from autopar_passes.stages.layers import cluster_layers
from autopar_solver import (
    Pipeline,
    PipelineCost,
    Schedule,
    ScheduleKind,
    StageProblem,
    StageSolution,
    Status,
    TaskSeconds,
    TaskTimes,
    make_table,
    play,
    solve_stages,
    task_seconds,
)

# The schedules that the runtime supports.
SCHEDULES = (
    Schedule(ScheduleKind.GPIPE),
    Schedule(ScheduleKind.ONE_F_ONE_B),
    *(Schedule(ScheduleKind.INTERLEAVED, chunks) for chunks in (2, 3, 4)),
    Schedule(ScheduleKind.ZERO_BUBBLE),
)
# Numbers of microbatches that are tried differ at least by this factor.
_APART = 1.4
# The search of layouts assumes this number of microbatches for gathers of parameters.
_TYPICAL = 16
# Largest number of layers per device, if there are few devices.
_LAYERS = 4


class NotFasterError(PlanError):
    """No pipeline is faster than a known plan."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageChoice:
    """One stage of the pipeline.

    Attributes:
      submesh: slice, logical mesh and layouts of the stage.
      devices: positions in the cluster.
      layers: layers of the stage, chunk after chunk.
      recomputed: the layers of the stage that are rematerialised.
      memory_bytes: the most bytes that a device of the stage holds.
      limit_bytes: the memory of a device of the stage.
      bubble: the fraction of the step for which the stage is idle.
    """

    submesh: Submesh
    devices: tuple[int, ...]
    layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    memory_bytes: float
    limit_bytes: float
    bubble: float


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineChoice:
    """The pipeline that was found.

    Attributes:
      microbatches: number of microbatches of a step.
      schedule: the order in which stages run microbatches, and the number of chunks per
        stage.
      starts: the forward equation at which each part begins; part ``k`` is on stage
        ``k % stages``.
      layer_starts: the forward equation at which each layer begins.
      cuts: the layer at which each part begins, and the number of layers.
      stages: the stages, first to last.
      tasks: seconds of each part's tasks and links.
      timeline: when each task runs.
      step_s: predicted seconds of a step.
      bound_s: lower bound of the seconds of a step of every pipeline in the search
        space.
      gap: the largest fraction by which the step may be longer than the shortest
        possible step.
      status: how the search ended, as text.
      one_stage_s: seconds of the best plan of one stage in the same search space;
        infinite if no such plan fits or none was considered.
      seconds: CPU seconds of each part of the planning.
    """

    microbatches: int
    schedule: Schedule
    starts: tuple[int, ...]
    layer_starts: tuple[int, ...]
    cuts: tuple[int, ...]
    stages: tuple[StageChoice, ...]
    tasks: TaskSeconds
    timeline: TaskTimes
    step_s: float
    bound_s: float
    gap: float
    status: str
    one_stage_s: float
    seconds: dict[str, float]


# The error if the solver ran out of time.
_LATE = (
    "no pipeline was found in time. Give the solver more of it with seconds= and "
    "planning_seconds=, or fewer choices with microbatches= and schedule=."
)


def plan_stages(
    analysis: Analysis,
    cluster: Cluster,
    *,
    analysed: int = 1,
    microbatches: Sequence[int] | None = None,
    most_microbatches: int | None = None,
    schedules: Sequence[Schedule] = SCHEDULES,
    stages: int | None = None,
    seconds: float | None = None,
    gap: float = 1e-3,
    alone: bool = True,
    alone_again: bool = True,
    below_s: float = math.inf,
    codecs: SearchCodecs = NO_CODECS,
) -> PipelineChoice:
    """Plans a step as a pipeline of one or more stages.

    Args:
      analysis: analysis of the whole batch, or of one of ``analysed`` microbatches.
      cluster: the devices.
      analysed: the number of microbatches into which the batch was cut for the
        analysis.
      microbatches: the numbers to try; None: numbers that divide the rows of the batch.
      most_microbatches: the most microbatches to try; None: no limit.
      schedules: the schedules to try.
      stages: the most stages; None: no limit.
      seconds: time limit of the solver, for all layouts together and again for the
        stages.
      gap: relative gap of the solver: the search may end before it finds a pipeline
        that is faster by less than this fraction.
      alone: whether one stage on all devices is a possible choice.
      alone_again: as for `stage_problem`.
      below_s: only pipelines with a shorter step, in seconds, are searched for.
      codecs: the codecs of cuts.

    Raises:
      NotFasterError: no pipeline with a step shorter than ``below_s`` was found.
      InfeasibleError: no pipeline fits device memory.
      PlanError: the step has no batch that can be cut, or no forward pass.
    """
    spent = _Spent()
    layers = layers_of(analysis, cluster)
    spent.on("layers")
    every = list(microbatches or divisors(rows_to_split(analysis) * analysed))
    every = [n for n in every if n <= (most_microbatches or max(every))]
    typical = min(_TYPICAL, max(every))
    weights = partly(gathers=typical / analysed, sums=1.0 / analysed)
    found = submeshes(
        analysis,
        cluster,
        weights,
        scales=[analysed / count for count in every],
        seconds=seconds,
        whole=alone,
    )
    spent.on("layouts")
    counts = list(microbatches or covering(every, found, analysed))
    scales = np.array([analysed / count for count in counts])
    if not found:
        raise PlanError(_LATE)
    stop_if_over("stages")
    prices = price_layers(layers, found, scales, codecs)
    problem = stage_problem(
        layers,
        cluster,
        prices,
        counts,
        schedules,
        stages,
        alone_again=alone_again,
        optional_codecs=codecs.optional,
    )
    spent.on("costs")
    stop_if_over("stages")
    copied = None
    if analysis.pieces:
        copied = with_copied_layers(problem, layers, cluster, prices)
    solved, solution = _solve(problem, copied, seconds, gap, below_s)
    if solution.pipeline is None and below_s < math.inf:
        raise NotFasterError(f"no pipeline was found below {seconds_text(below_s)}.")
    one_s = solution.step_s if alone else math.inf
    if alone and solution.pipeline is not None and solution.pipeline.stages > 1:
        one = dataclasses.replace(problem, max_stages=1)
        one_s = solve_stages(one, seconds=limited_s(seconds), gap=gap).step_s
    spent.on("stages")
    return _choice(layers, cluster, prices, solved, solution, one_s, spent.seconds)


def _solve(
    problem: StageProblem,
    copied: StageProblem | None,
    seconds: float | None,
    gap: float,
    below_s: float,
) -> tuple[StageProblem, StageSolution]:
    """Returns the best pipeline, and the problem with its costs.

    Args:
      problem: the problem.
      copied: the problem for schedules of several chunks; None: its costs are the same.
      seconds: time limit of the solver.
      gap: relative gap of the solver.
      below_s: only pipelines with a shorter step are searched for.
    """
    several = [schedule for schedule in problem.schedules if schedule.chunks > 1]
    if copied is None or not several:
        seconds = limited_s(seconds)
        return problem, solve_stages(problem, seconds=seconds, gap=gap, below_s=below_s)
    rest = [schedule for schedule in problem.schedules if schedule.chunks == 1]
    groups = [(problem, rest), (copied, several)]
    best: tuple[StageProblem, StageSolution] | None = None
    bound_s = math.inf
    for each, schedules in groups:
        if not schedules:
            continue
        own = dataclasses.replace(each, schedules=tuple(schedules))
        most_s = below_s if best is None else min(below_s, best[1].step_s)
        limit_s = limited_s(seconds)
        found = solve_stages(own, seconds=limit_s, gap=gap, below_s=most_s)
        bound_s = min(bound_s, found.bound_s)
        if best is None or found.pipeline is not None:
            best = own, found
    assert best is not None
    problem, found = best
    bound_s = min(bound_s, found.step_s)
    return problem, dataclasses.replace(found, bound_s=bound_s)


class _Spent:
    """Measures the CPU seconds of each part of the planning."""

    def __init__(self) -> None:
        """Starts the clock."""
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def on(self, what: str) -> None:
        """Adds the CPU time since the last call to a part of the planning."""
        now = time.process_time()
        self.seconds[what], self.last = now - self.last, now


def layers_of(
    analysis: Analysis, cluster: Cluster, layers: int | None = None
) -> LayerMap:
    """Returns the layers of a step, at most a few per device.

    Args:
      analysis: the step.
      cluster: the devices.
      layers: number of layers; None: all layers that are found, up to a few per device.

    Raises:
      PlanError: no forward equation depends on both state and batch.
    """
    batch = batch_inputs(analysis)
    starts = cluster_layers(
        analysis.program,
        analysis.graph,
        batch=batch,
        layers=layers,
        most=max(_LAYERS * cluster.num_devices, 2 * _LAYERS),
    )
    if not starts:
        raise PlanError(
            "the step has no layers: nothing in its forward pass depends on both the "
            "state and the batch, outside of loops with a backward pass of their own. "
            "Plan it without stages."
        )
    return layer_map(analysis, starts, batch)


def rows_to_split(analysis: Analysis) -> int:
    """Returns the number of rows of the batch.

    Raises:
      PlanError: no input has rows.
    """
    rows = batch_rows(analysis.graph)
    if rows < 1:
        raise PlanError(
            "the step has no batch: an argument that does not come back, with rows. "
            "Name it with batch_argnames, or plan it without microbatches."
        )
    return rows


def divisors(rows: int) -> list[int]:
    """Returns the divisors of a number of rows, ascending.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [count for count in range(1, rows + 1) if rows % count == 0]


def microbatch_counts(analysis: Analysis, analysed: int = 1) -> list[int]:
    """Returns the numbers of microbatches to try, chosen from the divisors of the rows.

    Args:
      analysis: the step on the whole batch, or on one of ``analysed`` microbatches.
      analysed: the number of microbatches into which the batch was cut for the
        analysis.
    """
    out: list[int] = []
    every = divisors(rows_to_split(analysis) * analysed)
    for count in every:
        if not out or count >= _APART * out[-1] or count == every[-1]:
            out.append(count)
    return out


def covering(
    counts: Sequence[int], found: Sequence[Submesh], analysed: int
) -> list[int]:
    """Numbers of microbatches, chosen such that each submesh can use numbers of every
    magnitude.

    Going up, a number is taken if it is at least `_APART` times the last number that
    was taken by this rule. Another number is taken if some submesh can split its
    microbatches, but not those of any number since then.

    Args:
      counts: the numbers to choose from, ascending.
      found: the submeshes with their layouts.
      analysed: the number of microbatches into which the batch was cut for the
        analysis.
    """
    splits = [batch_splits(submesh.assignment) for submesh in found]
    out: list[int] = []
    first, covered = 0.0, set[int]()
    for count in counts:
        able = {k for k, s in enumerate(splits) if divides(s, analysed / count)}
        if count >= _APART * first:
            first, covered = count, set()
            out.append(count)
        elif able - covered:
            out.append(count)
        covered |= able
    return out


def _choice(
    layers: LayerMap,
    cluster: Cluster,
    prices: Sequence[Priced],
    problem: StageProblem,
    solution: StageSolution,
    one_stage_s: float,
    seconds: dict[str, float],
) -> PipelineChoice:
    if solution.pipeline is None or solution.cost is None:
        raise _infeasible(layers, prices, solution)
    pipeline = solution.pipeline
    chosen = [prices[k].submesh for k in pipeline.options]
    placed = place(cluster, [(s.group, s.shape) for s in chosen])
    tasks = task_seconds(problem, pipeline)
    table = make_table(pipeline.schedule, pipeline.stages, pipeline.microbatches)
    return PipelineChoice(
        microbatches=pipeline.microbatches,
        schedule=pipeline.schedule,
        starts=tuple(layers.starts[cut] for cut in pipeline.cuts[:-1]),
        layer_starts=layers.starts,
        cuts=pipeline.cuts,
        stages=tuple(
            _stage(pipeline, solution.cost, chosen[k], placed[k], k)
            for k in range(pipeline.stages)
        ),
        tasks=tasks,
        timeline=play(table, tasks),
        step_s=solution.step_s,
        bound_s=solution.bound_s,
        gap=solution.gap,
        status=solution.status.value,
        one_stage_s=one_stage_s,
        seconds=seconds,
    )


def _stage(
    pipeline: Pipeline,
    cost: PipelineCost,
    submesh: Submesh,
    devices: tuple[int, ...],
    number: int,
) -> StageChoice:
    own = pipeline.layers(number)
    return StageChoice(
        submesh=submesh,
        devices=devices,
        layers=own,
        recomputed=tuple(k for k in own if k in pipeline.recomputed),
        memory_bytes=cost.memory_bytes[number],
        limit_bytes=cost.limit_bytes[number],
        bubble=cost.bubble[number],
    )


def _infeasible(
    layers: LayerMap, prices: Sequence[Priced], solution: StageSolution
) -> PlanError:
    known = solution.binding
    if solution.status is Status.UNKNOWN:
        return PlanError(_LATE)
    if known is None:
        return InfeasibleError(
            f"no pipeline fits: no cut of the {layers.count} layers, number of "
            "microbatches and schedule fits the memory of the devices with layouts "
            "that split its microbatches.\n"
            "  try: more devices, a batch that more numbers divide, or more memory"
        )
    where = prices[known.option].submesh.name
    return InfeasibleError(
        f"no pipeline fits: layers {known.first} to {known.last} of {layers.count} "
        f"need {known.least_bytes / 1e9:.1f} GB a device on {where}, which has "
        f"{known.limit_bytes / 1e9:.1f} GB.\n"
        "  try: more devices, a smaller batch, or more memory"
    )
