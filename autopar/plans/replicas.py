"""The part of a plan that deals microbatches out to replicas of unequal devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from autopar.errors import PlanError
from autopar.plans.stage import StagePlan


class ReplicaPlan(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What one replica runs.

    Attributes:
      devices: what its devices are, for people.
      microbatches: how many it runs in a step.
      step_s: seconds that a step should take it, with the sums over replicas.
      peak_memory_bytes: most bytes live at once on one of its devices.
    """

    devices: str
    microbatches: int
    step_s: float = 0.0
    peak_memory_bytes: float = 0.0


def check_replicas(
    replicas: Sequence[ReplicaPlan], microbatches: int, stages: Sequence[StagePlan]
) -> None:
    """Checks how many microbatches each replica runs against the rest of a plan.

    Args:
      replicas: of the plan; empty: it has none.
      microbatches: of the plan.
      stages: of the plan.

    Raises:
      PlanError: they do not add up, there is another number of replicas than the mesh
        has, or a layout splits an array over replicas.
    """
    if not replicas:
        return
    counts = tuple(r.microbatches for r in replicas)
    if len(stages) > 1 or len(counts) < 2 or min(counts) < 1:
        raise PlanError(
            f"replicas of {counts} microbatches: a plan of one stage may have two "
            "replicas or more, each with a microbatch at least."
        )
    if sum(counts) != microbatches:
        raise PlanError(
            f"replicas of {counts} microbatches have {sum(counts)} together, and the "
            f"plan has {microbatches}."
        )
    (stage,) = stages
    name, size = stage.axis_names[0], stage.axis_sizes[0]
    if size != len(counts):
        raise PlanError(
            f"replicas of {counts} microbatches: the first axis of the mesh, "
            f"'{name}', is that of the replicas, and has {size} positions."
        )
    for owner, axes in _layouts(stage):
        if name in axes:
            raise PlanError(
                f"'{owner}' is split over '{name}', the axis of the replicas, each of "
                "which needs all of it."
            )
    if any(g.codec for g in stage.gradients):
        raise PlanError(
            "a plan with replicas sends gradients as they are, and this one has codecs."
        )


def _layouts(stage: StagePlan) -> Iterator[tuple[str, set[str]]]:
    """Yields the name of all that has a layout, and the axes that split it."""
    named = [*stage.inputs.items(), *stage.outputs.items()]
    named += [(n.name, n.axes) for n in (*stage.nodes, *stage.copies)]
    for owner, spec in named:
        yield owner, {axis for axes in spec for axis in axes}
