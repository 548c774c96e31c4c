"""Searches meshes and strategies for the plan with the shortest step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.gathering import GatherRequest
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import Candidate, SearchResult, candidate_of, choices_of
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.deadline import is_over, leave_untried, stop_if_over
from autopar.planner.infeasible import advise
from autopar.planner.problem import Restriction, formulate
from autopar.planner.proposals import program_text
from autopar.planner.solving import TimeOutError, has_plan, solve_mesh
from autopar.planner.weights import Weights
from autopar.plans.schema import optimality_text
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar.units import seconds_text
from autopar_passes.graph.operators import Operator
from autopar_passes.rules import manual
from autopar_solver import Solution, Status, evaluate_choices


def candidate_meshes(
    cluster: Cluster,
    max_axes: int | None = None,
    axis_names: Sequence[str] | None = None,
) -> list[MeshShape]:
    """Returns the meshes to try.

    There is one mesh for each way to cut the cluster's levels (such as hosts, and the
    devices of a host) into axes. Two axes within one level are interchangeable, so only
    one order of their sizes is tried.

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
    """Checks the number of mesh axes that the user requested."""
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
    experts: bool = True,
    codecs: CodecRequest | None = None,
    untried: Sequence[str] | None = (),
    weights: Sequence[Weights] | None = None,
    most_s: float = math.inf,
    gathers: GatherRequest | None = None,
) -> SearchResult:
    """Finds the best plan of a step on a cluster.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      meshes: the meshes to try; default: `candidate_meshes`.
      seconds: time limit of the solver for each mesh.
      restriction: for each mesh, a function that says which strategies are allowed
        there.
      starts: known assignments; the result is at least as fast as each of them that
        fits.
      experts: whether the search also tries the plans that people write
        (`autopar.planner.experts`), on meshes whose first plan is not proved to be
        optimal.
      untried: options that would need less memory. If no plan fits, the error names
        them, and a memory size that is enough. To find this size takes about as long as
        the search. None: the error names neither.
      weights: as for `autopar.planner.solving.solve_mesh`.
      codecs: the user's request about codecs; None: no codecs.
      most_s: seconds of a step under a known plan; the search ends when no plan can be
        faster.
      gathers: the request to encode gathers of parameters; None: they are exact.

    Raises:
      InfeasibleError: no mesh has a plan that fits the memory of a device.
    """
    start = time.perf_counter()
    tried: list[tuple[MeshShape, Candidate | None]] = []
    failures: list[tuple[Pricer, PlanError]] = []
    late = False
    wanted = candidate_meshes(cluster) if meshes is None else list(meshes)
    for number, mesh in enumerate(wanted, 1):
        which = f"mesh {number} of {len(wanted)} ({mesh.label}){program_text()}"
        name = f"mesh {mesh.label}{program_text()}"
        if any(c is not None for _, c in tried) and is_over():
            late = True
            leave_untried(name)
            continue
        stop_if_over(name)
        say(f"planning {which}{_best(tried)}")
        pricer = Pricer(cluster, mesh, gathers=gathers)
        limit = restriction(pricer) if restriction is not None else None
        try:
            known = [c for c in starts if c.pricer.mesh == mesh]
            found = solve_mesh(
                analysis,
                pricer,
                limit,
                seconds,
                known,
                weights=weights,
                most_s=min(most_s, _least_s(tried)),
                experts=experts,
                codecs=codecs,
            )
            tried.append((mesh, found))
        except PlanError as error:  # another mesh may have a plan
            tried.append((mesh, None))
            failures.append((pricer, error))
    solved = [c for _, c in tried if c is not None]
    if not solved:
        untried = None if is_over() else untried
        raise _no_mesh(analysis, failures, seconds, restriction, untried)
    best = min(solved, key=lambda c: c.step_s)
    late = late or any(isinstance(error, TimeOutError) for _, error in failures)
    # The lower bounds hold only for plans without codecs.
    coded = best.sending is not None and best.sending.has_codecs
    floor_s = 0.0 if late or coded else min(c.bound_s for c in solved)
    spent_s = time.perf_counter() - start
    short = any(isinstance(error, InfeasibleError) for _, error in failures)
    return SearchResult(best, tuple(tried), spent_s, floor_s=floor_s, short=short)


