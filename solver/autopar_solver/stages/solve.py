"""Finds the pipeline with the shortest step, and a lower bound of every step.

A *space* is the set of pipelines with one schedule and one number of microbatches. The
lower bound of a space can be below the time of its best pipeline, because the bound
considers only some sequences of tasks. If only a few pipelines have bounds below the
best time found, the schedule of each of them is simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import PipelineIncumbent, complete_pipeline
from autopar_solver.stages.entries import (
    Entries,
    build_entries,
    can_recompute,
    kept_microbatches,
)
from autopar_solver.stages.problem import (
    BindingMemory,
    LayerCosts,
    Pipeline,
    StageProblem,
    StageSolution,
)
from autopar_solver.stages.relaxation import (
    Chain,
    chain_of,
    cheapest,
    crossings_of,
    device_table,
    fits_devices,
)
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind
from autopar_solver.stages.search import (
    Bounded,
    bound_space,
    fixed_space,
    most_stages,
    search_space,
)
from autopar_solver.status import Status


class Allowance:
    """The number of stages that the exhaustive search may still try."""

    def __init__(self, left: int) -> None:
        """Starts with ``left`` stages."""
        self.left = left

    def spend(self, count: int) -> bool:
        """Subtracts ``count`` stages; returns whether enough were left."""
        self.left -= count
        return self.left >= 0


def exhaust_space(
    bounded: Bounded,
    incumbent: PipelineIncumbent,
    gap: float,
    allowance: Allowance,
    clock: Clock,
) -> bool:
    """Simulates each pipeline that may be faster than the incumbent.

    Returns False if some pipelines were not simulated.

    Args:
        bounded: the space of pipelines.
        incumbent: receives the pipelines that are found.
        gap: improvements below this share of the step are ignored.
        allowance: the number of stages that may be tried, for all spaces together.
        clock: the time limit.
    """
    return _Chains(bounded, incumbent, gap, allowance, clock).extend((), 0, 0.0, 0.0)


class _Chains:
    """A depth-first search over the stages of a space."""

    def __init__(
        self,
        bounded: Bounded,
        incumbent: PipelineIncumbent,
        gap: float,
        allowance: Allowance,
        clock: Clock,
    ) -> None:
        """Prepares the search: removes stages that are part of no better pipeline."""
        self.space, self.terms = fixed_space(bounded, incumbent.step_s * (1 - gap))
        self.incumbent, self.gap = incumbent, gap
        self.allowance, self.clock = allowance, clock
        chain = self.space.chain
        self.after = cheapest(chain, self.terms.add).after
        self.begins = np.searchsorted(chain.first, np.arange(chain.layers + 1))

    def extend(
        self, chosen: tuple[int, ...], layer: int, add: float, peak: float
    ) -> bool:
        """Extends a chain of stages by every possible next stage.

        The chain covers the layers before ``layer``.
        """
        chain, entries = self.space.chain, self.space.entries
        if layer == chain.layers:
            self._offer(chosen)
            return True
        if len(chosen) == self.space.most_stages:
            return True
        low, high = self.begins[layer], self.begins[layer + 1]
        here = np.arange(low, high)
        cross = np.zeros(len(here))
        if chosen:
            cross = chain.cross[layer, chain.link[chosen[-1]], chain.link[here]]
        used = chain.taken[list(chosen)].sum(axis=0)
        fits = (used + chain.taken[here] <= chain.devices).all(axis=1)
        adds = add + cross + self.terms.add[here]
        peaks = np.maximum(peak, self.terms.peak[here])
        bounds = adds + self.after[chain.end[here], chain.link[here]]
        bounds = np.where(fits, bounds + np.maximum(peaks, self.space.low), np.inf)
        for place in np.argsort(bounds, kind="stable").tolist():
            if bounds[place] >= self.incumbent.step_s * (1 - self.gap):
                break
            if not self.allowance.spend(1) or self.clock.left_s <= 0:
                return False
            entry = int(here[place])
            end = int(entries.end[entry])
            done = self.extend(
                (*chosen, entry), end, float(adds[place]), float(peaks[place])
            )
            if not done:
                return False
        return True

    def _offer(self, chosen: tuple[int, ...]) -> None:
        entries = self.space.entries
        pipeline = complete_pipeline(
            self.space.problem,
            Pipeline(
                microbatches=self.space.costs.microbatches,
                schedule=self.space.schedule,
                options=tuple(int(entries.option[entry]) for entry in chosen),
                cuts=(0, *(int(entries.end[entry]) for entry in chosen)),
            ),
        )
        if pipeline is not None:
            self.incumbent.offer(pipeline)


# Uniform pipelines: all stages have the same submesh option.
#
# There are two rules for the cuts of a uniform pipeline. Either all parts have the same
# number of layers. Or part ``k`` of n parts begins where the layers before it take most
# nearly ``k / n`` of the seconds of all layers. Interleaved schedules have only uniform
# pipelines. For all other schedules the search starts from the uniform pipelines.
#
# Lower bounds are computed for all options at once. The pipelines are then simulated in
# ascending order of their bounds, until the next bound is at least the shortest step
# found.

LATE = 500
"""Largest number of pipelines tried after the time limit to find one that fits."""


class UniformPipeline(NamedTuple):
    """A pipeline for which the recomputed layers are not chosen yet.

    ``bound_s`` is the first field because candidates are sorted by it.
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
    """All uniform pipelines with a bound below the cutoff, by ascending bound."""
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
    incumbent: PipelineIncumbent,
    candidates: list[UniformPipeline],
    clock: Clock,
) -> float:
    """Simulates pipelines until no bound is below the shortest step, or time runs out.

    Args:
        problem: the problem of the pipelines.
        incumbent: receives the pipelines.
        candidates: the pipelines to try, in ascending order of their bounds.
        clock: the time limit. If no pipeline has fitted by then, up to `LATE` more are
            tried.

    Returns:
        A lower bound of the pipelines that were not simulated; ``inf`` if none of them
        can be better.
    """
    late = 0
    for candidate in candidates:
        if candidate.bound_s >= incumbent.step_s:
            return math.inf
        if clock.left_s <= 0:
            if incumbent.pipeline is not None or late == LATE:
                return candidate.bound_s
            late += 1
        pipeline = complete_pipeline(
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
    """The numbers of stages to try: divisors of the number of layers, powers of two.

    An interleaved schedule needs at least two stages.
    """
    layers = problem.num_layers
    most = min(most_stages, layers // schedule.chunks)
    least = 2 if schedule.kind is ScheduleKind.INTERLEAVED else 1
    return [
        stages
        for stages in range(least, most + 1)
        if layers % stages == 0 or stages & (stages - 1) == 0
    ]


def _rules(costs: LayerCosts, parts: int) -> list[np.ndarray]:
    """Returns, for each rule, ``[parts + 1, options]``: the cuts for each option."""
    layers, options = costs.forward_s.shape
    share = np.arange(parts + 1) / parts
    equal = np.tile((share * layers).round().astype(int)[:, None], (1, options))
    work = costs.forward_s + costs.backward_input_s + costs.backward_weight_s
    work = np.where(np.isfinite(work), work, 0.0)
    before = np.concatenate([np.zeros((1, options)), np.cumsum(work, axis=0)])
    middles = (before[1:] + before[:-1]) / 2
    even = (middles[None] < share[:, None, None] * before[-1]).sum(axis=1)
    even[0], even[-1] = 0, layers
    # Cuts are moved to later layers, then to earlier ones, until every part has at
    # least one layer.
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
    """``[options]``: a lower bound of a step's seconds; ``inf`` forbids an option.

    The bound holds for any choice of recomputed layers.
    """
    numbers = np.arange(cuts.shape[1])

    def parts(array: np.ndarray) -> np.ndarray:
        """``[parts, options]``: the sum over the layers of each part."""
        start = np.zeros((1, array.shape[1]))
        sums = np.concatenate([start, np.cumsum(array, axis=0)])
        return sums[cuts[1:], numbers] - sums[cuts[:-1], numbers]

    def groups(array: np.ndarray) -> np.ndarray:
        """``[stages, options]``: the sum over the parts of each stage."""
        return array.reshape(-1, stages, array.shape[1]).sum(axis=0)

    forward = np.where(np.isfinite(costs.forward_s), costs.forward_s, 0.0)
    backward = costs.backward_input_s + costs.backward_weight_s
    work = groups(parts(forward + backward))
    least = work.max(axis=0) * costs.microbatches
    step = parts(costs.step_s)[0]
    if not schedule.splits_backward:
        # A stage waits until the first microbatch arrives, and later its gradients must
        # travel back.
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
    needed = groups(parts(costs.resident_bytes)) + _held_bytes(
        schedule, stages, costs.microbatches, parts(saved)
    )
    limit = [problem.limit_bytes(number) for number in numbers.tolist()]
    possible &= (needed <= np.array(limit) * (1 + 1e-9)).all(axis=0)
    return np.where(possible, least + step, np.inf)


def _held_bytes(
    schedule: Schedule, stages: int, microbatches: int, activation: np.ndarray
) -> np.ndarray:
    """``[stages, options]``: activation bytes at one moment of the schedule."""
    bytes_ = np.zeros((stages, activation.shape[1]))
    for stage in range(stages):
        counts = _held_by_chunk(schedule, stages, microbatches, stage)
        bytes_[stage] = counts @ activation[stage::stages]
    return bytes_


def _held_by_chunk(
    schedule: Schedule, stages: int, microbatches: int, stage: int
) -> np.ndarray:
    """For each chunk, the microbatches held at the stage's first backward pass."""
    if schedule.kind is not ScheduleKind.INTERLEAVED:
        kept = kept_microbatches(schedule, microbatches, stages - stage, stages)
        return np.array([kept[0][0]])
    begun = 2 * (stages - stage - 1) + (schedule.chunks - 1) * stages + 1
    rounds, rest = divmod(begun, stages * schedule.chunks)
    last = np.clip(rest - stages * np.arange(schedule.chunks), 0, stages)
    return np.minimum(rounds * stages + last, microbatches)


# Local search improves a pipeline by small moves: it shifts a cut by one layer, or
# replaces a submesh by another submesh with as many devices.
#
# The bounds include the work that runs once per step for the first stage only. The
# simulation of a move includes it for all stages.

TURNS = 4
"""Largest number of times that all moves of the best pipeline are tried."""


def polish(problem: StageProblem, incumbent: PipelineIncumbent, clock: Clock) -> None:
    """Offers the neighbours of the best pipeline to the incumbent until none is better.

    A neighbour is a pipeline that one small move makes.

    Args:
        problem: the problem of the pipelines.
        incumbent: holds the best pipeline, and receives better ones.
        clock: the time limit.
    """
    for _ in range(TURNS):
        best = incumbent.pipeline
        if best is None:
            return
        for neighbour in _neighbours(problem, best):
            if clock.left_s <= 0:
                return
            pipeline = complete_pipeline(problem, neighbour)
            if pipeline is not None:
                incumbent.offer(pipeline)
        if incumbent.pipeline is best:
            return


def _neighbours(problem: StageProblem, pipeline: Pipeline) -> Iterator[Pipeline]:
    cuts, options = pipeline.cuts, pipeline.options
    for place in range(1, len(cuts) - 1):
        for cut in (cuts[place] - 1, cuts[place] + 1):
            if cuts[place - 1] < cut < cuts[place + 1]:
                moved = (*cuts[:place], cut, *cuts[place + 1 :])
                yield dataclasses.replace(pipeline, cuts=moved)
    for stage, option in enumerate(options):
        own = problem.options[option]
        for number, other in enumerate(problem.options):
            same = (other.group, other.devices, other.link)
            if number != option and same == (own.group, own.devices, own.link):
                changed = (*options[:stage], number, *options[stage + 1 :])
                yield dataclasses.replace(pipeline, options=changed)


# Mixed pipelines have one stage on each device group. Mixed pipelines are good first
# solutions if the groups have unequal devices.
#
# Each stage gets layers in proportion to its speed.

FASTEST = 4
"""Number of options that are tried for each device group."""
MOST_GROUPS = 4


def offer_mixed(
    problem: StageProblem, incumbent: PipelineIncumbent, clock: Clock
) -> None:
    """Simulates pipelines with one stage on each device group.

    The fastest options come first.

    Args:
        problem: the problem of the pipelines. With a single device group, no pipeline
            is offered.
        incumbent: receives the pipelines.
        clock: the time limit.
    """
    most = min(MOST_GROUPS, problem.num_layers, problem.max_stages or MOST_GROUPS)
    if not 1 < len(problem.groups) <= most:
        return
    for pipeline in _pipelines(problem):
        if clock.left_s <= 0:
            return
        whole = complete_pipeline(problem, pipeline)
        if whole is not None:
            incumbent.offer(whole)


def _pipelines(problem: StageProblem) -> Iterator[Pipeline]:
    kinds = [s for s in problem.schedules if s.kind is not ScheduleKind.INTERLEAVED]
    for costs in problem.costs:
        work = costs.forward_s + costs.backward_input_s + costs.backward_weight_s
        tried = [_fastest(problem, work, g) for g in range(len(problem.groups))]
        for chosen in itertools.product(*tried):
            for options in itertools.permutations(chosen):
                cuts = _proportional(work[:, list(options)])
                for schedule in kinds:
                    yield Pipeline(
                        microbatches=costs.microbatches,
                        schedule=schedule,
                        options=options,
                        cuts=cuts,
                    )


def _fastest(problem: StageProblem, work: np.ndarray, group: int) -> list[int]:
    """Returns the options of a group with the least total time of all layers."""
    room = problem.groups[group].devices
    own = [
        k
        for k, option in enumerate(problem.options)
        if option.group == group and option.devices <= room
    ]
    possible = [k for k in own if math.isfinite(work[:, k].sum())]
    return sorted(possible, key=lambda k: float(work[:, k].sum()))[:FASTEST]


def _proportional(work: np.ndarray) -> tuple[int, ...]:
    """Cuts that give each stage layers in proportion to its speed.

    Args:
        work: float64 ``[layers, stages]``, seconds of each layer on each stage.

    >>> _proportional(np.array([[1.0, 2.0]] * 6))
    (0, 4, 6)
    """
    layers, stages = work.shape
    speed = 1.0 / np.maximum(work.sum(axis=0), 1e-300)
    share = np.cumsum(speed) / speed.sum()
    before = np.cumsum(work.mean(axis=1))
    before /= max(float(before[-1]), 1e-300)
    cuts = [0]
    for k in range(stages - 1):
        wanted = int(np.argmin(np.abs(before - share[k]))) + 1
        cuts.append(min(max(wanted, cuts[-1] + 1), layers - (stages - 1 - k)))
    return (*cuts, layers)


# If no pipeline fits, a stage that no pipeline can avoid gives the reason.


def binding_memory(problem: StageProblem) -> BindingMemory | None:
    """Returns the stage whose memory every pipeline exceeds by the smallest factor.

    In every pipeline some stage exceeds its memory by at least the factor of the
    returned stage, even if the stage holds one microbatch and recomputes everything.
    The result is None if memory is not the reason why no pipeline exists: then options
    are forbidden for some layers, or there are too few devices.
    """
    found = [
        binding
        for costs in problem.costs
        for schedule in problem.schedules
        if (binding := _binding(problem, costs, schedule)) is not None
    ]
    explained = len(found) == len(problem.costs) * len(problem.schedules)
    if not explained:
        return None
    return min(found, key=lambda binding: binding.least_bytes / binding.limit_bytes)


def _binding(
    problem: StageProblem, costs: LayerCosts, schedule: Schedule
) -> BindingMemory | None:
    entries = build_entries(problem, costs)
    taken = device_table(problem, range(len(problem.options)))
    # Each chunk of a stage counts as a stage of its own here, on the same devices.
    devices = np.array([group.devices * schedule.chunks for group in problem.groups])
    cross = crossings_of(problem, costs, schedule).cross
    chain = chain_of(entries, taken, devices, cross)
    used = _least_bytes(entries, schedule, costs.microbatches)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(used > 0, used / entries.limit_bytes, 0.0)
    entry = _needed_stage(chain, share)
    if entry is None or share[entry] <= 1:
        return None
    return BindingMemory(
        first=int(entries.first[entry]),
        last=int(entries.end[entry]) - 1,
        option=int(entries.option[entry]),
        least_bytes=float(used[entry]),
        limit_bytes=float(entries.limit_bytes[entry]),
    )


def _least_bytes(entries: Entries, schedule: Schedule, microbatches: int) -> np.ndarray:
    """The memory of each stage at the position in the pipeline where it needs least."""
    held = 1
    if schedule.chunks == 1:
        held = kept_microbatches(schedule, microbatches, 1, 1)[0][0]
    kept = entries.running_bytes + held * entries.activation_bytes
    least = entries.activation_bytes - entries.saving_bytes
    again = entries.again_bytes + held * least
    return entries.resident_bytes + np.minimum(kept, again)


def _needed_stage(chain: Chain, share: np.ndarray) -> int | None:
    """Finds the stage whose ``share`` some stage of every chain reaches.

    The share is the stage's need of memory, divided by the memory of its devices.
    """
    order = np.argsort(share, kind="stable")
    low, high = 0, len(order)
    if not high or not fits_devices(chain, np.ones(high, bool)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        allowed = np.zeros(len(order), bool)
        allowed[order[:middle]] = True
        if fits_devices(chain, allowed):
            high = middle
        else:
            low = middle
    return int(order[high - 1])


CHAINS = 20_000
"""Number of stages that may be tried to close the gap between bound and best step."""


def solve_stages(
    problem: StageProblem,
    *,
    seconds: float | None = None,
    gap: float = 1e-4,
    below_s: float = math.inf,
) -> StageSolution:
    """Chooses stages, submeshes, microbatches, schedule and recomputed layers.

    The search space has every cut of the chain, every order of submeshes that fit on
    the devices together, and every set of layers to recompute. Interleaved schedules
    are limited to uniform pipelines: every stage has the same option, and the parts
    have equal numbers of layers or equal times. The number of stages of a uniform
    pipeline divides the number of layers or is a power of two. Pipelines of one stage
    are in the space, so the result is never worse than the best pipeline of one stage.

    Args:
        problem: the problem to solve.
        seconds: wall-clock limit; None to stop only when the search is done.
        gap: the largest difference of step and bound, divided by the step, at which the
            pipeline counts as optimal.
        below_s: only steps shorter than this are searched. If no shorter step exists,
            the status is unknown, and the bound is about ``below_s``.
    """
    clock = Clock(time.monotonic(), seconds)
    incumbent = PipelineIncumbent(problem, below_s)
    candidates = uniform_pipelines(problem, most_stages(problem), below_s)
    bound = offer_uniform(problem, incumbent, candidates, clock)
    offer_mixed(problem, incumbent, clock)
    bound = min(bound, _search(problem, incumbent, gap, clock))
    bound = min(bound, incumbent.step_s * (1 - gap))
    if incumbent.pipeline is None:
        done = bound == math.inf
        return StageSolution(
            pipeline=None,
            cost=None,
            bound_s=bound,
            status=Status.INFEASIBLE if done else Status.UNKNOWN,
            seconds=clock.spent_s,
            binding=binding_memory(problem) if done else None,
        )
    proved = bound >= incumbent.step_s * (1 - gap) * (1 - 1e-12)
    return StageSolution(
        pipeline=incumbent.pipeline,
        cost=incumbent.cost,
        bound_s=min(bound, incumbent.step_s),
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        seconds=clock.spent_s,
    )


def _search(
    problem: StageProblem, incumbent: PipelineIncumbent, gap: float, clock: Clock
) -> float:
    """Searches all schedules that are not interleaved; returns their lower bound."""
    spaces = list[Bounded]()
    for costs, schedule in itertools.product(problem.costs, problem.schedules):
        if schedule.kind is ScheduleKind.INTERLEAVED:
            continue
        if clock.left_s <= 0:
            return 0.0
        cutoff = incumbent.step_s * (1 - gap)
        space = bound_space(problem, costs, schedule, cutoff)
        if space is not None:
            spaces.append(space)

    def turn(number: int) -> tuple[bool, float]:
        """Returns a sort key: schedules with split backward passes come last.

        Their bounds are far below their steps, so their search takes longest.
        """
        space = spaces[number]
        return space.space.schedule.splits_backward, space.bound_s

    left = [
        (search_space(spaces[number], incumbent, gap, clock), number)
        for number in sorted(range(len(spaces)), key=turn)
    ]
    if any(least < incumbent.step_s * (1 - gap) for least, _ in left):
        polish(problem, incumbent, clock)
    bound, allowance = math.inf, Allowance(CHAINS)
    for least, number in sorted(left):
        if least >= incumbent.step_s * (1 - gap):
            continue
        if not exhaust_space(spaces[number], incumbent, gap, allowance, clock):
            bound = min(bound, least)
    return bound
