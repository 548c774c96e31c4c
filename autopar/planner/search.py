"""Searches meshes and strategies for the plan with the shortest step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster, MeshShape
from autopar.cost.codecs.matrix import Prices
from autopar.cost.combining import SUMS, Group
from autopar.cost.overlap import discounts
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import (
    WORTHWHILE,
    Candidate,
    SearchResult,
    candidate_of,
    choices_of,
)
from autopar.planner.hiding import PROVED, Plane, Weights, best_weights, plane_of
from autopar.planner.infeasible import advised, infeasible
from autopar.planner.problem import Formulation, Restriction, formulate
from autopar.planner.ties import split_batch_inputs
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar_solver import Solution, Status, evaluate_choices, solve


def candidate_meshes(
    cluster: Cluster,
    max_axes: int | None = None,
    axis_names: Sequence[str] | None = None,
) -> list[MeshShape]:
    """Returns the meshes to try: one for each way to cut the levels into axes.

    Two axes within one level are interchangeable, so only one order of their
    sizes is kept.

    Raises:
      PlanError: the cluster has no mesh with so few axes, or with these names.
    """
    levels = max(1, sum(level.size > 1 for level in cluster.levels))
    if max_axes is not None:
        _check_axes(cluster, levels, max_axes, axis_names)
    limit = max(2, levels) if max_axes is None else max_axes
    if axis_names is not None:
        shapes = cluster.mesh_shapes(len(axis_names))
        shapes = tuple(m for m in shapes if len(m.axes) == len(axis_names))
        if not shapes:
            raise PlanError(
                f"axis_names={tuple(axis_names)}: {cluster} cannot be cut into "
                f"{len(axis_names)} mesh axes of two devices or more. Give fewer names."
            )
        named = cluster.mesh_shapes(len(axis_names), axis_names)
        return _distinct([m for m in named if len(m.axes) == len(axis_names)])
    return _distinct(cluster.mesh_shapes(limit))


def _check_axes(
    cluster: Cluster, levels: int, max_axes: int, axis_names: Sequence[str] | None
) -> None:
    """Checks the number of mesh axes that is asked for."""
    if max_axes < levels:
        text = "1 level" if levels == 1 else f"{levels} levels"
        raise PlanError(
            f"max_axes={max_axes} is too few: {cluster} has {text} of links, and a "
            f"mesh axis lies within one level. Give {levels} or more, or plan for a "
            "part of the cluster."
        )
    if axis_names is not None and len(axis_names) > max_axes:
        raise PlanError(
            f"max_axes={max_axes} contradicts axis_names={tuple(axis_names)}, which "
            f"are {len(axis_names)}. Leave max_axes out."
        )


def _distinct(meshes: Sequence[MeshShape]) -> list[MeshShape]:
    seen: set[tuple[tuple[int, int], ...]] = set()
    out: list[MeshShape] = []
    for mesh in meshes:
        key = tuple(sorted((a.level, a.size) for a in mesh.axes))
        if key not in seen:
            seen.add(key)
            out.append(mesh)
    return out


def search(
    analysis: Analysis,
    cluster: Cluster,
    *,
    meshes: Sequence[MeshShape] | None = None,
    seconds: float | None = None,
    restriction: Callable[[Pricer], Restriction] | None = None,
    starts: Sequence[Candidate] = (),
) -> SearchResult:
    """Finds the best plan of a step on a cluster.

    Args:
      analysis: the step.
      cluster: what to plan for.
      meshes: the meshes to try; default: `candidate_meshes`.
      seconds: time limit of the solver, for each mesh.
      restriction: says, for a mesh, which strategies are allowed.
      starts: assignments known already; the result is at least as good as those
        that fit.

    Raises:
      InfeasibleError: no mesh has a plan that fits the memory of a device.
    """
    start = time.perf_counter()
    tried: list[tuple[MeshShape, Candidate | None]] = []
    failures: list[tuple[Pricer, PlanError]] = []
    wanted = candidate_meshes(cluster) if meshes is None else list(meshes)
    for number, mesh in enumerate(wanted, 1):
        say(f"planning mesh {number} of {len(wanted)} ({mesh}){_best(tried)}")
        pricer = Pricer(cluster, mesh)
        limit = restriction(pricer) if restriction is not None else None
        try:
            known = [c for c in starts if c.pricer.mesh == mesh]
            found = solve_mesh(
                analysis, pricer, limit, seconds, known, most_s=_least_s(tried)
            )
            tried.append((mesh, found))
        except PlanError as error:  # another mesh may have a plan
            tried.append((mesh, None))
            failures.append((pricer, error))
    solved = [c for _, c in tried if c is not None]
    if not solved:
        raise _no_mesh(analysis, failures, seconds, restriction)
    best = min(solved, key=lambda c: c.step_s)
    return SearchResult(best, tuple(tried), time.perf_counter() - start)


def _least_s(tried: Sequence[tuple[MeshShape, Candidate | None]]) -> float:
    """Seconds of the best plan so far."""
    return min((c.step_s for _, c in tried if c is not None), default=math.inf)


def _best(tried: Sequence[tuple[MeshShape, Candidate | None]]) -> str:
    """What is known of the best plan so far, as text."""
    solved = [c for _, c in tried if c is not None]
    if not solved:
        return ""
    best = min(solved, key=lambda c: c.step_s)
    gap = best.report.gap
    return f"; best so far {best.step_s * 1e3:.3g} ms, gap {100 * gap:.2g} %"


# Most seconds in which a size of memory is checked.
_CHECK_S = 10.0


def _no_mesh(
    analysis: Analysis,
    failures: Sequence[tuple[Pricer, PlanError]],
    seconds: float | None,
    restriction: Callable[[Pricer], Restriction] | None,
) -> PlanError:
    """The error where no mesh has a plan: that of the mesh that needs least memory.

    It advises a size of memory for which a plan was found on that mesh.
    """
    unfit = [(p, e) for p, e in failures if isinstance(e, InfeasibleError)]
    if len(unfit) < len(failures):
        return next(e for _, e in failures if not isinstance(e, InfeasibleError))
    pricer, failure = min(unfit, key=lambda pair: pair[1].least_bytes)
    limit = min(seconds or _CHECK_S, _CHECK_S)

    def plans(nbytes: int) -> bool:
        device = dataclasses.replace(pricer.cluster.device, memory_bytes=nbytes)
        larger = dataclasses.replace(pricer.cluster, device=device)
        roomy = Pricer(larger, pricer.mesh)
        allowed = restriction(roomy) if restriction is not None else None
        try:
            _solved(_Task(analysis, allowed, limit), roomy, None)
        except PlanError:
            return False
        return True

    return advised(analysis, pricer, failure, failure.least_bytes, plans)


# How often the memory limit is tightened until the exact peak fits.
_TIGHTENINGS = 5
# Problems solved for one mesh.
_MOST_PROBLEMS = 8
# Problems solved for one mesh to find the weights of what is hidden.
_ROUNDS = 4


def solve_mesh(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None = None,
    seconds: float | None = None,
    starts: Sequence[Candidate] = (),
    prices: Prices | None = None,
    weights: Weights | None = None,
    most_s: float = math.inf,
) -> Candidate:
    """Finds the best assignment on one mesh.

    Where communication runs beside work, the problem is solved at some weights of
    what is hidden, then at better ones (`autopar.planner.hiding`).

    The problem of the layouts holds what bytes take; a message that collectives
    share has a latency besides, which is paid once for its group, whoever sends in
    it. So the problem is solved first as if latencies were free, then without each
    of the groups that were used, and so on, as long as that may pay (branch and
    bound over sets of groups, the most promising first), in `_MOST_PROBLEMS` at most.
    The gap is that to the lowest bound of what was left.

    With ``prices`` it is solved once, for codecs have messages of their own.

    Args:
      analysis: the step.
      pricer: the mesh and cluster.
      restriction: says which strategies are allowed.
      seconds: time limit of the solver, for each problem.
      starts: assignments known already.
      prices: with them gradients may be sent by codecs.
      weights: of what is hidden; None: they are found.
      most_s: seconds of the best plan of other meshes; no more is proved of this mesh
        than that it has none that is faster.

    Raises:
      InfeasibleError: nothing fits the memory of a device.
    """
    memory = pricer.cluster.memory_bytes
    fitting = [c for c in starts if c.peak_memory_bytes <= memory]
    start = min(fitting, key=lambda c: c.step_s, default=None)
    task = _Task(analysis, restriction, seconds, prices)
    if not pricer.cluster.device.calibrated.overlap:
        first = best = _solved(task, pricer, start)
    elif prices is not None or weights is not None:
        first = best = _solved(task, pricer, start, weights or {})
    else:
        first, best = _weighted(task, pricer, start, most_s)
    if start is not None:
        best = min(best, start, key=lambda c: c.step_s)
    if prices is None and first.bound_s < most_s:
        best = _with_fewer_messages(task, first, best)
    return dataclasses.replace(best, pricer=pricer)


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What stays the same in all problems of a mesh.

    Attributes:
      analysis: the step.
      restriction: says which strategies are allowed.
      seconds: time limit of the solver, for each problem.
      prices: with them gradients may be sent by codecs.
    """

    analysis: Analysis
    restriction: Restriction | None
    seconds: float | None
    prices: Prices | None = None


