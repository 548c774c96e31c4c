"""Pipelines whose device groups all have the same option.

Their parts follow two rules: the same number of layers each, or cuts where the time of
the layers before is nearest to an even share. Interleaved schedules have no other
pipelines; for the others these are where the search starts.

All options are bounded at once. Pipelines are then played from the least bound on,
until it reaches the shortest step.
"""

import math
from typing import NamedTuple

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import completed
from autopar_solver.stages.entries import can_recompute, kept_microbatches
from autopar_solver.stages.incumbent import Incumbent
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.schedules.tasks import Schedule, ScheduleKind
from autopar_solver.stages.solution import Pipeline

LATE = 500
"""How many pipelines are tried after the time limit, until one fits."""


class UniformPipeline(NamedTuple):
    """A pipeline without the choice of what is computed again.

    ``bound_s`` comes first: candidates sort by it.
    """

    bound_s: float
    microbatches: int
    schedule: int
    option: int
    stages: int
    cuts: tuple[int, ...]


def uniform_pipelines(
    problem: StageProblem, most_stages: int, cutoff_s: float = math.inf
) -> list[UniformPipeline]:
    """All of them whose bound is below the cutoff, the least bound first."""
    found = list[UniformPipeline]()
    for costs in problem.costs:
        for number, schedule in enumerate(problem.schedules):
            for stages in _stage_counts(problem, schedule, most_stages):
                for cuts in _rules(costs, stages * schedule.chunks):
                    bounds = _bounds(problem, costs, schedule, stages, cuts)
                    for option in np.flatnonzero(bounds < cutoff_s).tolist():
                        found.append(
                            UniformPipeline(
                                float(bounds[option]),
                                costs.microbatches,
                                number,
                                option,
                                stages,
                                tuple(cuts[:, option].tolist()),
                            )
                        )
    return sorted(set(found))


def offer_uniform(
    problem: StageProblem,
    incumbent: Incumbent,
    candidates: list[UniformPipeline],
    clock: Clock,
) -> float:
    """Plays pipelines until no bound is below the shortest step, or time is up.

    Args:
        problem: whose pipelines they are.
        incumbent: gets them.
        candidates: the least bound first.
        clock: when to stop; while there is no pipeline yet, `LATE` are tried anyway.

    Returns:
        A bound of those that were not played; ``inf`` if none can be better.
    """
    late = 0
    for candidate in candidates:
        if candidate.bound_s >= incumbent.step_s:
            return math.inf
        if clock.left <= 0:
            if incumbent.pipeline is not None or late == LATE:
                return candidate.bound_s
            late += 1
        pipeline = completed(
            problem,
            Pipeline(
                microbatches=candidate.microbatches,
                schedule=problem.schedules[candidate.schedule],
                options=(candidate.option,) * candidate.stages,
                cuts=candidate.cuts,
            ),
        )
        if pipeline is not None:
            incumbent.offer(pipeline)
    return math.inf


