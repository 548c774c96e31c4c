"""Pipelines of one stage on each device group, as a start where devices are unequal.

Each stage gets a share of the chain's time that is proportional to its speed.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import completed
from autopar_solver.stages.incumbent import Incumbent
from autopar_solver.stages.problem import StageProblem
from autopar_solver.stages.schedules.tasks import ScheduleKind
from autopar_solver.stages.solution import Pipeline

FASTEST = 4
"""How many options of each device group are tried."""
MOST_GROUPS = 4


def offer_mixed(problem: StageProblem, incumbent: Incumbent, clock: Clock) -> None:
    """Plays pipelines with one stage on each device group, the fastest options first.

    Args:
        problem: whose pipelines they are; nothing is offered for a single group.
        incumbent: gets them.
        clock: when to stop.
    """
    most = min(MOST_GROUPS, problem.num_layers, problem.max_stages or MOST_GROUPS)
    if not 1 < len(problem.groups) <= most:
        return
    for pipeline in _pipelines(problem):
        if clock.left <= 0:
            return
        whole = completed(problem, pipeline)
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
    """The options of a group on which all layers take least."""
    room = problem.groups[group].devices
    own = [
        k
        for k, option in enumerate(problem.options)
        if option.group == group and option.devices <= room
    ]
    possible = [k for k in own if math.isfinite(work[:, k].sum())]
    return sorted(possible, key=lambda k: float(work[:, k].sum()))[:FASTEST]


def _proportional(work: np.ndarray) -> tuple[int, ...]:
    """Cuts that give each stage a share of the layers' time by its speed.

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
