"""Meshes on which a step's own `jax.shard_map`s mean what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.cluster import Cluster, MeshShape
from autopar.errors import PlanError
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import Operator
from autopar_passes.rules import manual


def meshes_for_manual(
    analysis: Analysis, cluster: Cluster, meshes: Sequence[MeshShape]
) -> Sequence[MeshShape]:
    """Returns the meshes that have an axis for each axis of every ``shard_map``.

    Args:
      analysis: the step.
      cluster: what is planned for.
      meshes: those to choose from.

    Raises:
      PlanError: no mesh has; or a ``shard_map`` uses an axis that no array is split
        over, which a plan cannot place.
    """
    if f"kernel '{manual.PRIMITIVE}'" in analysis.graph.unsupported:
        raise PlanError(
            "a shard_map of the step names a mesh axis that none of its in_specs and "
            "out_specs has, so no plan can say which devices it means. Split an "
            "operand over that axis, or leave the axis out of its mesh."
        )
    for op in analysis.graph.operators:
        wanted = Counter(op.rule.sizes[f] for f in op.rule.whole)
        fitting = [m for m in meshes if wanted <= Counter(a.size for a in m.axes)]
        if not fitting:
            raise PlanError(_message(op, cluster, sorted(wanted.elements())))
        meshes = fitting
    return meshes


def _message(op: Operator, cluster: Cluster, sizes: Sequence[int]) -> str:
    name = op.kernel.name if op.kernel else op.kind
    return (
        f"the {name} ({op.source or 'in the step'}) needs mesh axes of the sizes "
        f"{' and '.join(map(str, sizes))}, and no mesh of {cluster} has them together "
        "with those that other calls need: its body is local code, which a plan "
        "cannot divide otherwise.\n"
        "  try: a shard_map over axes of the sizes of the cluster's levels, a larger "
        "max_axes, or the same code without shard_map."
    )