def _weighted(
    task: _Task, pricer: Pricer, start: Candidate | None, most_s: float
) -> tuple[Candidate, Candidate]:
    """The solution at the best weights found, and the fastest plan.

    A plan's bound is the highest of all problems that were solved.
    """
    known = pricer.cluster.device.calibrated
    planes = [] if start is None else [_plane(start)]
    weights: Weights = best_weights(planes, known) if planes else {}
    last = best = _solved(task, pricer, start, weights)
    bound_s = last.bound_s
    for _ in range(_ROUNDS - 1):
        planes.append(_plane(last))
        if bound_s >= min(most_s, (1 - PROVED) * best.step_s):
            break
        previous, weights = weights, best_weights(planes, known)
        if weights == previous:
            break
        last = _solved(task, pricer, best, weights)
        best = min(best, last, key=lambda c: c.step_s)
        bound_s = max(bound_s, last.bound_s)
    first, best = (
        dataclasses.replace(c, weights=weights, lower_s=bound_s) for c in (last, best)
    )
    return first, best


def _plane(candidate: Candidate) -> Plane:
    known = candidate.pricer.cluster.device.calibrated
    return plane_of(candidate.step_s, candidate.timelines, known)


def _with_fewer_messages(task: _Task, first: Candidate, best: Candidate) -> Candidate:
    """The best of plans without some groups of messages.

    No plan without a set of groups is faster than the objective of its problem, and
    one that does not use all groups of a problem's solution is without one of them.

    Args:
      task: the step.
      first: the solution with all groups.
      best: the fastest plan known.
    """
    left, tried = [first], {frozenset[Group]()}
    floor_s = math.inf
    while left:
        left.sort(key=lambda c: -c.solution.cost)
        found = left.pop()
        if _settled(found, best):
            floor_s = min(floor_s, found.bound_s)
            continue
        floor_s = min(floor_s, _with_all_groups_s(found))
        pricer = found.formulation.pricer
        for group in sorted(found.groups):
            without = pricer.without | {group}
            if without in tried:
                continue
            if len(tried) == _MOST_PROBLEMS:
                floor_s = min(floor_s, *(c.bound_s for c in (found, *left)))
                left.clear()
                break
            tried.add(without)
            fewer = dataclasses.replace(pricer, without=without)
            with contextlib.suppress(PlanError):
                other = _solved(task, fewer, None, first.weights)
                left.append(other)
                best = min(best, other, key=lambda c: c.step_s)
    return dataclasses.replace(best, lower_s=min(floor_s, best.step_s))


