"""The submeshes that stages may have, and the layouts that are tried on each.

Layouts are searched on few submeshes: some whole hosts, or a part of a torus. On
others they stay, and only the sizes of mesh axes change, so that a submesh shape costs
milliseconds. On each submesh that is searched there are three rules: the fastest
layouts, the fastest that split optimizer state over all devices, and the fastest that
split all state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cluster import Cluster, MeshShape
from autopar.cost.overlap import Discounts
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment, assign
from autopar.layouts.strategies import Strategy
from autopar.planner.limit import Limit
from autopar.planner.problem import Restriction, formulate, small_state
from autopar.planner.recipes import most_split
from autopar.planner.search import candidate_meshes
from autopar.steps.analysis import Analysis
from autopar.steps.batch import BATCH
from autopar.steps.nodes import Node
from autopar_passes.graph.roles import InputRole
from autopar_solver import Status, solve

Shape = tuple[int, ...]

@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What layouts are searched for.

    Attributes:
      name: what people call it.
      parameters: mesh axes over which parameters are split between steps.
      optimizer: the same of optimizer state.
      tensor: axes that never split the batch.
    """

    name: str
    parameters: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()

    def tensor_free(self, axes: Sequence[int]) -> bool:
        """Whether none of these axes is kept from the batch."""
        return not set(self.tensor).intersection(axes)


def rules(mesh: MeshShape) -> list[Rule]:
    """The rules that are tried on a mesh.

    The fastest layouts; those that split optimizer state, and all state, over all
    devices; and for each axis of the innermost level those that split the model over
    it, and optimizer state over all devices.
    """
    every = tuple(k for k, axis in enumerate(mesh.axes) if axis.size > 1)
    out = [Rule("fastest")]
    if not every:
        return out
    out.append(Rule("split optimizer", optimizer=every))
    out.append(Rule("split state", every, every))
    innermost = max(mesh.axes[k].level for k in every)
    for k in every:
        if mesh.axes[k].level == innermost:
            name = f"tensor {mesh.axes[k].size}"
            out.append(Rule(name, (k,), every, (k,)))
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Submesh:
    """Layouts on the devices of one slice of a cluster.

    Attributes:
      group: which group of equal devices it is of.
      shape: of the slice, by level.
      pricer: the slice and its logical mesh.
      assignment: the layouts of the whole program there.
      rule: what they were searched for.
    """

    group: int
    shape: Shape
    pricer: Pricer
    assignment: Assignment
    rule: str

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """What messages call it."""
        cluster, mesh = self.pricer.cluster, self.pricer.mesh
        return f"{cluster}: {'x'.join(map(str, mesh.sizes))}, {self.rule}"


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """How much communication counts in the search, work and the rest being 1.

    Attributes:
      gathers: of parameters, which every microbatch repeats.
      sums: of gradients, which are taken once a step.
    """

    gathers: float = 1.0
    sums: float = 1.0


def submeshes(
    analysis: Analysis,
    cluster: Cluster,
    weights: Weights,
    *,
    seconds: float | None = None,
) -> list[Submesh]:
    """The submeshes of a cluster, each with the layouts tried on it.

    Args:
      analysis: the program.
      cluster: whose slices they are.
      weights: of communication in the search.
      seconds: time limit of the solver for each search.
    """
    out: list[Submesh] = []
    for number, part in enumerate(cluster.groups or (cluster,)):
        shapes = slice_shapes(part)
        for base in _bases(part, shapes):
            for mesh in candidate_meshes(part.slice(base)):
                pricer = Pricer(part.slice(base), mesh)
                largest = _largest(part, shapes, mesh)
                found = [
                    (
                        rule.name,
                        layouts_on(analysis, pricer, rule, weights, largest, seconds),
                    )
                    for rule in rules(mesh)
                ]
                out.extend(_resized(number, part, shapes, pricer, found))
    return _distinct(out)


