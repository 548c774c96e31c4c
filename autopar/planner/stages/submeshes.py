"""The submeshes that stages may have, and the layouts that are tried on each.

Layouts are searched only on a few submeshes: some whole hosts, or a part of a torus.
Other submeshes reuse these layouts with other sizes of the mesh axes. So a further
submesh shape costs only milliseconds. On each searched submesh several rules are tried:
the fastest layouts, the fastest layouts that split optimizer state over all devices,
the fastest layouts that split all state, and layouts that do not split the batch over
some axes.

The rule of the fastest layouts excludes nothing. The other rules serve to save memory,
and to run microbatches that the fastest layouts cannot split. If the fastest layouts
leave spare memory and can split all microbatches, no other rule is tried.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from autopar.cluster import Cluster, MeshShape
from autopar.cluster.slices import block, shapes
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import assignment_of, peak_of
from autopar.planner.deadline import stop_if_over, timer_for
from autopar.planner.problem import Formulation, Restriction, formulate, small_state
from autopar.planner.recipes import most_split
from autopar.planner.replicas import replica_pricer, slowest_of
from autopar.planner.search import candidate_meshes, plan_mesh
from autopar.planner.solving import Limit
from autopar.planner.weights import Weights
from autopar.plans import NO_SCHEDULE, Plan
from autopar.steps.analysis import Analysis
from autopar.steps.batch import BATCH, SEQUENCE
from autopar.steps.nodes import Node
from autopar_passes.graph.roles import InputRole
from autopar_solver import Status, solve

Shape = tuple[int, ...]

# Relative gap of the search of layouts. A smaller gap is not needed, because the
# objective weighs communication only roughly.
_GAP = 5e-3
# If the whole program needs less than this fraction of the memory, the rest of the
# memory is assumed to be enough for what a stage needs in addition: accumulated
# gradients, and the activations of several microbatches.
_EASY = 0.5
# The fraction of the remaining time that each search of layouts gets.
_SHARE = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A rule for layouts: which arrays mesh axes may split.

    Attributes:
      name: what people call it.
      parameters: mesh axes over which parameters are split between steps.
      optimizer: mesh axes over which optimizer state is split between steps.
      tensor: axes that split the model and never the batch.
      sequence: whether the axes of ``tensor`` may split the sequence of matrix
        products, too. If False, each device computes and sums the gradients of its own
        part of the weights.
    """

    name: str
    parameters: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    sequence: bool = False

    def allows(self, kind: str, label: str, axes: Sequence[int]) -> bool:
        """Whether axes may split a factor, such as the batch, in a kind of node."""
        if not set(self.tensor).intersection(axes):
            return True
        whole = kind == "contraction" and not self.sequence
        return label != BATCH and not (whole and label == SEQUENCE)


def rules(mesh: MeshShape) -> list[Rule]:
    """Returns the rules that are tried on a mesh.

    The first rules are: the fastest layouts, layouts that split optimizer state over
    all devices, and layouts that split all state over all devices. Further rules exist
    for each axis of the innermost level: layouts that split the model or the sequence
    over this axis, and optimizer state over all devices. If a level has several axes,
    only rules that treat these axes differently are added.
    """
    every = tuple(k for k, axis in enumerate(mesh.axes) if axis.size > 1)
    levels = [mesh.axes[k].level for k in every]
    out: list[Rule] = []
    if len(set(levels)) == len(levels):
        out.append(Rule("fastest"))
        if every:
            out.append(Rule("split optimizer", optimizer=every))
    if every:
        out.append(Rule("split state", every, every))
    innermost = max(levels, default=0)
    for k in every:
        if mesh.axes[k].level == innermost:
            size = mesh.axes[k].size
            out.append(Rule(f"tensor {size}", (k,), every, (k,)))
            if len(set(levels)) == len(levels):
                out.append(Rule(f"sequence {size}", (k,), every, (k,), sequence=True))
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Submesh:
    """Layouts on the devices of one slice of a cluster.

    Attributes:
      group: number of the group of equal devices that the slice belongs to.
      shape: shape of the slice, by level.
      pricer: the slice and its logical mesh.
      assignment: the layouts of the whole program on the slice.
      rule: name of the rule under which the layouts were searched.
    """

    group: int
    shape: Shape
    pricer: Pricer
    assignment: Assignment
    rule: str

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """Name of the submesh in messages."""
        cluster, mesh = self.pricer.cluster, self.pricer.mesh
        return f"{cluster}: {'x'.join(map(str, mesh.sizes))}, {self.rule}"