def _least_s(tried: Sequence[tuple[MeshShape, Candidate | None]]) -> float:
    """Returns the seconds of a step under the best plan so far without codecs."""
    known = (c for _, c in tried if c is not None)
    return min((c.before_s or c.plain_s for c in known), default=math.inf)


def _best(tried: Sequence[tuple[MeshShape, Candidate | None]]) -> str:
    """Returns the best plan so far, described as text."""
    solved = [c for _, c in tried if c is not None]
    if not solved:
        return ""
    best = min(solved, key=lambda c: c.step_s)
    near = optimality_text(best.report.status.value, best.report.gap)
    return f"; best so far {seconds_text(best.step_s)}, on its mesh {near}"


# Time limit of the solver for checking one memory size, in seconds.
_CHECK_S = 10.0


def _no_mesh(
    analysis: Analysis,
    failures: Sequence[tuple[Pricer, PlanError]],
    seconds: float | None,
    restriction: Callable[[Pricer], Restriction] | None,
    untried: Sequence[str] | None,
) -> PlanError:
    """The error if no mesh has a plan: the error of the mesh that needs least memory.

    Unless ``untried`` is None, the error states a memory size for which a plan was
    found on that mesh.
    """
    unfit = [(p, e) for p, e in failures if isinstance(e, InfeasibleError)]
    if len(unfit) < len(failures):
        return next(e for _, e in failures if not isinstance(e, InfeasibleError))
    pricer, failure = min(unfit, key=lambda pair: pair[1].least_bytes)
    failure.free_s = min(error.free_s for _, error in unfit)
    if untried is None:
        return failure
    limit = min(seconds or _CHECK_S, _CHECK_S)

    def plans(nbytes: int) -> bool:
        device = dataclasses.replace(pricer.cluster.device, memory_bytes=nbytes)
        larger = dataclasses.replace(pricer.cluster, device=device)
        roomy = Pricer(larger, pricer.mesh)
        allowed = restriction(roomy) if restriction is not None else None
        return has_plan(analysis, roomy, allowed, limit)

    return advise(analysis, pricer, failure, failure.least_bytes, plans, untried)


def plan_mesh(
    cluster: Cluster, names: tuple[str, ...], sizes: tuple[int, ...]
) -> MeshShape:
    """Returns the mesh of a plan on a cluster.

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


def search_of_one(
    analysis: Analysis,
    cluster: Cluster,
    assignment: Assignment,
    names: Sequence[str],
    gathers: GatherRequest | None = None,
) -> SearchResult:
    """Returns the result of a search in which only one assignment is tried.

    Args:
      analysis: the step.
      cluster: the devices for which the assignment is priced.
      assignment: the layouts.
      names: names of the assignment's mesh axes.
      gathers: the request to encode gathers of parameters; None: those of the
        assignment.

    Raises:
      PlanError: the cluster has no such mesh, or the layouts do not fit the step.
    """
    mesh = plan_mesh(cluster, tuple(names), assignment.sizes)
    start = time.perf_counter()
    pricer = Pricer(cluster, mesh, gathers=gathers)

    def is_stated(node: Node, strategy: Strategy) -> bool:
        return strategy == assignment.strategies[node.index]

    formulation = formulate(analysis, pricer, is_stated, float("inf"))
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
    found = candidate_of(analysis, formulation, solution, assignment)
    if not math.isfinite(cost):
        # The solver's cost is infinite if the problem forbids a copy that the layouts
        # contain. Such layouts come from another batch size, for which reusing the copy
        # cost as much as making a new one. The record of a plan needs a finite cost.
        solution = dataclasses.replace(solution, cost=found.step_s)
        found = dataclasses.replace(found, solution=solution)
    seconds = time.perf_counter() - start
    return SearchResult(found, ((mesh, found),), seconds, searched=False)


def meshes_for_manual(
    analysis: Analysis, cluster: Cluster, meshes: Sequence[MeshShape]
) -> Sequence[MeshShape]:
    """Returns the meshes that have an axis for each axis of every ``shard_map``.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      meshes: the meshes to choose from.

    Raises:
      PlanError: no mesh has such axes; or a ``shard_map`` names an axis over which it
        splits no array, so that the planner cannot choose a mesh axis for it.
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
