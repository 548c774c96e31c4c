"""Plans the stages of a pipeline: layers, submeshes, microbatches and schedule."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.stages.costs import Priced, price_layers, stage_problem
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

# The schedules that the runtime runs.
SCHEDULES = (
    Schedule(ScheduleKind.GPIPE),
    Schedule(ScheduleKind.ONE_F_ONE_B),
    *(Schedule(ScheduleKind.INTERLEAVED, chunks) for chunks in (2, 3, 4)),
    Schedule(ScheduleKind.ZERO_BUBBLE),
)
# Numbers of microbatches are tried that are at least this far apart.
_APART = 1.4
# The number of microbatches at which the search of layouts counts gathers of
# parameters.
_TYPICAL = 16
# Layers for each device, where there are few devices.
_LAYERS = 4


class NotFasterError(PlanError):
    """No pipeline takes less than what is known."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageChoice:
    """One stage of the pipeline.

    Attributes:
      submesh: its slice, logical mesh and layouts.
      devices: positions in the cluster.
      layers: its layers, chunk after chunk.
      recomputed: those of them whose activations are computed again.
      memory_bytes: the most that one of its devices holds.
      limit_bytes: what one of its devices can hold.
      bubble: the share of the step in which it waits.
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
      microbatches: how many a step has.
      schedule: in which order stages run them, and with how many chunks.
      starts: the forward equation at which each part begins; part ``k`` is on stage
        ``k % stages``.
      layer_starts: the same for the layers.
      cuts: the layer at which each part begins, and the number of layers.
      stages: the stages, first to last.
      tasks: seconds of each part's tasks and links.
      timeline: when each task runs.
      step_s: predicted seconds of a step.
      bound_s: no pipeline of the space takes less.
      gap: how far the step can be from the shortest, relative to it.
      status: how the search ended, as text.
      one_stage_s: seconds of the best plan of one stage in the same space; infinite
        where none fits, or none was looked at.
      seconds: CPU seconds of planning by what they were spent on.
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
) -> PipelineChoice:
    """Plans a step as a pipeline; one stage is a pipeline, too.

    Args:
      analysis: of the whole batch, or of one of ``analysed`` microbatches.
      cluster: the devices.
      analysed: into how many microbatches the batch was cut for the analysis.
      microbatches: the numbers to try; None: those that divide the rows of the batch.
      most_microbatches: the most to try; None for no limit.
      schedules: those to try.
      stages: most stages; None for no limit.
      seconds: time limit of the solver: of all layouts, and of the stages.
      gap: share of the step that a better pipeline may save without being looked for.
      alone: whether one stage of all devices is a choice.
      alone_again: as for `stage_problem`.
      below_s: pipelines that take as long are of no interest.

    Raises:
      NotFasterError: no pipeline was found that takes less than ``below_s``.
      InfeasibleError: no pipeline fits the memory of the devices.
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
    prices = price_layers(layers, found, scales)
    problem = stage_problem(
        layers, cluster, prices, counts, schedules, stages, alone_again=alone_again
    )
    spent.on("costs")
    solution = solve_stages(problem, seconds=seconds, gap=gap, below_s=below_s)
    if solution.pipeline is None and below_s < math.inf:
        raise NotFasterError(f"no pipeline was found below {seconds_text(below_s)}.")
    one_s = solution.step_s if alone else math.inf
    if alone and solution.pipeline is not None and solution.pipeline.stages > 1:
        one = dataclasses.replace(problem, max_stages=1)
        one_s = solve_stages(one, seconds=seconds, gap=gap).step_s
    spent.on("stages")
    return _choice(layers, cluster, prices, problem, solution, one_s, spent.seconds)


class _Spent:
    """CPU seconds since the last look."""

    def __init__(self) -> None:
        """Starts now."""
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def on(self, what: str) -> None:
        """Counts the time since the last call."""
        now = time.process_time()
        self.seconds[what], self.last = now - self.last, now


def layers_of(
    analysis: Analysis, cluster: Cluster, layers: int | None = None
) -> LayerMap:
    """The layers of a step, a few for each device at most.

    Args:
      analysis: the step.
      cluster: the devices.
      layers: how many; None: as many as are found.

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
    """Rows of the batch, of which there are several.

    Raises:
      PlanError: no input has rows.
    """
    rows = batch_rows(analysis.graph)
    if rows < 2:
        raise PlanError(
            "the step has no batch: an argument that does not come back, with rows. "
            "Name it with batch_argnames, or plan it without microbatches."
        )
    return rows


def divisors(rows: int) -> list[int]:
    """The numbers that divide some rows, ascending.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [count for count in range(1, rows + 1) if rows % count == 0]


def microbatch_counts(analysis: Analysis, analysed: int = 1) -> list[int]:
    """Numbers of microbatches to try: some of those that divide the rows.

    Args:
      analysis: of the whole batch, or of one of ``analysed`` microbatches.
      analysed: into how many microbatches the batch was cut for the analysis.
    """
    out: list[int] = []
    every = divisors(rows_to_split(analysis) * analysed)
    for count in every:
        if not out or count >= _APART * out[-1] or count == every[-1]:
            out.append(count)
    return out


def covering(
    counts: Sequence[int], found: Sequence[Submesh], analysed: int = 1
) -> list[int]:
    """Some numbers of microbatches, such that each submesh has some of any size.

    Of numbers that are less than `_APART` apart, the first is taken; others where
    submeshes can split their microbatches that cannot split the first one's.

    Args:
      counts: those to choose from, ascending.
      found: the submeshes with their layouts.
      analysed: into how many microbatches the batch was cut for the analysis.
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
        return PlanError(
            "no pipeline was found in time. Give the solver more of it with seconds=, "
            "or fewer choices with microbatches= and schedule=."
        )
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
