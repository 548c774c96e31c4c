"""Plans without some groups of messages.

A message that collectives share has a latency, which is paid once for its group and is
in no problem of the layouts. So where latencies may decide, the problem is solved again
without each of the groups that a solution used: branch and bound over sets of groups,
the most promising first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

from autopar.cost.combining import SUMS, Group
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.planner.candidate import WORTHWHILE, Candidate
from autopar.planner.limit import Limit

# Problems solved for one mesh.
_MOST_PROBLEMS = 8


def with_fewer_messages(
    solved: Callable[[Pricer], Candidate],
    limit: Limit,
    first: Candidate,
    best: Candidate,
) -> Candidate:
    """The best of plans without some groups of messages.

    No plan without a set of groups is faster than the objective of its problem, and
    one that does not use all groups of a problem's solution is without one of them.

    Args:
      solved: the best plan at prices that rule groups out, or a `PlanError`.
      limit: of time.
      first: the solution with all groups.
      best: the fastest plan known.
    """
    left, tried = [first], {frozenset[Group]()}
    floor_s = math.inf
    while left:
        left.sort(key=lambda c: -c.solution.cost)
        found = left.pop()
        if limit.over or _settled(found, best):
            floor_s = min(floor_s, found.bound_s)
            continue
        floor_s = min(floor_s, _with_all_groups_s(found))
        pricer = found.formulation.pricer
        for group in sorted(found.groups):
            without = pricer.without | {group}
            if without in tried:
                continue
            if len(tried) == _MOST_PROBLEMS:
                floor_s = min(floor_s, *(c.bound_s for c in (found, *left)))
                left.clear()
                break
            tried.add(without)
            fewer = dataclasses.replace(pricer, without=without)
            with contextlib.suppress(PlanError):
                other = solved(fewer)
                left.append(other)
                best = min(best, other, key=lambda c: c.step_s)
    return dataclasses.replace(best, lower_s=min(floor_s, best.step_s))


def _with_all_groups_s(found: Candidate) -> float:
    """A lower bound of the plans that use all groups of messages of a solution."""
    if found.formulation.discounts is None:
        return found.bound_s + found.step_s - found.solution.cost
    return found.bound_s + _felt_s(found)


def _felt_s(found: Candidate) -> float:
    """The latencies of shared messages, as far as they lengthen a step.

    Where communication may be hidden, they count as much as the bytes of the messages
    do at the weights of the problem.
    """
    lowered = found.formulation.discounts
    if lowered is None:
        return found.shared_s
    operators = found.assignment.graph.operators
    out = 0.0
    for c in found.collectives:
        maker = operators[c.operator].class_index
        summed = c.step.kind in SUMS
        factor = lowered.sums[maker] if summed else lowered.gathers[c.ready]
        out += float(factor) * c.shared_s(found.pricer)
    return out


def _settled(found: Candidate, best: Candidate) -> bool:
    """Whether no plan without more groups can be worth it: their latencies are few."""
    return found.step_s - _felt_s(found) >= (1 - WORTHWHILE) * best.step_s