def submeshes(
    analysis: Analysis,
    cluster: Cluster,
    weights: Weights,
    *,
    scales: Sequence[float] = (),
    seconds: float | None = None,
    whole: bool = True,
) -> list[Submesh]:
    """Returns the submeshes of a cluster, each with layouts to try.

    Args:
      analysis: the program.
      cluster: the cluster whose slices are the submeshes.
      weights: weights of communication in the search.
      scales: rows of the microbatches to consider divided by the rows of the program;
        (): any number of rows.
      seconds: time limit of the solver for all searches.
      whole: whether the slice of all devices is included.
    """
    out: list[Submesh] = []
    limit = Limit(seconds)
    for number, part in enumerate(cluster.groups or (cluster,)):
        shapes = slice_shapes(part)
        if not whole:
            shapes = [s for s in shapes if math.prod(s) < cluster.num_devices]
        for base in _bases(part, shapes):
            alike = [s for s in shapes if _levels(s) == _levels(base)]
            for mesh in candidate_meshes(part.slice(base)):
                pricer = Pricer(part.slice(base), mesh)
                resized = functools.partial(_resize_group, number, part, alike, pricer)
                suffice = functools.partial(_suffice, resized, len(alike), scales)
                largest = _largest(part, alike, mesh)
                found = layouts_on(analysis, pricer, weights, largest, limit, suffice)
                out.extend(resized(found))
                if [name for name, _ in found] == ["fastest"]:
                    break
    return _distinct(out)


def _suffice(
    resized: Callable[[Sequence[tuple[str, Assignment]]], Iterable[Submesh]],
    sizes: int,
    scales: Sequence[float],
    fastest: Assignment,
) -> bool:
    """Whether the fastest layouts can split all microbatches, and leave spare memory.

    Args:
      resized: a function that makes submeshes of all sizes from layouts.
      sizes: number of submesh sizes.
      scales: as for `submeshes`.
      fastest: the layouts.
    """
    found = list(resized([("fastest", fastest)]))
    splits = frozenset[tuple[int, int]]().union(
        *(batch_splits(submesh.assignment) for submesh in found)
    )
    splittable = len(found) == sizes and all(divides(splits, x) for x in scales)
    if not scales or not splittable:
        return False
    fewest = min(found, key=lambda submesh: submesh.devices)
    pricer = fewest.pricer
    return peak_of(fewest.assignment, pricer) <= _EASY * pricer.cluster.memory_bytes


def slice_shapes(cluster: Cluster) -> list[Shape]:
    """Returns the shapes of slices that are tried, few devices first.

    If a level may be cut anywhere, the tried sizes are its divisors and the powers of
    two.
    """
    whole = [level.size for level in cluster.levels]
    found = [tuple(level.size for level in part.levels) for part, _ in cluster.slices()]
    return [
        shape
        for shape in found
        if all(
            n % size == 0 or size & (size - 1) == 0
            for size, n in zip(shape, whole, strict=True)
        )
    ]


def _bases(cluster: Cluster, shapes: Sequence[Shape]) -> Iterator[Shape]:
    """Yields the shapes on which layouts are searched: one for each set of levels used.

    The inner levels have their full size. If the outermost level may be cut anywhere,
    it has the smallest size of a slice there, and otherwise its full size.
    """
    by_levels: dict[tuple[bool, ...], list[Shape]] = {}
    for shape in shapes:
        by_levels.setdefault(_levels(shape), []).append(shape)
    for used, found in by_levels.items():
        outermost = used.index(True) if True in used else 0
        level = cluster.levels[outermost]
        cuttable = outermost < len(used) - 1 and level.link.topology == "switch"
        yield min(found) if cuttable else max(found)


