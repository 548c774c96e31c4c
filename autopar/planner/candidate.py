"""Candidates (assignments with their prices), and results of a search.

An *assignment* gives every array a layout on one mesh. A *formulation* is the solver's
problem on this mesh (`autopar.planner.problem`): its nodes are groups of operators and
inputs, and a *strategy* of a node gives the node's arrays their layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cluster import MeshShape
from autopar.cost.breakdown import CostBreakdown, step_s
from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.live import live
from autopar.cost.overlap import Timeline
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective
from autopar.cost.work import gathered_nodes
from autopar.layouts.assignment import Assignment, assign
from autopar.layouts.layout import Layout
from autopar.planner.codecs.gathers import with_gathers
from autopar.planner.codecs.sites import Sending
from autopar.planner.problem import Formulation
from autopar.planner.scheme import with_axis_names
from autopar.planner.weights import WHOLE, Weights
from autopar.steps.analysis import Analysis
from autopar_passes.graph.roles import InputRole
from autopar_solver import ShardingProblem, Solution, Status

# The search solves no further problem if the result could save at most this fraction of
# a step's seconds.
WORTHWHILE = 5e-3


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The best assignment found on one mesh.

    Attributes:
      assignment: the layout of every array, as the chosen strategies imply.
      pricer: the mesh and cluster.
      formulation: the problem that the solver was given, with the strategies of its
        nodes.
      solution: the solver's answer to it.
      estimate: the work, the messages and the memory of one step, as lists.
      peak_memory_bytes: most bytes live at once on one device.
      weights: the factors by which the problem multiplied seconds that may overlap with
        others (`autopar.planner.weights`).
      lower_s: a lower bound of the step time of every plan of this mesh, in seconds.
        If it is None, the bound is the one in `solution`.
      sending: the codec of each gradient; None: the user requested no codecs.
      before_s: seconds of a step under this mesh's fastest plan without codecs; None:
        this candidate is that plan.
      free_s: seconds of a step under the fastest plan without codecs that the search
        saw, even a plan that does not fit the memory; None: this candidate is that
        plan.
    """

    assignment: Assignment
    pricer: Pricer
    formulation: Formulation
    solution: Solution
    estimate: StepEstimate
    peak_memory_bytes: float
    weights: Weights = WHOLE
    lower_s: float | None = None
    sending: Sending | None = None
    before_s: float | None = None
    free_s: float | None = None

    @functools.cached_property
    def mesh(self) -> MeshShape:
        """The mesh; its axes have the user's names or are named after their use."""
        works = self.estimate.work.table.works
        return with_axis_names(self.pricer.mesh, self.assignment, works)

    @property
    def cost(self) -> CostBreakdown:
        """The cost of a step, including the codecs if gradients have any."""
        return self.estimate.cost if self.sending is None else self.sending.cost

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of a step under the assignment, in program order."""
        return self.estimate.messages.collectives

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The work of the forward and the backward pass, and the communication that may
        overlap with the work.
        """
        return self.estimate.timelines

    @property
    def compute_s(self) -> float:
        """Seconds of work on arrays in one step, including communication that overlaps
        with the work.
        """
        return self.cost.work_s + self.cost.contention_s

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that overlap with work."""
        return self.cost.cover_s

    @property
    def communication_s(self) -> float:
        """Seconds of communication in one step, with the work of codecs."""
        return self.cost.communication_s + self.cost.codec_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in one step."""
        return self.cost.communication_bytes

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return step_s(self.cost)

    @property
    def plain_s(self) -> float:
        """Seconds of one step if the compiler sums the gradients, without codecs."""
        return step_s(self.estimate.cost)

    @property
    def saved_s(self) -> float:
        """Seconds by which codecs shorten a step, compared with `plain_s`."""
        return self.plain_s - self.step_s

    @property
    def held_bytes(self) -> float:
        """The most bytes live at once on one device, including the state of codecs."""
        kept = 0.0 if self.sending is None else self.sending.memory_bytes
        return self.peak_memory_bytes + kept

    @property
    def bound_s(self) -> float:
        """A lower bound of the seconds of every plan on this mesh."""
        return self.solution.bound if self.lower_s is None else self.lower_s

    @property
    def report(self) -> Solution:
        """The plan's cost, its lower bound, and whether the plan is proved to be
        optimal.

        The cost is the predicted seconds of a step if the search solved several
        problems on this mesh. It is the objective value of the problem if the search
        solved only one. A plan counts as proved to be optimal if no other plan can be
        faster by a fraction of `WORTHWHILE` or more. The gap is the largest fraction by
        which another plan may be faster.
        """
        if self.lower_s is None:
            return self.solution
        bound_s = min(self.bound_s, self.step_s)
        proved = bound_s >= (1 - WORTHWHILE) * self.step_s
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        return dataclasses.replace(
            self.solution, cost=self.step_s, bound=bound_s, status=status
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """The best candidate, and the result on every mesh that was tried.

    If the user gave the layouts, nothing is searched, and no lower bound of the time of
    other plans is known.

    Attributes:
      best: the fastest candidate.
      tried: each mesh, and its best candidate; None: no plan was found on the mesh.
      seconds: duration of the search.
      searched: whether the search considered other layouts than given ones.
      floor_s: a lower bound of the seconds of a step under every plan of all meshes;
        infinite if the bound of the best candidate holds for all meshes.
      short: whether on at least one mesh no plan fits the memory of a device.
    """

    best: Candidate
    tried: tuple[tuple[MeshShape, Candidate | None], ...]
    seconds: float
    searched: bool = True
    floor_s: float = math.inf
    short: bool = False

    @property
    def slowdown(self) -> float:
        """The seconds of a step, divided by those with unlimited memory per device."""
        known = [
            c.plain_s if c.free_s is None else c.free_s for _, c in self.tried if c
        ]
        free_s = min(known, default=self.best.plain_s)
        return math.inf if self.short or not free_s else self.before_s / free_s

    @property
    def before_s(self) -> float:
        """Seconds of a step under the fastest plan without codecs."""
        known = [c for _, c in self.tried if c is not None]
        found = (c.plain_s if c.before_s is None else c.before_s for c in known)
        return min(found, default=self.best.plain_s)

    @property
    def report(self) -> Solution:
        """The best candidate's cost and bound, compared with the plans of all
        meshes.
        """
        return with_bound(self.best.report, self.floor_s)


def with_bound(known: Solution, floor_s: float) -> Solution:
    """Returns a solution whose lower bound also holds for plans of other meshes.

    Args:
      known: the plan's solution; its bound holds only for the plans of its own mesh.
      floor_s: a lower bound of the seconds of a step under plans of other meshes.
    """
    if floor_s >= known.bound:
        return known
    proved = known.status is Status.OPTIMAL and floor_s >= (1 - WORTHWHILE) * known.cost
    status = Status.OPTIMAL if proved else Status.FEASIBLE
    return dataclasses.replace(known, bound=floor_s, status=status)


def choices_of(formulation: Formulation, assignment: Assignment) -> list[int] | None:
    """Finds an assignment's strategies in a formulation; None if one is missing."""
    choices: list[int] = []
    count = len(assignment.strategies)
    for space, strategy in zip(
        formulation.spaces[:count], assignment.strategies, strict=True
    ):
        if strategy not in space.strategies:
            return None
        choices.append(space.strategies.index(strategy))
    for copy in formulation.copies:
        chosen = assignment.copies.get((copy.value_class, copy.backward))
        if chosen is None:
            return None
        home = assignment.home_layout(copy.uses[0].example)
        mode = copy.mode_of(chosen.layout == home, chosen.reuse)
        layouts = copy.space.layouts(copy.dims)
        matches = [
            k
            for k, (layout, m) in enumerate(zip(layouts, copy.modes, strict=True))
            if layout == chosen.layout and m is mode
        ]
        if not matches:
            return None
        choices.append(matches[0])
    return choices


def candidate_of(
    analysis: Analysis,
    formulation: Formulation,
    solution: Solution,
    like: Assignment | None = None,
) -> Candidate:
    """Turns a solution into layouts, and prices a step in these layouts.

    Args:
      analysis: the step.
      formulation: the problem that the solver was given.
      solution: the solver's answer to it.
      like: other layouts. Gradients are summed at the same places of the program as in
        these layouts, parameters are gathered by the same codecs, and attention kernels
        with the same layouts gather keys and values if they do there; None: gradients
        are summed once in each step.
    """
    assignment = assignment_of(analysis, formulation, solution)
    if like is not None:
        each = like.sums_each_microbatch
        pairs = enumerate(zip(assignment.strategies, like.strategies, strict=True))
        same = frozenset(node for node, (one, other) in pairs if one == other)
        assignment = dataclasses.replace(
            assignment,
            sums_each_microbatch=each,
            gathered=(assignment.gathered - same) | (like.gathered & same),
        )
        if formulation.pricer.gathers is None:
            assignment = dataclasses.replace(assignment, gathers=like.gathers)
    peak_bytes = peak_of(assignment, formulation.pricer)
    return price_solution(formulation, solution, assignment, peak_bytes)


def assignment_of(
    analysis: Analysis, formulation: Formulation, solution: Solution
) -> Assignment:
    """Turns a solution into layouts, with the codecs of gathers that are asked for."""
    count = len(analysis.contraction.nodes)
    strategies = [
        formulation.spaces[i].strategies[solution.choices[i]] for i in range(count)
    ]
    copies = [(c, solution.choices[c.node]) for c in formulation.copies]
    pricer = formulation.pricer
    made = assign(analysis, pricer.sizes, strategies, copies)
    gathered = gathered_nodes(analysis, strategies, pricer)
    return with_gathers(dataclasses.replace(made, gathered=gathered), pricer)


def peak_of(assignment: Assignment, pricer: Pricer) -> float:
    """Returns the most bytes live at once on one device."""
    return live(assignment, pricer.cluster.device).peak_bytes()


def price_solution(
    formulation: Formulation,
    solution: Solution,
    assignment: Assignment,
    peak_bytes: float,
) -> Candidate:
    """Prices a step in the layouts of a solution with the cost model.

    Args:
      formulation: the problem that the solver was given.
      solution: the solver's answer to it.
      assignment: the layouts.
      peak_bytes: most bytes live at once on one device.
    """
    pricer = formulation.pricer
    found = estimate(assignment, pricer)
    return Candidate(assignment, pricer, formulation, solution, found, peak_bytes)


# Breaks ties between layouts of batch inputs: prefers the layout with most shards.
#
# If all readers of a batch input take slices of it, the cost model charges nothing for
# replicating the input on every device. Real input pipelines deliver shards, so among
# layouts of the same cost the one with the most shards is taken. The same is done for
# arrays that are made without inputs, such as a mask, and enter a loop. In the cost
# model, every device can compute such an array in full at no cost, but the loop keeps
# it in the memory of every device. All these arrays are called free arrays here.


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
    """Returns a solution, its layouts, and the most bytes live at once on one device.

    If the solution does not fit the memory as it is, but fits with its free arrays
    split over devices, they are split. If that is not enough, no keys and values are
    gathered for attention; they go around a ring.
    """
    pricer = formulation.pricer
    layouts = assignment_of(analysis, formulation, solution)
    peak_bytes = peak_of(layouts, pricer)
    if peak_bytes <= pricer.cluster.memory_bytes:
        return solution, layouts, peak_bytes
    made = [(solution, layouts)]
    split = split_most(analysis, formulation, solution)
    if split.choices != solution.choices:
        made.append((split, assignment_of(analysis, formulation, split)))
    if layouts.gathered:
        rings = [(s, dataclasses.replace(x, gathered=frozenset())) for s, x in made]
        layouts, peak_bytes = rings[0][1], peak_of(rings[0][1], pricer)
        made += rings
    for known, found in made[1:]:
        found_bytes = peak_of(found, pricer)
        if found_bytes <= pricer.cluster.memory_bytes:
            return known, found, found_bytes
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
    """Returns the number of shards along the rows, and along all dimensions."""
    parts = [int(np.prod([sizes[a] for a in axes], dtype=int)) for axes in layout]
    return (parts[0] if parts else 1), int(np.prod(parts, dtype=int))


def _cheapest(
    problem: ShardingProblem, choices: Sequence[int], group: Sequence[int], first: int
) -> tuple[float, tuple[int, ...]]:
    """Returns the best choices of a group of nodes for a given first choice.

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
