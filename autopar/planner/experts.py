"""The plans that experts write by hand, under the same cost model.

Each expert plan is a rule about which arrays each mesh axis may split. The solver finds
the best plan that keeps to the rule. So under the cost model, an expert plan here is at
least as good as the plan that a person would write by the same rule.
"""

from __future__ import annotations

import dataclasses

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import Candidate
from autopar.planner.problem import Restriction
from autopar.planner.recipes import Recipe, has_context, recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis
from autopar.steps.batch import SEQUENCE
from autopar.steps.for_devices import for_devices
from autopar.steps.nodes import Node
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Expert:
    """One expert plan: a name, a mesh and the best plan of the rule on that mesh.

    If the rule gives no plan there, ``candidate`` is None and ``reason`` says why.
    """

    name: str
    mesh: str
    candidate: Candidate | None
    reason: str = ""


def _with_rows_split(analysis: Analysis, recipe: Recipe, pricer: Pricer) -> Restriction:
    """Adds to a recipe the rule that data axes must split rows wherever they can.

    If a node has strategies in which each data axis splits its rows or its sequence,
    only these strategies are allowed. Without this rule, the solver could leave an axis
    unused, and every device would compute the whole batch. Plans that people write use
    all axes.
    """
    within = restriction_of(analysis, recipe, pricer)
    labels, sizes = analysis.node_labels, pricer.sizes
    updates = {
        node.index
        for node in analysis.contraction.nodes
        if analysis.graph.operators[node.root].role is Role.UPDATE
    }

    def is_allowed(node: Node, strategy: Strategy) -> bool:
        if not within(node, strategy):
            return False
        if node.index in updates:
            return True
        for factor, name in labels.get(node.index, {}).items():
            size, may_split = node.factors[factor]
            if not may_split:
                continue
            for axis, rows in recipe.rows.items():
                if rows == name and size % sizes[axis] == 0:
                    size //= sizes[axis]
                    if axis not in strategy[factor]:
                        return False
        return True

    return is_allowed


def expert_plans(
    analysis: Analysis, cluster: Cluster, *, seconds: float | None = None
) -> list[Expert]:
    """Solves every expert plan on every mesh of the search.

    Expert plans that split sequences are left out if the step has no sequence.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      seconds: time limit of the solver for each plan.
    """
    out: list[Expert] = []
    analysis = for_devices(analysis, cluster.num_devices)
    sequences = any(SEQUENCE in x.values() for x in analysis.node_labels.values())
    for mesh in candidate_meshes(cluster):
        pricer = Pricer(cluster, mesh)
        for recipe in recipes(len(mesh.axes), context=has_context(analysis)):
            if (recipe.sequence or recipe.context) and not sequences:
                continue
            limit = _with_rows_split(analysis, recipe, pricer)
            try:
                candidate = solve_mesh(analysis, pricer, limit, seconds)
                out.append(Expert(recipe.name, str(candidate.mesh), candidate))
            except PlanError as error:
                reason = str(error).split("\n", 1)[0]
                out.append(Expert(recipe.name, mesh.label, None, reason))
    return out
