"""The plan that splits nothing, where it is faster than what was found.

The latencies of messages that collectives share are in no problem of the search
(`autopar.planner.solving`). In a small step they may be more than what splitting saves.
"""

from __future__ import annotations

import contextlib
import dataclasses

from autopar.cost.items import work_items
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.problem import Restriction, Within
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node


def not_slower_than_whole(
    analysis: Analysis, found: Candidate, restriction: Restriction | None = None
) -> Candidate:
    """Returns a plan, or the one that splits nothing if that fits and is faster.

    Args:
      analysis: the step.
      found: the best plan of a search.
      restriction: says which strategies are allowed on its mesh.
    """
    whole = found.assignment.undivided
    alone_s = sum(item.cost.work_s for item in work_items(whole, found.pricer))
    if alone_s >= found.step_s:
        return found

    def splits_nothing(node: Node, strategy: object) -> bool:
        return strategy == whole.strategies[node.index]

    rule = Within(restriction, splits_nothing)
    with contextlib.suppress(PlanError):
        other = solve_mesh(analysis, found.pricer, rule, weights={})
        if other.step_s < found.step_s:
            return dataclasses.replace(other, lower_s=min(found.bound_s, other.step_s))
    return found
