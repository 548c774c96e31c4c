"""The lower bound of a pipeline's step as a sum and a maximum over its stages.

For schedules with one chunk, no pipeline takes less than

    sum_i add[i] + sum_i cross[i] + max(max_i peak[i], max_i link[i])

``add`` is what the first microbatch takes through the stage and back, ``cross`` what it
takes between stages. ``peak`` is what the stage has left to do for the other
microbatches once the first comes back; ``link`` is what the link has left to carry.
With ``M`` microbatches, ``f``, ``b`` and ``w`` the seconds of a stage, ``s`` stages
from it to the last and ``i`` before it:

    GPipe   add = f + b + w   peak = (M - 1) (f + b + w)
    1F1B    add = f + b + w   peak = (M - 1) (b + w) + (M - min(s, M)) f
    ZB-H1   add = f + b       peak = (M - 1) b + (M - min(s, M)) f + max(M - 1 - i, 0) w

The first stage adds what it does once a step and, in ZB-H1, its last ``w``.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar_solver.stages.entries import Entries, kept_microbatches
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.recompute import RecomputePrices, least_recompute_s
from autopar_solver.stages.schedules.tasks import Schedule, ScheduleKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What stages add to the bound, at one place in the pipeline.

    Attributes:
        add: what each stage adds; ``inf`` where it does not fit.
        peak: what its own maximum is.
    """

    add: np.ndarray
    peak: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossings:
    """What cuts add to the bound.

    Attributes:
        cross: ``[layers + 1, links, links]``; zero at both ends of the chain.
        link: the same shape, what a link has left to carry.
    """

    cross: np.ndarray
    link: np.ndarray


def crossings_of(
    problem: StageProblem, costs: LayerCosts, schedule: Schedule
) -> Crossings:
    """The crossings of a chain under a schedule."""
    links = problem.num_links
    both = costs.forward_link_s + costs.backward_link_s
    if schedule.kind is ScheduleKind.GPIPE:
        slowest = both
    else:
        slowest = np.maximum(costs.forward_link_s, costs.backward_link_s)
    count = costs.microbatches
    cross, link = np.zeros((2, problem.num_layers + 1, links, links))
    cross[1:-1] = both + 2 * costs.latency_s
    # Zero times infinity is not a number: where no link is, none is.
    link[1:-1] = np.where(np.isfinite(slowest), slowest, 0.0) * (count - 1)
    link[1:-1][~np.isfinite(slowest)] = np.inf
    return Crossings(cross=cross, link=link)


def terms_at(
    entries: Entries,
    prices: RecomputePrices,
    schedule: Schedule,
    microbatches: int,
    later: int,
    stages: int,
    least_s: np.ndarray | None = None,
) -> Terms:
    """What stages add when they stand at one place of the pipeline.

    Args:
        entries: the stages.
        prices: for the bound on what they compute again.
        schedule: one with one chunk.
        microbatches: how many microbatches a step has.
        later: the number of stages from this one to the last.
        stages: the number of all stages.
        least_s: seconds of computing again, where they are known better.
    """
    again = least_s
    if again is None:
        kept = kept_microbatches(schedule, microbatches, later, stages)
        again = least_recompute_s(entries, prices, kept)
    peak = peak_s(entries, again, schedule, microbatches, later, stages)
    add = entries.forward_s + entries.backward_s + again
    last = entries.step_s
    if schedule.splits_backward:
        last = last + entries.weight_s
    else:
        add = add + entries.weight_s
    return Terms(add=add + np.where(entries.first == 0, last, 0.0), peak=peak)


def peak_s(
    entries: Entries,
    again: np.ndarray,
    schedule: Schedule,
    microbatches: int,
    later: int,
    stages: int,
) -> np.ndarray:
    """The maximum's term of each stage; the arguments are those of `terms_at`."""
    others = microbatches - 1
    backward = others * (entries.backward_s + np.where(np.isfinite(again), again, 0.0))
    if schedule.splits_backward:
        backward = backward + max(others - (stages - later), 0) * entries.weight_s
    else:
        backward = backward + others * entries.weight_s
    begun = 1
    if schedule.kind is not ScheduleKind.GPIPE:
        begun = min(later, microbatches)
    return backward + (microbatches - begun) * entries.forward_s


def loosest_terms(
    entries: Entries,
    prices: RecomputePrices,
    schedule: Schedule,
    microbatches: int,
    most_stages: int,
) -> Terms:
    """Terms that no place in a pipeline of up to ``most_stages`` stages undercuts.

    Memory is counted as at the end of the pipeline, where least is alive.
    """
    stages = 1 if schedule.splits_backward else most_stages
    terms = terms_at(entries, prices, schedule, microbatches, 1, stages)
    peak = peak_s(
        entries,
        np.zeros(len(entries)),
        schedule,
        microbatches,
        most_stages,
        most_stages if not schedule.splits_backward else 2 * most_stages - 1,
    )
    return dataclasses.replace(terms, peak=peak)


def device_table(problem: StageProblem, options: Sequence[int]) -> np.ndarray:
    """``[options, groups]``: how many devices of each group an option takes."""
    table = np.zeros((len(options), len(problem.groups)), np.int64)
    for row, number in enumerate(options):
        table[row, problem.options[number].group] = problem.options[number].devices
    return table
