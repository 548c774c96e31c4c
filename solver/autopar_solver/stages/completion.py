"""The best pipeline found so far, and the choice of layers that a pipeline recomputes.

A pipeline's schedule is simulated only if the pipeline may be better than the best
pipeline so far.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.stages.entries import kept_microbatches
from autopar_solver.stages.problem import (
    Pipeline,
    PipelineCost,
    StageProblem,
    StageSolution,
)
from autopar_solver.stages.relaxation import choose_recomputed
from autopar_solver.stages.schedules.play import (
    ScheduleKind,
    TaskKind,
    TaskSeconds,
    count_alive,
    make_table,
    play,
)
from autopar_solver.status import Status

# Evaluates a given pipeline by simulating its schedule, without the solver.


def evaluate_pipeline(problem: StageProblem, pipeline: Pipeline) -> PipelineCost:
    """Simulates a pipeline's schedule, and computes its memory.

    The memory of a stage has three terms: its resident bytes, the live activations at
    the schedule's peak, and the largest number of bytes that one of its layers needs
    while it runs. A layer needs its transient bytes, and its activations if they are
    recomputed.

    Raises:
        InputError: the pipeline does not fit the problem; the message says why.
    """
    seconds = task_seconds(problem, pipeline)
    table = make_table(pipeline.schedule, pipeline.stages, pipeline.microbatches)
    timeline = play(table, seconds)
    stages = range(pipeline.stages)
    memory = [
        _standing_bytes(problem, pipeline, stage) + float(timeline.peak_bytes[stage])
        for stage in stages
    ]
    return PipelineCost(
        step_s=timeline.makespan_s,
        bubble=tuple(float(share) for share in timeline.bubble),
        memory_bytes=tuple(memory),
        limit_bytes=tuple(problem.limit_bytes(option) for option in pipeline.options),
    )


def check_stages(problem: StageProblem, solution: StageSolution) -> None:
    """Raises `InputError` if the solution contradicts the problem."""
    if solution.pipeline is None or solution.cost is None:
        if solution.status not in (Status.INFEASIBLE, Status.UNKNOWN):
            raise InputError(f"{problem.name}: {solution.status} without a pipeline.")
        return
    cost = evaluate_pipeline(problem, solution.pipeline)
    if not math.isclose(cost.step_s, solution.step_s, rel_tol=1e-9):
        raise InputError(
            f"{problem.name}: a step takes {cost.step_s}, not {solution.step_s}."
        )
    if not cost.fits:
        raise InputError(
            f"{problem.name}: {cost.memory_bytes} is over {cost.limit_bytes}."
        )
    if solution.bound_s > solution.step_s * (1 + 1e-9):
        raise InputError(
            f"{problem.name}: bound {solution.bound_s} above {solution.step_s}."
        )


def task_seconds(problem: StageProblem, pipeline: Pipeline) -> TaskSeconds:
    """The seconds and bytes of each part of a pipeline, which is one stretch of layers.

    Raises:
        InputError: the pipeline does not fit the problem; the message says why.
    """
    _check_pipeline(problem, pipeline)
    costs = problem.costs_of(pipeline.microbatches)
    parts = range(len(pipeline.cuts) - 1)
    rows = [_part(problem, pipeline, part) for part in parts]
    options = [pipeline.options[part % pipeline.stages] for part in parts]
    links = [problem.options[option].link for option in options]
    ends = list(zip(pipeline.cuts[1:-1], links[:-1], links[1:], strict=True))
    return TaskSeconds(
        task_s=np.array([row[: len(TaskKind)] for row in rows]),
        forward_link_s=np.array(
            [costs.forward_link_s[c - 1, a, b] for c, a, b in ends]
        ),
        backward_link_s=np.array(
            [costs.backward_link_s[c - 1, a, b] for c, a, b in ends]
        ),
        latency_s=np.array([costs.latency_s[a, b] for _, a, b in ends]),
        step_s=np.array(
            [_step_s(problem, pipeline, s) for s in range(pipeline.stages)]
        ),
        held_bytes=np.array([row[-2] for row in rows]),
        pending_bytes=np.array([row[-1] for row in rows]),
        blocking=problem.blocking,
    )


def is_possible(seconds: TaskSeconds) -> bool:
    """Whether a pipeline is possible: no part and no link is forbidden."""
    arrays = (seconds.task_s, seconds.forward_link_s, seconds.backward_link_s)
    return all(bool(np.isfinite(array).all()) for array in arrays)


def lower_bound_s(pipeline: Pipeline, seconds: TaskSeconds) -> float:
    """Returns a lower bound of a pipeline's step: the longest of three chains of tasks.

    The bound is in seconds. The chains are:

    - A stage waits until the first microbatch arrives, then works on all microbatches.
      The last gradient then travels back to the first stage.
    - The first microbatch passes through all stages and back. Then comes the rest of
      one stage's work.
    - The first microbatch passes through all stages and back, and all other
      microbatches pass the busiest link between two stages.
    """
    count, stages = pipeline.microbatches, pipeline.stages
    forward, weight = seconds.task_s[:, 0], seconds.task_s[:, 3]
    splits = pipeline.schedule.splits_backward
    backward = seconds.task_s[:, 2 if splits else 1]
    late = weight if splits else np.zeros_like(weight)
    there = np.append(0.0, np.cumsum(seconds.forward_link_s + seconds.latency_s))
    back = np.append(0.0, np.cumsum(seconds.backward_link_s + seconds.latency_s))
    if stages == 1:
        there, back = np.zeros_like(there), np.zeros_like(back)
    head = there + np.cumsum(forward) - forward
    tail = back + np.cumsum(backward) - backward
    chain = forward.sum() + backward.sum() + there[-1] + back[-1]
    work = (forward + backward + late).reshape(-1, stages).sum(axis=0)
    alone = head[:stages] + count * work + seconds.step_s
    bounds = [chain + late[0] + seconds.step_s[0], *alone]
    if not splits:
        bounds.extend(head[:stages] + count * work + tail[:stages] + seconds.step_s[0])
    if pipeline.schedule.kind is not ScheduleKind.INTERLEAVED:
        after = _after_first(pipeline, forward, backward, late)
        bounds.extend(chain + after + late[0] + seconds.step_s[0])
        if stages > 1:
            busiest = _busiest_link(pipeline.schedule.kind, seconds)
            bounds.append(chain + (count - 1) * busiest + late[0] + seconds.step_s[0])
    return float(max(bounds))


def _after_first(
    pipeline: Pipeline, forward: np.ndarray, backward: np.ndarray, late: np.ndarray
) -> np.ndarray:
    """For each stage, the seconds of work from its first backward pass to its last.

    The seconds do not include the first backward pass itself.
    """
    count, stages = pipeline.microbatches, pipeline.stages
    if pipeline.schedule.kind is ScheduleKind.GPIPE:
        return (count - 1) * (forward.max() + backward.max()) * np.ones(stages)
    begun = np.minimum(np.arange(stages, 0, -1), count)
    weights = np.maximum(count - 1 - np.arange(stages), 0) * late
    return (count - 1) * backward + (count - begun) * forward + weights


def _busiest_link(kind: ScheduleKind, seconds: TaskSeconds) -> float:
    if kind is ScheduleKind.GPIPE:
        return float(seconds.forward_link_s.max() + seconds.backward_link_s.max())
    return float(max(seconds.forward_link_s.max(), seconds.backward_link_s.max()))


def _part(problem: StageProblem, pipeline: Pipeline, part: int) -> list[float]:
    """One microbatch's seconds by kind of task, bytes held and bytes pending."""
    costs = problem.costs_of(pipeline.microbatches)
    option = pipeline.options[part % pipeline.stages]
    layers = np.arange(pipeline.cuts[part], pipeline.cuts[part + 1])
    again = np.isin(layers, pipeline.recomputed)
    ends = float(costs.enter[layers[0], option] + costs.leave[layers[-1], option])
    forward = float(costs.forward_s[layers, option].sum()) + ends
    inputs = float(costs.backward_input_s[layers, option].sum()) + ends
    inputs += float(costs.recompute_s[layers[again], option].sum())
    weights = float(costs.backward_weight_s[layers, option].sum())
    held = np.where(
        again,
        costs.boundary_bytes[layers, option],
        costs.activation_bytes[layers, option],
    )
    pending = float(costs.pending[layers, option].sum())
    return [forward, inputs + weights, inputs, weights, float(held.sum()), pending]


