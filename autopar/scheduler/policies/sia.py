"""Sia: goodput by kind and number of devices, one integer program a round.

Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster
scheduling", SOSP 2023: a job's row of goodputs is divided by its least one, a move
scales it by its age, and the sum of powers (p = -0.5) is minimised.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.scheduler.jobs import Allocation, Decisions, JobView, Views
from autopar.scheduler.nodes import Nodes, pack, sizes_of
from autopar.scheduler.policies.base import Adapts, changes
from autopar_solver import AllocationProblem, solve_allocation

_POWER = -0.5
_WAIT = 1.1  # what a job that waits adds


class Sia:
    """Minimises the sum of powers of normalised goodputs."""

    name = "sia"
    adapts: Adapts = "batch"
    oracle = False

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """The solution of the program, put on nodes."""
        del now_s
        kinds = sorted(
            {k for k, n in zip(nodes.kinds, nodes.devices, strict=True) if n}
        )
        allowed = [[i for i in nodes.of_kind(k) if nodes.devices[i]] for k in kinds]
        rows = [
            _row(view, current.get(name, ()), nodes, kinds, allowed)
            for name, view in jobs.items()
        ]
        budgets = [sum(nodes.devices[i] for i in of) for of in allowed]
        problem = AllocationProblem.of(rows, budgets)
        solution = solve_allocation(problem)
        wanted = {
            name: (int(problem.counts[o]), allowed[int(problem.kinds[o])])
            for name, o in zip(jobs, solution.choices, strict=True)
            if o >= 0
        }
        chosen = pack(wanted, current, nodes)
        why = "normalised goodput of all configurations"
        return Decisions(
            allocations=chosen,
            reasons=changes(jobs, current, chosen, why),
            gap=solution.gap,
        )


def _row(
    view: JobView,
    held: Allocation,
    nodes: Nodes,
    kinds: list[str],
    allowed: list[list[int]],
) -> list[tuple[float, int, int]]:
    """Value, kind and count of each configuration; doubling at most in a round."""
    found: list[tuple[float, int, int]] = []
    limit = min(max(2 * view.tried, 1), view.most)
    moved = max(view.age_s - view.restarts * view.restart_s, 0.0)
    moved /= view.age_s + view.restart_s
    for kind, of in enumerate(allowed):
        per = max(nodes.devices[i] for i in of)
        total = sum(nodes.devices[i] for i in of if nodes.devices[i] == per)
        counts = np.array(sizes_of(per, total))
        counts = counts[counts <= limit]
        speeds = view.on(kinds[kind]).goodput(-(-counts // per), counts)
        for count, speed in zip(counts.tolist(), speeds.tolist(), strict=True):
            stays = len(held) == count and held[0] in of
            factor = 1.0 if stays or not held else moved
            if speed * factor > 0:
                found.append((speed * factor, kind, count))
    least = min((speed / count for speed, _, count in found), default=1.0)
    return [
        (_WAIT - (speed / least) ** _POWER, kind, count) for speed, kind, count in found
    ]