def _with_all_groups_s(found: Candidate) -> float:
    """A lower bound of the plans that use all groups of messages of a solution."""
    if found.formulation.discounts is None:
        return found.bound_s + found.step_s - found.solution.cost
    return found.bound_s + _felt_s(found)


def _felt_s(found: Candidate) -> float:
    """The latencies of shared messages, as far as they lengthen a step.

    Where communication may be hidden, they count as much as the bytes of the messages
    do at the weights of the problem.
    """
    lowered = found.formulation.discounts
    if lowered is None:
        return found.shared_s
    operators = found.assignment.graph.operators
    out = 0.0
    for c in found.collectives:
        maker = operators[c.operator].class_index
        summed = c.step.kind in SUMS
        factor = lowered.sums[maker] if summed else lowered.gathers[c.ready]
        out += float(factor) * c.shared_s(found.pricer)
    return out


def _settled(found: Candidate, best: Candidate) -> bool:
    """Whether no plan without more groups can be worth it."""
    least = min(found.solution.cost, found.step_s - _felt_s(found))
    return least >= (1 - WORTHWHILE) * best.step_s


def _solved(
    task: _Task,
    pricer: Pricer,
    start: Candidate | None,
    weights: Weights | None = None,
) -> Candidate:
    """The best assignment, but for the latencies of shared messages.

    Memory terms enter only where the fastest assignment does not fit without.

    Args:
      task: the step.
      pricer: the mesh and cluster.
      start: an assignment that is known.
      weights: of what is hidden; None: work and communication are added.
    """
    analysis, seconds = task.analysis, task.seconds
    known = pricer.cluster.device.calibrated
    lowered = None
    if weights is not None and known.overlap:
        lowered = discounts(analysis, weights, known.overlap, known.contention)
    limit = float(pricer.cluster.memory_bytes)
    tightened: float | None = None
    formulation: Formulation | None = None
    status = Status.UNKNOWN
    for _ in range(_TIGHTENINGS + 1):
        formulation = formulate(
            analysis, pricer, task.restriction, tightened, task.prices, lowered
        )
        choices = None if start is None else choices_of(formulation, start.assignment)
        solution = solve(formulation.problem, seconds=seconds, warm_start=choices)
        status = solution.status
        if status in (Status.INFEASIBLE, Status.UNKNOWN):
            break
        found = candidate_of(analysis, formulation, solution)
        if found.peak_memory_bytes <= limit:
            found = dataclasses.replace(found, weights=weights)
            return _tie_broken(analysis, found)
        over = limit / found.peak_memory_bytes
        tightened = limit if tightened is None else 0.995 * tightened * over
    if start is not None:
        return start
    if tightened is None or status is Status.UNKNOWN or formulation is None:
        raise PlanError(
            f"no plan found on mesh {pricer.mesh} in {seconds} s: {status.value}. "
            "Give the solver more time with seconds=."
        )
    raise infeasible(analysis, pricer, formulation)