def _step_s(problem: StageProblem, pipeline: Pipeline, stage: int) -> float:
    costs = problem.costs_of(pipeline.microbatches)
    option, layers = pipeline.options[stage], pipeline.layers(stage)
    total = float(costs.step_s[list(layers), option].sum())
    for shared in problem.shared:
        if (shared.source in layers) != (shared.target in layers):
            total += float(shared.step_s[option])
    return total


def _standing_bytes(problem: StageProblem, pipeline: Pipeline, stage: int) -> float:
    """Returns resident bytes plus the most bytes that one layer needs while it runs."""
    costs = problem.costs_of(pipeline.microbatches)
    option, layers = pipeline.options[stage], pipeline.layers(stage)
    rows = list(layers)
    total = float(costs.resident_bytes[rows, option].sum())
    for shared in problem.shared:
        if shared.target in layers and shared.source not in layers:
            total += float(shared.copy_bytes[option])
    again = np.isin(rows, pipeline.recomputed)
    running = costs.transient_bytes[rows, option] + np.where(
        again, costs.activation_bytes[rows, option], 0.0
    )
    return total + float(running.max())


def _check_pipeline(problem: StageProblem, pipeline: Pipeline) -> None:
    where = f"{problem.name}: {pipeline}"
    cuts, stages = pipeline.cuts, pipeline.stages
    layers = problem.num_layers
    if pipeline.schedule not in problem.schedules:
        raise InputError(f"{where}: its schedule is not allowed.")
    if problem.max_stages is not None and stages > problem.max_stages:
        raise InputError(f"{where}: at most {problem.max_stages} stages are allowed.")
    if not stages or not all(0 <= o < len(problem.options) for o in pipeline.options):
        raise InputError(f"{where}: it has no options, or unknown ones.")
    parts = stages * pipeline.schedule.chunks
    if len(cuts) != parts + 1 or (cuts[0], cuts[-1]) != (0, layers):
        raise InputError(f"{where}: cuts must be {parts + 1} from 0 to {layers}.")
    if any(a >= b for a, b in itertools.pairwise(cuts)):
        raise InputError(f"{where}: every part needs a layer.")
    if not all(0 <= layer < layers for layer in pipeline.recomputed):
        raise InputError(f"{where}: it recomputes a layer that does not exist.")
    used = devices_used(problem, pipeline.options)
    for number, group in enumerate(problem.groups):
        if used[number] > group.devices:
            raise InputError(
                f"{where}: {used[number]} devices of group {number}, which has "
                f"{group.devices}."
            )


