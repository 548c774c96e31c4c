"""The replicas that a cluster of unequal devices has room for, and prices on each.

Replicas are equally many devices in equal levels, so that one program with one mesh
runs on all of them (`autopar_passes.replay.replicas`). A price is that of one replica,
as if all were of its devices: collectives within it, and the sums over replicas on the
link between the groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cluster import Cluster, Level, LinkSpec, MeshAxis, MeshShape
from autopar.cost.estimate import estimate
from autopar.cost.live import live
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment, CopyChoice
from autopar.layouts.layout import Layout
from autopar.planner.candidate import Candidate
from autopar.planner.search import plan_mesh
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.replicas import with_turns

# What the axis of the replicas is called, unless another axis has the name.
_NAMES = ("replica", "replicas", "replica_group")


@dataclasses.dataclass(frozen=True)
class Site:
    """The devices of one replica.

    Attributes:
      part: the devices alone.
      count: how many replicas there are.
      between: the link between them.
    """

    part: Cluster
    count: int
    between: LinkSpec

    @property
    def kind(self) -> tuple[object, ...]:
        """What sites share on which all costs are the same."""
        return self.part.device, self.part.levels

    @property
    def whole(self) -> Cluster:
        """All replicas, as if they were of these devices."""
        taken = {level.name for level in self.part.levels}
        name = next(n for n in ("between", *_NAMES) if n not in taken)
        outer = Level(name=name, size=self.count, link=self.between)
        return Cluster(device=self.part.device, levels=(outer, *self.part.levels))

    def mesh(self, mesh: MeshShape) -> MeshShape:
        """A mesh of the part, with the axis of the replicas before its own."""
        name = axis_name(mesh.names)
        outer = MeshAxis(name=name, size=self.count, link=self.between, level=0)
        inner = [dataclasses.replace(a, level=a.level + 1) for a in mesh.axes]
        return MeshShape(axes=(outer, *inner))


def axis_name(names: Sequence[str]) -> str:
    """The name of the axis of the replicas beside axes with these names."""
    return next(n for n in _NAMES if n not in names)


def sites_of(cluster: Cluster) -> tuple[Site, ...]:
    """The replicas of a cluster of groups, in the order of its devices.

    Groups of equal levels are a replica each. Groups that differ in their outermost
    level alone are cut into replicas of the greatest common divisor of its sizes.

    Raises:
      PlanError: the groups cannot be cut into replicas of equal shape.

    >>> whole = Cluster.parse("4x8:h100+2x8:a100")
    >>> [str(site.part.num_devices) for site in sites_of(whole)]
    ['16', '16', '16']
    """
    assert cluster.between is not None
    shapes = [tuple(level.size for level in g.levels) for g in cluster.groups]
    if len({shape[1:] for shape in shapes}) > 1:
        raise PlanError(
            f"{cluster}: replicas of unequal devices need groups of equal hosts, and "
            "these have others. Plan with stages='auto', which gives each group a "
            "stage of its own, or for one group alone."
        )
    each = (math.gcd(*(shape[0] for shape in shapes)), *shapes[0][1:])
    parts = [
        part
        for group, shape in zip(cluster.groups, shapes, strict=True)
        for part in group.partition([each] * (shape[0] // each[0]))
    ]
    return tuple(Site(part, len(parts), cluster.between) for part in parts)


def priced(view: Analysis, found: Candidate, site: Site) -> Candidate:
    """The layouts of a candidate as one replica runs them.

    Args:
      view: the step with the turns of the replica (`with_turns`).
      found: layouts on the mesh of a replica alone.
      site: of the replica.
    """
    own = found.assignment
    copies = {
        key: CopyChoice(_shifted(choice.layout), choice.reuse)
        for key, choice in own.copies.items()
    }
    assignment = Assignment(
        view, (site.count, *own.sizes), tuple(map(_shifted, own.strategies)), copies
    )
    pricer = Pricer(site.whole, site.mesh(_mesh_on(site, found)))
    return dataclasses.replace(
        found,
        assignment=assignment,
        pricer=pricer,
        estimate=estimate(assignment, pricer),
        peak_memory_bytes=live(assignment, site.part.device).peak_bytes(),
        weights=None,
        lower_s=None,
    )


def _mesh_on(site: Site, found: Candidate) -> MeshShape:
    """A candidate's mesh with the links of a replica."""
    mesh = found.mesh
    levels = site.part.levels
    return MeshShape(
        axes=tuple(dataclasses.replace(a, link=levels[a.level].link) for a in mesh.axes)
    )


def _shifted(layout: Layout) -> Layout:
    """A layout on a mesh with one more axis before its own."""
    return tuple(tuple(axis + 1 for axis in axes) for axes in layout)


def slowest_of(plan: Plan) -> int:
    """The number of the replica that a plan with replicas waits for."""
    return max(range(len(plan.replicas)), key=lambda k: plan.replicas[k].step_s)


def on_replica(
    analysis: Analysis, plan: Plan, cluster: Cluster, number: int
) -> tuple[Analysis, Pricer]:
    """What one replica of a plan runs, and its prices.

    Args:
      analysis: the step in the plan's microbatches.
      plan: a plan with replicas.
      cluster: that of the plan.
      number: of the replica.

    Raises:
      PlanError: the cluster is of other replicas, or has no such mesh.
    """
    sites = sites_of(cluster)
    if len(sites) != len(plan.replicas):
        raise PlanError(
            f"the plan has {len(plan.replicas)} replicas, and {cluster} has room for "
            f"{len(sites)}."
        )
    site = sites[number]
    inner = plan_mesh(site.part, plan.axis_names[1:], plan.axis_sizes[1:])
    pricer = Pricer(site.whole, site.mesh(inner))
    turns = plan.replicas[number].microbatches
    return with_turns(analysis, turns), pricer