def slice_shapes(cluster: Cluster) -> list[Shape]:
    """The shapes of slices that are tried, few devices first.

    Of a level that may be cut anywhere, the sizes that divide it, and powers of two.
    """
    whole = [level.size for level in cluster.levels]
    found = [
        tuple(level.size for level in part.levels) for part, _ in cluster.slices()
    ]
    return [
        shape
        for shape in found
        if all(
            n % size == 0 or size & (size - 1) == 0
            for size, n in zip(shape, whole, strict=True)
        )
    ]


def _bases(cluster: Cluster, shapes: Sequence[Shape]) -> Iterator[Shape]:
    """The shapes on which layouts are searched: one for each set of levels used.

    All of the inner levels; of the outermost, as little as a slice may have where the
    level may be cut anywhere, and else all of it.
    """
    by_levels: dict[tuple[bool, ...], list[Shape]] = {}
    for shape in shapes:
        by_levels.setdefault(tuple(size > 1 for size in shape), []).append(shape)
    for used, found in by_levels.items():
        outermost = used.index(True) if True in used else 0
        level = cluster.levels[outermost]
        cuttable = outermost < len(used) - 1 and level.link.topology == "switch"
        yield min(found) if cuttable else max(found)


def _largest(
    cluster: Cluster, shapes: Sequence[Shape], mesh: MeshShape
) -> tuple[int, ...]:
    """The sizes of a mesh's axes on the largest slice that uses the same levels."""
    used = {axis.level for axis in mesh.axes if axis.size > 1}
    for shape in reversed(shapes):
        if {k for k, size in enumerate(shape) if size > 1} == used:
            for grown in _meshes(mesh, cluster.slice(shape)):
                return grown.sizes
    return mesh.sizes


def _resized(
    group: int,
    cluster: Cluster,
    shapes: Sequence[Shape],
    pricer: Pricer,
    found: Sequence[tuple[str, Assignment | None]],
) -> Iterator[Submesh]:
    """The same layouts on all slices that use the same levels."""
    base = tuple(level.size for level in pricer.cluster.levels)
    for shape in shapes:
        if [s > 1 for s in shape] != [s > 1 for s in base] and shape != base:
            continue
        part = cluster.slice(shape)
        for mesh in _meshes(pricer.mesh, part):
            for rule, assignment in found:
                if assignment is None or not fits(assignment, mesh.sizes):
                    continue
                same = dataclasses.replace(assignment, sizes=mesh.sizes, _known={})
                yield Submesh(group, shape, Pricer(part, mesh), same, rule)


def _meshes(mesh: MeshShape, part: Cluster) -> Iterator[MeshShape]:
    """A logical mesh with the outer axis of each level as long as a slice has it.

    No axis of two devices or more becomes one of one device.
    """
    sizes = [axis.size for axis in mesh.axes]
    for number, level in enumerate(part.levels):
        axes = [k for k, axis in enumerate(mesh.axes) if axis.level == number]
        if not axes:
            continue
        rest = math.prod(sizes[k] for k in axes[1:])
        first, left = divmod(level.size, rest)
        if left or (first == 1 and sizes[axes[0]] > 1):
            return
        sizes[axes[0]] = first
    yield MeshShape(
        axes=tuple(
            dataclasses.replace(axis, size=size, link=part.levels[axis.level].link)
            for axis, size in zip(mesh.axes, sizes, strict=True)
        )
    )


def fits(assignment: Assignment, sizes: Sequence[int]) -> bool:
    """Whether mesh axes of these sizes split all that is no batch without a rest."""
    labels = assignment.analysis.node_labels
    for node, strategy in _pairs(assignment):
        named = labels.get(node.index, {})
        for factor, axes in enumerate(strategy):
            parts = math.prod(sizes[a] for a in axes)
            if named.get(factor) != BATCH and node.factors[factor][0] % parts:
                return False
    return True


def splits_batch(assignment: Assignment, scale: float) -> bool:
    """Whether the layouts split a batch of another size without a rest.

    Args:
      assignment: the layouts.
      scale: the rows of a microbatch over those of the program.
    """
    labels = assignment.analysis.node_labels
    for node, strategy in _pairs(assignment):
        named = labels.get(node.index, {})
        for factor, axes in enumerate(strategy):
            if axes and named.get(factor) == BATCH:
                rows = node.factors[factor][0] * scale
                parts = math.prod(assignment.sizes[a] for a in axes)
                if rows < 1 or rows != round(rows) or round(rows) % parts:
                    return False
    return True


