"""Candidates: assignments with their prices, and what a search found."""

from __future__ import annotations

import dataclasses

from autopar.cluster import MeshShape
from autopar.cost.combining import Group
from autopar.cost.memory import peak_memory_bytes
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective, joined, traffic
from autopar.layouts.assignment import Assignment, assign
from autopar.planner.problem import Formulation
from autopar.steps.analysis import Analysis
from autopar_solver import Solution


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """The best assignment found on one mesh.

    Attributes:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      solution: what the solver says.
      collectives: the communication of the assignment.
      compute_s: seconds of work on arrays in one step.
      communication_s: seconds of communication in one step.
      communication_bytes: bytes that one device sends in one step.
      peak_memory_bytes: most bytes live at once on one device.
    """

    assignment: Assignment
    pricer: Pricer
    formulation: Formulation
    solution: Solution
    collectives: tuple[Collective, ...]
    compute_s: float
    communication_s: float
    communication_bytes: float
    peak_memory_bytes: float

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.compute_s + self.communication_s

    @property
    def shared_s(self) -> float:
        """Seconds of messages that many collectives share, beyond their bytes'.

        The problem of the layouts does not hold them: they belong to no pair of
        decisions. The rest of `step_s` is its objective.
        """
        return sum(c.shared_s(self.pricer) for c in self.collectives)

    @property
    def groups(self) -> frozenset[Group]:
        """The groups of messages that collectives share."""
        shared = (c.step for c in self.collectives if c.message_bytes)
        return frozenset(self.pricer.group_of(step) for step in shared)


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """The best candidate, and what every mesh tried came to.

    Where layouts were given nothing was searched, and there is no bound on others.
    """

    best: Candidate
    tried: tuple[tuple[MeshShape, Candidate | None], ...]
    seconds: float
    searched: bool = True


def choices_of(formulation: Formulation, assignment: Assignment) -> list[int] | None:
    """Finds an assignment's strategies in a formulation; None if one is not there."""
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


def evaluate(
    analysis: Analysis, formulation: Formulation, solution: Solution
) -> Candidate:
    """Turns a solution into layouts and prices what they really do."""
    count = len(analysis.contraction.nodes)
    strategies = [
        formulation.spaces[i].strategies[solution.choices[i]] for i in range(count)
    ]
    copies = [(c, solution.choices[c.node]) for c in formulation.copies]
    pricer = formulation.pricer
    assignment = assign(
        analysis,
        pricer.sizes,
        strategies,
        copies,
    )
    collectives = tuple(joined(pricer, traffic(assignment)))
    inside = sum(
        c.seconds(pricer) - c.shared_s(pricer)
        for c in collectives
        if is_inside_node(assignment, c)
    )
    work = sum(
        float(formulation.problem.node_costs[i][solution.choices[i]])
        for i in range(count)
    )
    return Candidate(
        assignment,
        pricer,
        formulation,
        solution,
        collectives,
        work - inside,
        sum(c.seconds(pricer) for c in collectives),
        sum(c.sent_bytes(pricer) for c in collectives),
        peak_memory_bytes(
            assignment, analysis.life, pricer.cluster.device.calibrated.memory_overhead
        ),
    )


def is_inside_node(assignment: Assignment, collective: Collective) -> bool:
    """Whether a node's own cost already holds a collective (a small reduction)."""
    op = assignment.graph.operators[collective.operator]
    sums = ("all_reduce", "reduce_scatter")
    if collective.step.kind not in sums or collective.value in op.inputs:
        return False
    node = assignment.contraction.nodes[assignment.contraction.node_of[op.class_index]]
    return node.kind != "contraction"
