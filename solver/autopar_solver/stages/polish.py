"""Improves a pipeline by small moves: a cut by one layer, a submesh of the same size.

Bounds leave out what all stages but the first do once a step; moves weigh it.
"""

import dataclasses
from collections.abc import Iterator

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import completed
from autopar_solver.stages.incumbent import Incumbent
from autopar_solver.stages.problem import StageProblem
from autopar_solver.stages.solution import Pipeline

TURNS = 4
"""How often all moves of the best pipeline are tried."""


def polish(problem: StageProblem, incumbent: Incumbent, clock: Clock) -> None:
    """Offers the neighbours of the best pipeline until none of them is better.

    Args:
        problem: whose pipelines they are.
        incumbent: has the best pipeline, and gets better ones.
        clock: when to stop.
    """
    for _ in range(TURNS):
        best = incumbent.pipeline
        if best is None:
            return
        for neighbour in _neighbours(problem, best):
            if clock.left <= 0:
                return
            pipeline = completed(problem, neighbour)
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
