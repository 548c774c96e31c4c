"""The plans that experts write by hand, under the same cost model.

Each is a rule about which mesh axes may split what; within the rule the
solver makes the best of it, so an expert plan here is never worse than the
one a person would write by that rule.
"""

from __future__ import annotations

import dataclasses

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.recipes import recipes, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis


@dataclasses.dataclass(frozen=True, slots=True)
class Expert:
    """One expert plan; ``reason`` says why it is not possible."""

    name: str
    mesh: str
    candidate: Candidate | None
    reason: str = ""


def expert_plans(
    analysis: Analysis, cluster: Cluster, *, seconds: float | None = None
) -> list[Expert]:
    """Solves every expert plan on every mesh of the search.

    Args:
      analysis: the step.
      cluster: what to plan for.
      seconds: time limit of the solver for each.
    """
    out: list[Expert] = []
    for mesh in candidate_meshes(cluster):
        pricer = Pricer(cluster, mesh)
        for recipe in recipes(len(mesh.axes)):
            limit = restriction_of(analysis, recipe, pricer)
            try:
                candidate = solve_mesh(analysis, pricer, limit, seconds)
                out.append(Expert(recipe.name, str(candidate.mesh), candidate))
            except PlanError as error:
                reason = str(error).split("\n", 1)[0]
                out.append(Expert(recipe.name, mesh.label, None, reason))
    return out