def _stage_counts(
    problem: StageProblem, schedule: Schedule, most_stages: int
) -> list[int]:
    """Divisors of the layers, and powers of two; one stage is not interleaved."""
    layers = problem.num_layers
    most = min(most_stages, layers // schedule.chunks)
    least = 2 if schedule.kind is ScheduleKind.INTERLEAVED else 1
    return [
        stages
        for stages in range(least, most + 1)
        if layers % stages == 0 or stages & (stages - 1) == 0
    ]


def _rules(costs: LayerCosts, parts: int) -> list[np.ndarray]:
    """``[parts + 1, options]``, where each rule cuts the chain for each option."""
    layers, options = costs.forward_s.shape
    share = np.arange(parts + 1) / parts
    equal = np.tile((share * layers).round().astype(int)[:, None], (1, options))
    work = costs.forward_s + costs.backward_input_s + costs.backward_weight_s
    work = np.where(np.isfinite(work), work, 0.0)
    before = np.concatenate([np.zeros((1, options)), np.cumsum(work, axis=0)])
    middles = (before[1:] + before[:-1]) / 2
    even = (middles[None] < share[:, None, None] * before[-1]).sum(axis=1)
    even[0], even[-1] = 0, layers
    # Every part has a layer: cuts move up behind each other, then down.
    steps = np.arange(parts + 1)[:, None]
    even = np.maximum.accumulate(even - steps, axis=0) + steps
    even = np.minimum(even, layers - parts + steps)
    return [equal, even]


def _bounds(
    problem: StageProblem,
    costs: LayerCosts,
    schedule: Schedule,
    stages: int,
    cuts: np.ndarray,
) -> np.ndarray:
    """``[options]``: no choice of what is computed again is faster; ``inf`` forbids."""
    numbers = np.arange(cuts.shape[1])

    def parts(array: np.ndarray) -> np.ndarray:
        """``[parts, options]``: sums of layers."""
        start = np.zeros((1, array.shape[1]))
        sums = np.concatenate([start, np.cumsum(array, axis=0)])
        return sums[cuts[1:], numbers] - sums[cuts[:-1], numbers]

    def groups(array: np.ndarray) -> np.ndarray:
        """``[stages, options]``: sums of parts."""
        return array.reshape(-1, stages, array.shape[1]).sum(axis=0)

    forward = np.where(np.isfinite(costs.forward_s), costs.forward_s, 0.0)
    backward = costs.backward_input_s + costs.backward_weight_s
    work = groups(parts(forward + backward))
    least = work.max(axis=0) * costs.microbatches
    step = parts(costs.step_s)[0]
    if not schedule.splits_backward:
        # The first microbatch reaches a group, and its cotangent goes back.
        before = np.cumsum(parts(forward + backward)[:stages], axis=0)
        before = np.concatenate([np.zeros_like(before[:1]), before[:-1]])
        least = (before + costs.microbatches * work).max(axis=0)
    least = np.maximum(least, parts(forward + costs.backward_input_s).sum(axis=0))
    taken = [stages * option.devices for option in problem.options]
    room = [problem.groups[option.group].devices for option in problem.options]
    possible = np.isfinite(costs.forward_s).all(axis=0)
    possible &= np.array(taken) <= np.array(room)
    can = can_recompute(costs)
    saved = np.where(can, costs.boundary_bytes, costs.activation_bytes)
    needed = groups(parts(costs.resident_bytes)) + _held(
        schedule, stages, costs.microbatches, parts(saved)
    )
    limit = [problem.limit_bytes(number) for number in numbers.tolist()]
    possible &= (needed <= np.array(limit) * (1 + 1e-9)).all(axis=0)
    return np.where(possible, least + step, np.inf)


def _held(
    schedule: Schedule, stages: int, microbatches: int, activation: np.ndarray
) -> np.ndarray:
    """``[stages, options]``: bytes of activations at one moment of the schedule."""
    bytes_ = np.zeros((stages, activation.shape[1]))
    for stage in range(stages):
        counts = _held_by_chunk(schedule, stages, microbatches, stage)
        bytes_[stage] = counts @ activation[stage::stages]
    return bytes_


def _held_by_chunk(
    schedule: Schedule, stages: int, microbatches: int, stage: int
) -> np.ndarray:
    """How many microbatches each chunk holds when a group first runs a backward."""
    if schedule.kind is not ScheduleKind.INTERLEAVED:
        kept = kept_microbatches(schedule, microbatches, stages - stage, stages)
        return np.array([kept[0][0]])
    begun = 2 * (stages - stage - 1) + (schedule.chunks - 1) * stages + 1
    rounds, rest = divmod(begun, stages * schedule.chunks)
    last = np.clip(rest - stages * np.arange(schedule.chunks), 0, stages)
    return np.minimum(rounds * stages + last, microbatches)
