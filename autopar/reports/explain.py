"""Explanations of a plan: the cost of a layout, and the costs of alternatives."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.estimate import all_collectives, estimate
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, shards, to_spec
from autopar.layouts.strategies import layout_of
from autopar.planner.candidate import Candidate, candidate_of, choices_of
from autopar.planner.hints import pin_restriction
from autopar.planner.problem import Formulation, Restriction, formulate
from autopar.planner.proposals import Proposal
from autopar.planner.record import assignment_of, restore
from autopar.planner.replicas import replica_pricer, slowest_of
from autopar.planner.search import plan_mesh
from autopar.planner.solving import solve_mesh
from autopar.plans import Plan, Spec
from autopar.plans.specs import spec_text
from autopar.reports.table import CollectiveRow, template
from autopar.steps.analysis import Analysis
from autopar.steps.microbatches import with_turns
from autopar.steps.names import array_name
from autopar.terminal import columns
from autopar.units import bytes_text, seconds_text
from autopar_passes.graph.operators import GraphInput
from autopar_passes.graph.roles import Role
from autopar_solver import Solution, Status

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan with its step and its communication.

    Attributes:
      analysis: the step.
      plan: the plan.
      assignment: the plan's layouts.
      pricer: the plan's mesh and cluster.
      collectives: all collectives of the plan.
      crossing: the collectives that reshard values received from other stages, or
        values to be sent to other stages.
    """

    analysis: Analysis
    plan: Plan
    assignment: Assignment
    pricer: Pricer
    collectives: tuple[Collective, ...]
    crossing: tuple[Collective, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutDecision:
    """The layout of one input, or of several inputs that share the decision.

    Attributes:
      node: the node of the planner's graph that stands for these inputs; None if the
        inputs have only one possible layout.
      inputs: the inputs that the user asked about.
      shared: number of inputs that share the decision.
      spec: the layout.
      nbytes: bytes of one of the unsharded arrays.
      shard_bytes: bytes of an array's shard on one device.
      collectives: the communication of all inputs that share the decision, and of their
        gradients and updates.
    """

    node: int | None
    inputs: tuple[GraphInput, ...]
    shared: int
    spec: Spec
    nbytes: int
    shard_bytes: float
    collectives: tuple[CollectiveRow, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """Another layout of an input, and the best plan that has this layout.

    Attributes:
      spec: the layout.
      step_s: predicted seconds of one step; infinite if no plan fits.
      shard_bytes: bytes of an array's shard on one device.
      peak_memory_bytes: peak memory of one device.
      proved: whether the solver proved that no plan with this layout is faster.
    """

    spec: Spec
    step_s: float
    shard_bytes: float
    peak_memory_bytes: float
    proved: bool


def bind_plan(
    analysis: Analysis, plan: Plan, cluster: Cluster, replica: int | None = None
) -> BoundPlan:
    """Combines a plan of one stage with its step.

    Args:
      analysis: the step.
      plan: the plan.
      cluster: the cluster of the plan.
      replica: number of the replica that the result describes, for a plan with
        replicas; None: the slowest replica.

    Raises:
      PlanError: the plan is for another step or cluster.
    """
    assignment = restore(analysis, plan)
    if not plan.replicas:
        pricer = Pricer(cluster, mesh_of(plan, cluster))
        collectives = tuple(all_collectives(assignment, pricer))
        return BoundPlan(assignment.analysis, plan, assignment, pricer, collectives)
    number = slowest_of(plan) if replica is None else replica
    own, pricer = plan.replicas[number], replica_pricer(plan, cluster, number)
    view = with_turns(assignment.analysis, own.microbatches)
    return bind_part(
        plan, assignment_of(view, plan), pricer, own.step_s, own.peak_memory_bytes
    )


def bind_part(
    plan: Plan,
    assignment: Assignment,
    pricer: Pricer,
    step_s: float,
    peak_memory_bytes: float,
    crossing: Sequence[Collective] = (),
) -> BoundPlan:
    """Combines the part of a plan that some devices run with the predictions for it.

    Args:
      plan: the plan, with the stage of these devices as its only stage.
      assignment: the layouts of the stage or replica.
      pricer: its mesh and cluster.
      step_s: predicted seconds of its work and communication in a step.
      peak_memory_bytes: predicted bytes on one of its devices.
      crossing: as for `BoundPlan`.
    """
    cost = estimate(assignment, pricer).cost
    predicted = msgspec.structs.replace(
        plan.predicted,
        step_s=step_s,
        compute_s=min(step_s, cost.work_s + cost.contention_s),
        peak_memory_bytes=peak_memory_bytes,
    )
    found = [*all_collectives(assignment, pricer), *crossing]
    return BoundPlan(
        assignment.analysis,
        msgspec.structs.replace(plan, predicted=predicted),
        assignment,
        pricer,
        tuple(sorted(found, key=lambda c: c.operator)),
        tuple(crossing),
    )


def mesh_of(plan: Plan, cluster: Cluster) -> MeshShape:
    """The plan's mesh on a cluster.

    Raises:
      PlanError: the cluster has no such mesh.
    """
    return plan_mesh(cluster, plan.axis_names, plan.axis_sizes)


def group_collectives(
    bound: BoundPlan, collectives: Sequence[Collective]
) -> tuple[CollectiveRow, ...]:
    """Groups equal collectives of repeated layers; the longest come first."""
    groups: dict[tuple[str, ...], list[tuple[str, Collective]]] = defaultdict(list)
    names = bound.plan.axis_names
    for collective in collectives:
        array = array_name(bound.analysis, collective.value)
        phase = bound.analysis.graph.operators[collective.operator].role.value
        axes = tuple(names[a] for a in collective.step.axes)
        key = (template(array), phase, collective.step.kind, *axes)
        groups[key].append((array, collective))
    rows = [
        CollectiveRow(
            kind=kind,
            axes=tuple(axes),
            arrays=tuple(dict.fromkeys(array for array, _ in found)),
            phase=phase,
            trips=sum(c.trips for _, c in found),
            sent_bytes=sum(c.sent_bytes(bound.pricer) for _, c in found),
            seconds=sum(c.seconds(bound.pricer) for _, c in found),
        )
        for (_, phase, kind, *axes), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.seconds))


def input_decisions(bound: BoundPlan, pattern: str) -> list[LayoutDecision]:
    """The layouts of the inputs that a pattern matches, grouped by decision.

    Raises:
      PlanError: the pattern matches no input.
    """
    every = bound.analysis.graph.inputs
    matched = [i for i in every if fnmatch.fnmatchcase(i.path, pattern)]
    if not matched:
        some = ", ".join(i.path for i in every[:3])
        raise PlanError(f"'{pattern}' matches no input; they are named like {some}.")
    groups: dict[int | None, list[GraphInput]] = {}
    for given in matched:
        groups.setdefault(_node_of(bound, given), []).append(given)
    return [_decision(bound, node, inputs) for node, inputs in groups.items()]


def _node_of(bound: BoundPlan, given: GraphInput) -> int | None:
    home = bound.analysis.contraction.homes.get(given.value)
    return None if home is None else home.node


def _decision(
    bound: BoundPlan, node: int | None, inputs: Sequence[GraphInput]
) -> LayoutDecision:
    graph = bound.analysis.graph
    layout = bound.assignment.home_layout(inputs[0].value)
    nbytes = graph.values[inputs[0].value].nbytes
    shared = sum(_node_of(bound, i) == node for i in graph.inputs)
    touching = [] if node is None else _touching(bound, node)
    return LayoutDecision(
        node=node,
        inputs=tuple(inputs),
        shared=shared,
        spec=to_spec(layout, bound.plan.axis_names),
        nbytes=nbytes,
        shard_bytes=nbytes / shards(layout, bound.pricer.sizes),
        collectives=group_collectives(bound, touching),
    )


def _touching(bound: BoundPlan, node: int) -> list[Collective]:
    """The collectives of a node's values, and of its inputs' gradients and updates."""
    analysis = bound.analysis
    homes = analysis.contraction.homes
    values = {value for value, home in homes.items() if home.node == node}
    for given in analysis.graph.inputs:
        if _node_of(bound, given) == node:
            values |= _updates(analysis, given)
    return [c for c in bound.collectives if c.value in values]


def _updates(analysis: Analysis, given: GraphInput) -> set[int]:
    """The values of an input's size from its gradient to its updated value.

    The search starts at the updated value and goes back to operands. It ends at the
    first operator that reduces, whose result is the gradient.
    """
    graph = analysis.graph
    start = graph.outputs[given.output] if given.output >= 0 else None
    found: set[int] = set()
    waiting = [] if start is None else [start]
    while waiting:
        value = waiting.pop()
        if value in found or graph.values[value].size != graph.values[given.value].size:
            continue
        found.add(value)
        op = analysis.contraction.producer[value]
        if op.role is not Role.FORWARD and not op.rule.reduced_factors:
            waiting.extend(v for v in op.inputs if v is not None)
    return found


def alternatives(
    bound: BoundPlan, decision: LayoutDecision, *, limit: int, seconds: float, say: Say
) -> list[Alternative]:
    """Finds the best plan with each of the most promising other layouts of an input.

    A layout is promising if the plan gets little slower when only this layout changes.

    Args:
      bound: the plan.
      decision: the decision on the input's layout.
      limit: number of layouts to try.
      seconds: time limit of the solver for each layout.
      say: shows progress.
    """
    if decision.node is None:
        return []
    formulation = formulate(bound.analysis, bound.pricer)
    chosen = plan_choices(bound, formulation)
    found: list[Alternative] = []
    for strategy, layout in _promising(bound, decision, formulation, chosen)[:limit]:
        spec = to_spec(layout, bound.plan.axis_names)
        say(f"{decision.inputs[0].path}: planning again with {spec_text(spec)}")
        patched = list(chosen)
        patched[decision.node] = strategy
        restriction = pin_restriction(
            bound.analysis, {decision.inputs[0].value: layout}
        )
        best = _best(
            _solve(bound, restriction, seconds),
            _evaluate(bound, formulation, tuple(patched)),
        )
        shard_bytes = decision.nbytes / shards(layout, bound.pricer.sizes)
        found.append(_alternative(spec, shard_bytes, best))
    return sorted(found, key=lambda a: a.step_s)


def _promising(
    bound: BoundPlan,
    decision: LayoutDecision,
    formulation: Formulation,
    chosen: Sequence[int],
) -> list[tuple[int, Layout]]:
    """A strategy for each other layout of an input, the cheapest first."""
    value = decision.inputs[0].value
    home = bound.analysis.contraction.homes[value]
    strategies = formulation.spaces[home.node].strategies
    alone = _costs_alone(formulation, chosen, home.node)
    found: dict[Layout, int] = {}
    for k in sorted(range(len(strategies)), key=lambda k: (alone[k], k)):
        found.setdefault(layout_of(strategies[k], home.dims), k)
    found.pop(bound.assignment.home_layout(value), None)
    return [(k, layout) for layout, k in found.items()]


def _best(*candidates: Candidate | None) -> Candidate | None:
    """The fastest candidate; None if all are None."""
    return min((c for c in candidates if c), key=lambda c: c.step_s, default=None)


def _alternative(spec: Spec, shard_bytes: float, best: Candidate | None) -> Alternative:
    if best is None:
        return Alternative(spec, math.inf, shard_bytes, math.inf, False)
    proved = best.report.status is Status.OPTIMAL
    return Alternative(spec, best.step_s, shard_bytes, best.peak_memory_bytes, proved)


def _solve(
    bound: BoundPlan, restriction: Restriction, seconds: float
) -> Candidate | None:
    """The best plan under a restriction; None if no plan fits or is found."""
    try:
        return solve_mesh(bound.analysis, bound.pricer, restriction, seconds)
    except PlanError:
        return None


def _evaluate(
    bound: BoundPlan, formulation: Formulation, choices: tuple[int, ...]
) -> Candidate | None:
    """Prices the plan with one changed choice; None if it is infeasible."""
    cost = _cost(formulation, choices)
    if not math.isfinite(cost):
        return None
    solution = Solution(
        choices=choices, cost=cost, bound=-math.inf, status=Status.FEASIBLE, seconds=0.0
    )
    made = candidate_of(bound.analysis, formulation, solution, bound.assignment)
    fits = made.peak_memory_bytes <= bound.pricer.cluster.memory_bytes
    return made if fits else None


def _cost(formulation: Formulation, choices: Sequence[int]) -> float:
    """The objective value of choices."""
    problem = formulation.problem
    nodes = (costs[choices[i]] for i, costs in enumerate(problem.node_costs))
    edges = zip(problem.edges, problem.edge_costs, strict=True)
    return float(sum(nodes) + sum(c[choices[i], choices[j]] for (i, j), c in edges))


def _costs_alone(
    formulation: Formulation, chosen: Sequence[int], node: int
) -> list[float]:
    """The cost of each strategy of a node, with unchanged choices of its neighbours."""
    problem = formulation.problem
    total = problem.node_costs[node].astype(float)
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if i == node and j == node:
            total = total + costs.diagonal()
        elif i == node:
            total = total + costs[:, chosen[j]]
        elif j == node:
            total = total + costs[chosen[i]]
    return [float(cost) for cost in total]


def plan_choices(bound: BoundPlan, formulation: Formulation) -> tuple[int, ...]:
    """The plan's choices as indices into the strategies of a problem.

    Raises:
      PlanError: the plan holds a layout that the planner does not consider.
    """
    found = choices_of(formulation, bound.assignment)
    if found is None:
        raise PlanError(
            "the plan holds a layout that the planner does not consider; make the "
            "plan again to compare it with others."
        )
    return tuple(found)


_HEADING: tuple[str, ...] = (
    "",
    "proposed by",
    "mesh",
    "program",
    "step",
    "memory",
    "CPU",
    "",
)


def proposal_lines(proposals: Sequence[Proposal], plan: Plan) -> list[str]:
    """The search's proposals, in order; a star marks the one that became the plan.

    A proposal without a star may be faster, but may need too much memory according to
    the compiler.
    """
    step_s = plan.predicted.step_s
    judged = (p for p in proposals if p.step_s is not None)
    taken = next((p for p in judged if math.isclose(p.step_s or 0.0, step_s)), None)
    rows = [_HEADING]
    for one in proposals:
        step, memory = "", ""
        if one.step_s is not None:
            step, memory = seconds_text(one.step_s), bytes_text(one.peak_bytes)
        rows.append(
            (
                "*" if one is taken else "",
                one.proposer,
                one.mesh,
                one.program or "as written",
                step,
                memory,
                seconds_text(one.cpu_s),
                one.note,
            )
        )
    return columns(rows, right=(4, 5, 6))