def _tie_broken(analysis: Analysis, found: Candidate) -> Candidate:
    """Splits the batch inputs of a candidate where that is free and still fits."""
    solution = split_batch_inputs(analysis, found.formulation, found.solution)
    if solution.choices == found.solution.choices:
        return found
    split = candidate_of(analysis, found.formulation, solution)
    split = dataclasses.replace(split, weights=found.weights)
    limit = max(found.peak_memory_bytes, float(found.pricer.cluster.memory_bytes))
    fits = split.peak_memory_bytes <= limit
    return split if fits and split.step_s <= found.step_s * (1 + 1e-9) else found


def plan_mesh(
    cluster: Cluster, names: tuple[str, ...], sizes: tuple[int, ...]
) -> MeshShape:
    """The mesh of a plan on a cluster.

    Raises:
      PlanError: the cluster has no such mesh.
    """
    levels = sum(level.size > 1 for level in cluster.levels)
    enough = len(names) >= max(levels, 1)
    for mesh in cluster.mesh_shapes(len(names), names) if enough else ():
        if (mesh.names, mesh.sizes) == (names, sizes):
            return mesh
    axes = " ".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True))
    raise PlanError(f"the plan's mesh {axes} does not fit the cluster {cluster}.")


def given(
    analysis: Analysis, cluster: Cluster, assignment: Assignment, names: Sequence[str]
) -> SearchResult:
    """A search that tries one assignment only, on another cluster perhaps.

    Args:
      analysis: the step.
      cluster: what it is priced for.
      assignment: the layouts.
      names: of its mesh axes.

    Raises:
      PlanError: the cluster has no such mesh, or the layouts do not fit the step.
    """
    mesh = plan_mesh(cluster, tuple(names), assignment.sizes)
    start = time.perf_counter()
    pricer = Pricer(cluster, mesh)

    def stated(node: Node, strategy: Strategy) -> bool:
        return strategy == assignment.strategies[node.index]

    formulation = formulate(analysis, pricer, stated, float("inf"))
    choices = choices_of(formulation, assignment)
    if choices is None:
        raise PlanError(
            "the plan holds a layout that the planner does not consider for this step."
        )
    cost = evaluate_choices(formulation.problem, choices).cost
    solution = Solution(
        choices=tuple(choices),
        cost=cost,
        bound=0.0,
        status=Status.FEASIBLE,
        seconds=0.0,
    )
    found = candidate_of(analysis, formulation, solution)
    seconds = time.perf_counter() - start
    return SearchResult(found, ((mesh, found),), seconds, searched=False)
