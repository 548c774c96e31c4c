"""Breaks ties between layouts of batch inputs: prefers the layout with most shards.

If all readers of a batch input take slices of it, the cost model charges nothing for
replicating the input on every device. Real input pipelines deliver shards, so among
layouts of the same cost the one with the most shards is taken. The same is done for
arrays that are made without inputs, such as a mask, and enter a loop. In the cost
model, every device can compute such an array in full at no cost, but the loop keeps it
in the memory of every device. All these arrays are called free arrays here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout
from autopar.planner.candidate import Candidate, assignment_of, candidate_of, peak_of
from autopar.planner.problem import Formulation
from autopar.steps.analysis import Analysis
from autopar_passes.graph.roles import InputRole
from autopar_solver import ShardingProblem, Solution

# Costs that differ by less than this fraction of the step count as equal.
_ROUNDING = 1e-12


def tie_broken(analysis: Analysis, found: Candidate) -> Candidate:
    """Splits the free arrays of a candidate, if the result still fits."""
    solution = split_most(analysis, found.formulation, found.solution)
    if solution.choices == found.solution.choices:
        return found
    split = candidate_of(analysis, found.formulation, solution, found.assignment)
    limit = max(found.peak_memory_bytes, float(found.pricer.cluster.memory_bytes))
    fits = split.peak_memory_bytes <= limit
    return split if fits and split.step_s <= found.step_s * (1 + 1e-9) else found


def laid_out(
    analysis: Analysis, formulation: Formulation, solution: Solution
) -> tuple[Solution, Assignment, float]:
    """A solution, its layouts, and the most bytes live at once on one device.

    If the solution does not fit the memory, but would fit with its free arrays split,
    they are split.
    """
    pricer = formulation.pricer
    layouts = assignment_of(analysis, formulation, solution)
    peak_bytes = peak_of(layouts, pricer)
    if peak_bytes > pricer.cluster.memory_bytes:
        split = split_most(analysis, formulation, solution)
        if split.choices != solution.choices:
            apart = assignment_of(analysis, formulation, split)
            apart_bytes = peak_of(apart, pricer)
            if apart_bytes <= pricer.cluster.memory_bytes:
                return split, apart, apart_bytes
    return solution, layouts, peak_bytes


def split_most(
    analysis: Analysis, formulation: Formulation, solution: Solution
) -> Solution:
    """Returns a solution of the same cost with the most shards of the free arrays."""
    choices = list(solution.choices)
    slack = _ROUNDING * abs(solution.cost)
    for group, layouts in _groups(analysis, formulation):
        sizes = formulation.pricer.sizes
        rank = [_split(layout, sizes) for layout in layouts]
        best = _cheapest(formulation.problem, choices, group, choices[group[0]])
        limit = best[0] + slack
        order = sorted(range(len(rank)), key=lambda k: rank[k], reverse=True)
        for k in order:
            if rank[k] <= rank[choices[group[0]]]:
                break
            cost, picked = _cheapest(formulation.problem, choices, group, k)
            if cost <= limit:
                for node, choice in zip(group, picked, strict=True):
                    choices[node] = choice
                break
    return dataclasses.replace(solution, choices=tuple(choices))


def _groups(
    analysis: Analysis, formulation: Formulation
) -> Iterator[tuple[list[int], list[Layout]]]:
    """For each free array: the nodes of the array and its copies, and its layouts."""
    for value, kind in _free(analysis):
        home = analysis.contraction.homes.get(value)
        if home is None or analysis.contraction.nodes[home.node].kind != kind:
            continue
        copies = [
            c.node
            for c in formulation.copies
            if analysis.sources[c.value_class].home.node == home.node
        ]
        if len(copies) <= 2:
            layouts = formulation.spaces[home.node].layouts(home.dims)
            yield [home.node, *copies], layouts


def _free(analysis: Analysis) -> Iterator[tuple[int, str]]:
    """The free arrays with their kinds of nodes: batch inputs, and inputs of loops that
    are made without inputs.
    """
    for given in analysis.graph.inputs:
        if given.role is InputRole.BATCH:
            yield given.value, "input"
    floating = analysis.contraction.floating
    for op in analysis.graph.operators:
        entering = op.kind == "enter" and op.index == op.class_index
        if entering and not floating.isdisjoint(op.inputs):
            yield op.outputs[0], "array"


def _split(layout: Layout, sizes: Sequence[int]) -> tuple[int, int]:
    """The number of shards along the rows, then the number of shards along all
    dimensions.
    """
    parts = [int(np.prod([sizes[a] for a in axes], dtype=int)) for axes in layout]
    return (parts[0] if parts else 1), int(np.prod(parts, dtype=int))


def _cheapest(
    problem: ShardingProblem, choices: Sequence[int], group: Sequence[int], first: int
) -> tuple[float, tuple[int, ...]]:
    """The best choices of a group of nodes, for a given choice of its first node.

    The choices of all other nodes stay.
    """
    own = [np.array(problem.node_costs[n], dtype=float) for n in group]
    number = {n: k for k, n in enumerate(group)}
    between = np.zeros((len(own[1]), len(own[2])) if len(group) == 3 else ())
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        a, b = number.get(i), number.get(j)
        if a is None and b is None:
            continue
        if b is None and a is not None:
            own[a] = own[a] + matrix[:, choices[j]]
        elif a is None and b is not None:
            own[b] = own[b] + matrix[choices[i], :]
        elif a == 0 and b is not None:
            own[b] = own[b] + matrix[first, :]
        elif b == 0 and a is not None:
            own[a] = own[a] + matrix[:, first]
        else:
            between = between + (matrix if (a, b) == (1, 2) else matrix.T)
    return _minimum(own, between, first)


def _minimum(
    own: Sequence[np.ndarray], between: np.ndarray, first: int
) -> tuple[float, tuple[int, ...]]:
    base = float(own[0][first])
    if len(own) == 1:
        return base, (first,)
    total = own[1] if len(own) == 2 else own[1][:, None] + own[2][None, :] + between
    where = np.unravel_index(int(np.argmin(total)), total.shape)
    return base + float(total[where]), (first, *(int(k) for k in where))
