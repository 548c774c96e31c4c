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

from autopar_solver.stages.entries import can_recompute, kept_microbatches
from autopar_solver.stages.incumbent import Incumbent
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.recompute import choose_recomputed
from autopar_solver.stages.schedules.check import alive
from autopar_solver.stages.schedules.order import make_table
from autopar_solver.stages.schedules.tasks import Schedule, ScheduleKind
from autopar_solver.stages.solution import Pipeline


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
    problem: StageProblem, incumbent: Incumbent, candidates: list[UniformPipeline]
) -> None:
    """Plays pipelines until no bound is below the shortest step."""
    for candidate in candidates:
        if candidate.bound_s >= incumbent.step_s:
            return
        pipeline = _completed(problem, candidate)
        if pipeline is not None:
            incumbent.offer(pipeline)


def _stage_counts(
    problem: StageProblem, schedule: Schedule, most_stages: int
) -> list[int]:
    """Interleaving: every number; otherwise divisors of the layers, and powers of 2."""
    layers = problem.num_layers
    most = min(most_stages, layers // schedule.chunks)
    return [
        stages
        for stages in range(1, most + 1)
        if schedule.kind is ScheduleKind.INTERLEAVED
        or layers % stages == 0
        or stages & (stages - 1) == 0
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
        counts = held_by_chunk(schedule, stages, microbatches, stage, most=False)
        own = activation[stage::stages]
        bytes_[stage] = np.array(counts) @ own
    return bytes_


def held_by_chunk(
    schedule: Schedule, stages: int, microbatches: int, stage: int, *, most: bool
) -> tuple[int, ...]:
    """How many microbatches each chunk of a group holds, the gradients' halves aside.

    Args:
        schedule: any.
        stages: the number of all groups.
        microbatches: how many microbatches a step has.
        stage: the group.
        most: each chunk's most; otherwise what they hold when it is most in all.
    """
    if schedule.kind is not ScheduleKind.INTERLEAVED:
        kept = kept_microbatches(schedule, microbatches, stages - stage, stages)
        return (kept[0][0],)
    # Three rounds are the fill, the steady state and the drain.
    table = make_table(schedule, stages, min(microbatches, 3 * stages))
    held = alive(table, stage).held
    row = held.max(axis=0) if most else held[held.sum(axis=1).argmax()]
    return tuple(int(count) for count in row)


def _completed(problem: StageProblem, candidate: UniformPipeline) -> Pipeline | None:
    """With what must be computed again; None if it does not fit."""
    schedule = problem.schedules[candidate.schedule]
    pipeline = Pipeline(
        microbatches=candidate.microbatches,
        schedule=schedule,
        options=(candidate.option,) * candidate.stages,
        cuts=candidate.cuts,
    )
    again = list[int]()
    for stage in range(candidate.stages):
        chosen = recomputed_of(problem, pipeline, stage)
        if chosen is None:
            return None
        again.extend(chosen)
    return Pipeline(
        microbatches=pipeline.microbatches,
        schedule=schedule,
        options=pipeline.options,
        cuts=pipeline.cuts,
        recomputed=tuple(sorted(again)),
    )


def recomputed_of(
    problem: StageProblem, pipeline: Pipeline, stage: int
) -> tuple[int, ...] | None:
    """The layers of one device group that must be computed again; None if in vain."""
    costs = problem.costs_of(pipeline.microbatches)
    option, layers = pipeline.options[stage], pipeline.layers(stage)
    resident = float(costs.resident_bytes[list(layers), option].sum())
    for shared in problem.shared:
        if shared.target in layers and shared.source not in layers:
            resident += float(shared.copy_bytes[option])
    schedule, count = pipeline.schedule, pipeline.microbatches
    weights: list[int] | None = None
    if schedule.kind is ScheduleKind.INTERLEAVED:
        held = held_by_chunk(schedule, pipeline.stages, count, stage, most=True)
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