def devices_used(problem: StageProblem, options: Sequence[int]) -> list[int]:
    """Counts the devices that the given options take in each device group."""
    used = [0] * len(problem.groups)
    for option in options:
        used[problem.options[option].group] += problem.options[option].devices
    return used


class PipelineIncumbent:
    """Keeps the pipeline with the shortest step among those that were offered."""

    def __init__(self, problem: StageProblem, below_s: float = math.inf) -> None:
        """Starts without a pipeline. Steps of ``below_s`` or more are ignored."""
        self.problem, self.below_s = problem, below_s
        self.pipeline: Pipeline | None = None
        self.cost: PipelineCost | None = None
        self._seen = set[Pipeline]()

    @property
    def step_s(self) -> float:
        """The shortest step found; ``below_s`` before a pipeline is found."""
        return self.below_s if self.cost is None else self.cost.step_s

    def offer(self, pipeline: Pipeline) -> None:
        """Simulates a new pipeline if it may be better; keeps the better pipeline."""
        if pipeline in self._seen:
            return
        self._seen.add(pipeline)
        seconds = task_seconds(self.problem, pipeline)
        if not is_possible(seconds) or lower_bound_s(pipeline, seconds) >= self.step_s:
            return
        cost = evaluate_pipeline(self.problem, pipeline)
        if cost.fits and cost.step_s < self.step_s:
            self.pipeline, self.cost = pipeline, cost


def complete_pipeline(problem: StageProblem, pipeline: Pipeline) -> Pipeline | None:
    """Adds the least recomputation that makes a pipeline fit; None if it cannot fit.

    More recomputation never shortens a step, so each stage recomputes as few seconds as
    it can.
    """
    again = list[int]()
    for stage in range(pipeline.stages):
        chosen = _layers_again(problem, pipeline, stage)
        if chosen is None:
            return None
        again.extend(chosen)
    return dataclasses.replace(pipeline, recomputed=tuple(sorted(again)))


def _layers_again(
    problem: StageProblem, pipeline: Pipeline, stage: int
) -> tuple[int, ...] | None:
    """The layers of one stage that must be recomputed; None if the stage cannot fit."""
    costs = problem.costs_of(pipeline.microbatches)
    option, layers = pipeline.options[stage], pipeline.layers(stage)
    resident = float(costs.resident_bytes[list(layers), option].sum())
    for shared in problem.shared:
        if shared.target in layers and shared.source not in layers:
            resident += float(shared.copy_bytes[option])
    schedule, count = pipeline.schedule, pipeline.microbatches
    weights: list[int] | None = None
    if schedule.kind is ScheduleKind.INTERLEAVED:
        table = make_table(schedule, pipeline.stages, count)
        # The sum adds the maxima of the chunks, although they occur at different times,
        # so it may be too high.
        held = count_alive(table, stage).held.max(axis=0)
        sizes = np.diff(pipeline.cuts)[stage :: pipeline.stages]
        weights = np.repeat(held, sizes).tolist()
        fixed = [(resident, 1.0)]
    else:
        later = pipeline.stages - stage
        kept = kept_microbatches(schedule, count, later, pipeline.stages)
        pending = float(costs.pending[list(layers), option].sum())
        fixed = [(resident + wait * pending, float(held)) for held, wait in kept]
    found = choose_recomputed(problem, costs, layers, option, fixed, weights)
    return None if found is None else found.layers