def _pairs(assignment: Assignment) -> Iterator[tuple[Node, Strategy]]:
    nodes = assignment.analysis.contraction.nodes
    yield from zip(nodes, assignment.strategies, strict=True)


def _distinct(found: Sequence[Submesh]) -> list[Submesh]:
    """Without those that have the same layouts on the same mesh as an earlier one."""
    seen: set[object] = set()
    out: list[Submesh] = []
    for submesh in found:
        mesh = tuple((a.level, a.size) for a in submesh.pricer.mesh.axes)
        copies = frozenset(submesh.assignment.copies.items())
        key = (submesh.group, mesh, submesh.assignment.strategies, copies)
        if key not in seen:
            seen.add(key)
            out.append(submesh)
    return out


def layouts_on(
    analysis: Analysis,
    pricer: Pricer,
    rule: Rule,
    weights: Weights,
    largest: Sequence[int] | None = None,
    seconds: float | None = None,
) -> Assignment | None:
    """The fastest layouts of a whole program on one mesh, whatever memory they need.

    Args:
      analysis: the program.
      pricer: the mesh.
      rule: what they split.
      weights: of communication.
      largest: sizes of the mesh axes at which the layouts must be possible, too, for
        a large batch.
      seconds: time limit of the solver.

    Returns:
      None where the rule allows none, or none was found in time.
    """
    limit = Limit(seconds)
    allowed = growing(analysis, pricer, rule, largest or pricer.sizes)
    places = analysis.positions
    count = len(places.classes)
    in_pass = np.logical_or.reduce(list(places.roles.values()))
    discounts = Discounts(
        np.ones(count),
        np.full(count, weights.sums),
        np.where(in_pass, weights.gathers, 1.0),
    )
    formulation = formulate(analysis, pricer, allowed, None, None, discounts)
    solution = solve(
        formulation.problem, seconds=limit.part_s(1.0), timer=time.thread_time
    )
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        return None
    nodes = len(analysis.contraction.nodes)
    chosen = [
        space.strategies[k]
        for space, k in itertools.islice(
            zip(formulation.spaces, solution.choices, strict=True), nodes
        )
    ]
    copies = [(c, solution.choices[c.node]) for c in formulation.copies]
    return assign(analysis, pricer.sizes, chosen, copies)


def growing(
    analysis: Analysis, pricer: Pricer, rule: Rule, largest: Sequence[int]
) -> Restriction:
    """Strategies that keep to a rule, and stay possible on longer axes.

    Args:
      analysis: the program.
      pricer: the mesh.
      rule: what is split.
      largest: sizes of its axes that must divide all that is no batch.
    """
    homes, nodes = analysis.contraction.homes, analysis.contraction.nodes
    small = small_state(analysis.graph, analysis.contraction, pricer.cluster.memory_bytes)
    split: dict[int, tuple[frozenset[int], int]] = {}
    for given in analysis.graph.inputs:
        axes = {
            InputRole.PARAMETER: rule.parameters,
            InputRole.OPTIMIZER_STATE: rule.optimizer,
        }.get(given.role, ())
        if axes and given.value in homes and homes[given.value].node not in small:
            node = nodes[homes[given.value].node]
            split[node.index] = frozenset(axes), most_split(node, axes, largest)
    labels = analysis.node_labels

    def allowed(node: Node, strategy: Strategy) -> bool:
        named = labels.get(node.index, {})
        for factor, axes in enumerate(strategy):
            parts = math.prod(largest[a] for a in axes)
            batch = named.get(factor) == BATCH
            if node.factors[factor][0] % parts and not batch:
                return False
            if batch and not rule.tensor_free(axes):
                return False
        wanted, most = split.get(node.index, (frozenset[int](), 0))
        return sum(a in wanted for axes in strategy for a in axes) >= most

    return allowed