def _levels(shape: Shape) -> tuple[bool, ...]:
    """Returns, for each level, whether a slice has several devices along it."""
    return tuple(size > 1 for size in shape)


def _largest(
    cluster: Cluster, shapes: Sequence[Shape], mesh: MeshShape
) -> tuple[int, ...]:
    """Returns the sizes of a mesh's axes on the largest of some slices."""
    for shape in reversed(shapes):
        for grown in _meshes(mesh, cluster.slice(shape)):
            return grown.sizes
    return mesh.sizes


def _resize_group(
    group: int,
    cluster: Cluster,
    shapes: Sequence[Shape],
    pricer: Pricer,
    found: Sequence[tuple[str, Assignment]],
) -> Iterator[Submesh]:
    """Uses layouts found on one slice on all slices with the same cluster levels."""
    for shape in shapes:
        part = cluster.slice(shape)
        for mesh in _meshes(pricer.mesh, part):
            for rule, assignment in found:
                if not fits(assignment, mesh.sizes):
                    continue
                same = dataclasses.replace(assignment, sizes=mesh.sizes)
                yield Submesh(group, shape, Pricer(part, mesh), same, rule)


def _meshes(mesh: MeshShape, part: Cluster) -> Iterator[MeshShape]:
    """Yields the logical meshes on a slice, with each level's outer axis resized.

    An axis with several devices is never resized to one device.
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
    """Whether mesh axes of these sizes divide every factor evenly, except factors of
    the batch.
    """
    labels = assignment.analysis.node_labels
    for node, strategy in _pairs(assignment):
        named = labels.get(node.index, {})
        for factor, axes in enumerate(strategy):
            parts = math.prod(sizes[a] for a in axes)
            if named.get(factor) != BATCH and node.factors[factor][0] % parts:
                return False
    return True


def batch_splits(assignment: Assignment) -> frozenset[tuple[int, int]]:
    """The sizes of the batch's factors, each with the number of parts into which the
    factor is split.
    """
    labels = assignment.analysis.node_labels
    return frozenset(
        (node.factors[factor][0], math.prod(assignment.sizes[a] for a in axes))
        for node, strategy in _pairs(assignment)
        for factor, axes in enumerate(strategy)
        if axes and labels.get(node.index, {}).get(factor) == BATCH
    )


def divides(splits: Iterable[tuple[int, int]], scale: float) -> bool:
    """Whether a batch of another size can be split evenly into the same numbers of
    parts.

    Args:
      splits: sizes and parts (`batch_splits`).
      scale: the rows of a microbatch divided by the rows of the program.
    """
    for size, parts in splits:
        rows = size * scale
        whole = round(rows)
        if whole < 1 or abs(rows - whole) > 1e-6 * rows or whole % parts:
            return False
    return True


def _pairs(assignment: Assignment) -> Iterator[tuple[Node, Strategy]]:
    nodes = assignment.analysis.contraction.nodes
    yield from zip(nodes, assignment.strategies, strict=True)


def _distinct(found: Sequence[Submesh]) -> list[Submesh]:
    """Removes submeshes that have the same layouts on the same mesh as an earlier
    submesh.
    """
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
    weights: Weights,
    largest: Sequence[int] | None,
    limit: Limit | None,
    suffice: Callable[[Assignment], bool],
) -> list[tuple[str, Assignment]]:
    """The fastest layouts of a whole program on one mesh, whatever memory they need.

    The problem of the solver is formulated once; each rule removes strategies from it.

    Args:
      analysis: the program.
      pricer: the mesh.
      weights: weights of communication.
      largest: sizes of the mesh axes at which the layouts must be possible, too, for
        a large batch.
      limit: time limit of the solver for all rules.
      suffice: says whether the fastest layouts are enough, so that no other rule is
        tried.

    Returns:
      The layouts by name of the rule. Rules that allow no layouts, or for which none
      were found in time, are left out.
    """
    sizes = largest or pricer.sizes
    growing = _growing(analysis, sizes)
    small = _small(analysis, pricer)
    formulation = formulate(analysis, pricer, growing, weights=weights, small=small)
    found: list[tuple[str, Assignment]] = []
    for rule in rules(pricer.mesh):
        allowed = _keeping(analysis, pricer, rule, sizes)
        made = _solve_by_rule(formulation, analysis, allowed, limit or Limit(None))
        if made is not None:
            found.append((rule.name, made))
            if rule.name == "fastest" and suffice(made):
                break
    return found


def _small(analysis: Analysis, pricer: Pricer) -> frozenset[int]:
    """Returns the nodes of state that stays unsharded."""
    memory = float(pricer.cluster.memory_bytes)
    return small_state(analysis.graph, analysis.contraction, memory)


def _solve_by_rule(
    formulation: Formulation, analysis: Analysis, allowed: Restriction, limit: Limit
) -> Assignment | None:
    """The fastest layouts of a problem that keep to a rule; None if none were found."""
    stop_if_over("stages")
    limited = formulation.within(analysis, allowed)
    limit_s = limit.part_s(_SHARE)
    solution = solve(
        limited.problem, seconds=limit_s, gap=_GAP, timer=timer_for(limit_s)
    )
    limit.spend(solution.seconds)
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        return None
    return assignment_of(analysis, limited, solution)


def _growing(analysis: Analysis, largest: Sequence[int]) -> Restriction:
    """Allows strategies that also divide arrays evenly on longer axes.

    Factors of the batch are exempt.

    Args:
      analysis: the program.
      largest: sizes of the axes.
    """
    labels = analysis.node_labels

    def is_allowed(node: Node, strategy: Strategy) -> bool:
        named = labels.get(node.index, {})
        for factor, axes in enumerate(strategy):
            parts = math.prod(largest[a] for a in axes)
            if node.factors[factor][0] % parts and named.get(factor) != BATCH:
                return False
        return True

    return is_allowed


def _keeping(
    analysis: Analysis, pricer: Pricer, rule: Rule, largest: Sequence[int]
) -> Restriction:
    """Allows the strategies that keep to a rule.

    Args:
      analysis: the program.
      pricer: the mesh.
      rule: the rule.
      largest: sizes of the mesh axes, for which state is split as far as possible.
    """
    homes, nodes = analysis.contraction.homes, analysis.contraction.nodes
    small = _small(analysis, pricer)
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

    def is_allowed(node: Node, strategy: Strategy) -> bool:
        named = labels.get(node.index, {})
        for factor, axes in enumerate(strategy):
            if not rule.allows(node.kind, named.get(factor, ""), axes):
                return False
        wanted, most = split.get(node.index, (frozenset[int](), 0))
        return sum(a in wanted for axes in strategy for a in axes) >= most

    return is_allowed


Wanted = tuple[int, tuple[int, ...]]


def place(cluster: Cluster, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
    """Returns the devices of each stage, as positions in the cluster.

    Stages are placed in order, each after the previous stage, at a position where its
    slice may begin. If some stages then find no place, the largest stages are placed
    first instead.

    Args:
      cluster: the devices.
      wanted: by stage, its group of equal devices and the shape of its slice.

    Raises:
      PlanError: the slices do not fit on the cluster together.
    """
    parts = cluster.groups or (cluster,)
    begins = [sum(part.num_devices for part in parts[:k]) for k in range(len(parts))]
    out: dict[int, tuple[int, ...]] = {}
    for number, part in enumerate(parts):
        stages = [k for k, (group, _) in enumerate(wanted) if group == number]
        found = _in_order(part, [(k, wanted[k][1]) for k in stages])
        if found is None:
            by_size = sorted(stages, key=lambda k: -math.prod(wanted[k][1]))
            found = _in_order(part, [(k, wanted[k][1]) for k in by_size])
        if found is None:
            shapes = ", ".join("x".join(map(str, wanted[k][1])) for k in stages)
            raise PlanError(
                f"stages of {shapes} do not fit beside each other in {part}."
            )
        for stage, cells in found.items():
            out[stage] = tuple(begins[number] + cell for cell in cells)
    return [out[k] for k in range(len(wanted))]


def _in_order(
    cluster: Cluster, wanted: Sequence[tuple[int, tuple[int, ...]]]
) -> dict[int, tuple[int, ...]] | None:
    """Places slices one after the other; None: the last slices find no place."""
    free = [True] * cluster.num_devices
    inside = {m: k for k, m in enumerate(cluster.ids)}
    out: dict[int, tuple[int, ...]] = {}
    last: dict[tuple[int, ...], int] = {}
    for stage, shape in wanted:
        step = _step(cluster, shape)
        cells = None
        for offset in range(last.get(shape, 0), cluster.num_devices, step):
            if not free[offset]:
                continue
            try:
                ids = cluster.slice(shape, offset).ids
            except ValueError:
                continue
            tried = tuple(inside[i] for i in ids)
            if all(free[c] for c in tried):
                cells, last[shape] = tried, offset
                break
        if cells is None:
            return None
        for cell in cells:
            free[cell] = False
        out[stage] = cells
    return out


def _step(cluster: Cluster, shape: Sequence[int]) -> int:
    """The least distance, in devices, between two positions where a slice may begin."""
    levels = [level.size for level in cluster.levels]
    step = 1
    for size, whole in zip(reversed(shape), reversed(levels), strict=True):
        step *= size
        if size < whole:
            break
    first = next((k for k, s in enumerate(shape) if s > 1), len(shape) - 1)
    return min(
        step,
        math.prod(levels[first + 1 :])
        * (shape[first] if first == len(shape) - 1 else 1),
    )


def stage_cluster(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """Returns the devices of a stage as a cluster.

    Args:
      cluster: all devices.
      devices: positions of the stage's devices.

    Raises:
      PlanError: the cluster has no such slice.
    """
    wanted, begin = set(devices), 0
    for part in cluster.groups or (cluster,):
        first = min(wanted) - begin
        if 0 <= first < part.num_devices:
            for shape in shapes(part.levels):
                if math.prod(shape) != len(wanted):
                    continue
                cells = block(part.levels, shape, first)
                if {cell + begin for cell in cells} == wanted:
                    return cluster.slice(shape, min(wanted))
        begin += part.num_devices
    raise PlanError(
        f"devices {', '.join(map(str, sorted(wanted)))} are no slice of {cluster}: "
        "plan again for this cluster."
    )


def stage_pricers(plan: Plan, cluster: Cluster | None = None) -> tuple[Pricer, ...]:
    """Returns the pricer of each stage of a plan; plans of one stage have one.

    The pricer of a plan with replicas is that of the slowest replica.

    Args:
      plan: the plan.
      cluster: all devices; None: the devices that the plan was made for.

    Raises:
      PlanError: the cluster does not have the meshes of the stages.
    """
    whole = plan.cluster.read() if cluster is None else cluster
    if plan.replicas:
        return (replica_pricer(plan, whole, slowest_of(plan)),)
    if len(plan.stages) == 1:
        parts = (whole,)
    else:
        parts = tuple(stage_cluster(whole, stage.devices) for stage in plan.stages)
    return tuple(
        Pricer(part, plan_mesh(part, stage.axis_names, stage.axis_sizes))
        for part, stage in zip(parts, plan.stages, strict=True)
    )


def one_stage(plan: Plan, number: int) -> Plan:
    """Returns a stage of a plan, as a separate plan.

    Args:
      plan: the plan.
      number: number of the stage, from 0.
    """
    return msgspec.structs.replace(
        plan, stages=(plan.stages[number],), schedule=NO_SCHEDULE, pipeline=None
    )
