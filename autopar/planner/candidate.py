"""Candidates (assignments with their prices), and results of a search.

An *assignment* gives every array a layout on one mesh. A *formulation* is the solver's
problem on this mesh (`autopar.planner.problem`): its nodes are groups of operators and
inputs, and a *strategy* of a node gives the node's arrays their layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from autopar.cluster import MeshShape
from autopar.cost.breakdown import CostBreakdown, step_s
from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.live import live
from autopar.cost.overlap import Timeline
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment, assign
from autopar.planner.codecs.sites import Sending
from autopar.planner.problem import Formulation
from autopar.planner.scheme import with_axis_names
from autopar.planner.weights import WHOLE, Weights
from autopar.steps.analysis import Analysis
from autopar_solver import Solution, Status

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
      lower_s: a lower bound of the step time of every plan of this mesh, in seconds;
        None: the bound is the one in `solution`.
      sending: the codec of each gradient; None: the user asked for no codecs.
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
        """The mesh, with axes named by the user or after what they split."""
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
    """Finds an assignment's strategies in a formulation; None if a strategy is missing
    from the formulation.
    """
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
    """Turns a solution into layouts, and predicts their step with the cost model.

    Args:
      analysis: the step.
      formulation: the problem that the solver was given.
      solution: the solver's answer to it.
      like: other layouts. Gradients are summed at the same places of the program as in
        these layouts; None: gradients are summed once in each step.
    """
    assignment = assignment_of(analysis, formulation, solution)
    if like is not None and like.sums_each_microbatch:
        assignment = dataclasses.replace(assignment, sums_each_microbatch=True)
    peak_bytes = peak_of(assignment, formulation.pricer)
    return price_solution(formulation, solution, assignment, peak_bytes)


def assignment_of(
    analysis: Analysis, formulation: Formulation, solution: Solution
) -> Assignment:
    """Turns a solution into layouts."""
    count = len(analysis.contraction.nodes)
    strategies = [
        formulation.spaces[i].strategies[solution.choices[i]] for i in range(count)
    ]
    copies = [(c, solution.choices[c.node]) for c in formulation.copies]
    return assign(analysis, formulation.pricer.sizes, strategies, copies)


def peak_of(assignment: Assignment, pricer: Pricer) -> float:
    """The most bytes live at once on one device."""
    return live(assignment, pricer.cluster.device).peak_bytes()


def price_solution(
    formulation: Formulation,
    solution: Solution,
    assignment: Assignment,
    peak_bytes: float,
) -> Candidate:
    """Predicts the step of a solution's layouts.

    Args:
      formulation: the problem that the solver was given.
      solution: the solver's answer to it.
      assignment: the layouts.
      peak_bytes: most bytes live at once on one device.
    """
    pricer = formulation.pricer
    found = estimate(assignment, pricer)
    return Candidate(assignment, pricer, formulation, solution, found, peak_bytes)
