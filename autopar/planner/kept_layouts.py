"""Prices a step that computes layers again in the layouts of a plan without them."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import Candidate
from autopar.planner.record import assignment_of
from autopar.planner.search import plan_mesh
from autopar.planner.solving import HIDDEN, solve_mesh
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node

# Seconds of the solver, for the layouts of what is computed again.
_MOST_S = 5.0


def price_in_layouts(
    plan: Plan, planned: Analysis, other: Analysis, cluster: Cluster
) -> Candidate:
    """The step with other layers computed again, in the layouts of a plan.

    What both steps compute keeps its layouts; the solver chooses those of the rest, in
    one problem. So the result is no slower bound than a plan that exists.

    Args:
      plan: of one stage.
      planned: the step that it is for.
      other: the same step, with other layers computed again.
      cluster: what is priced; its devices hold whatever is planned for them.

    Raises:
      PlanError: the cluster has no such mesh, or the solver found nothing in time.
    """
    pricer = Pricer(cluster, plan_mesh(cluster, plan.axis_names, plan.axis_sizes))
    kept = _kept_strategies(plan, planned, other)

    def same(node: Node, strategy: Strategy) -> bool:
        return strategy == kept.get(node.index, strategy)

    return solve_mesh(other, pricer, same, _MOST_S, weights=(HIDDEN,))


def _kept_strategies(
    plan: Plan, planned: Analysis, other: Analysis
) -> dict[int, Strategy]:
    """Node of the other step -> its strategy in the plan, if both have its operators.

    Values keep their numbers where layers are computed again.
    """
    strategies = assignment_of(planned, plan).strategies
    nodes, node_of = planned.contraction.nodes, planned.contraction.node_of
    known = {
        op.outputs[0]: node_of[op.class_index]
        for op in planned.graph.operators
        if op.outputs and op.class_index in node_of
    }
    out: dict[int, Strategy] = {}
    for op in other.graph.operators:
        number = other.contraction.node_of.get(op.class_index)
        if number is None or not op.outputs or op.outputs[0] not in known:
            continue
        before, node = known[op.outputs[0]], other.contraction.nodes[number]
        if node.factors == nodes[before].factors:
            out.setdefault(node.index, strategies[before])
    return out
