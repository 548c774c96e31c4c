"""Plans a step for another cluster in a short time, starting from the running plan.

The search of `autopar.planner.plan` spends most of its time on proving how good a plan
is. The search here solves one problem on each mesh, with a short time limit. The solver
starts from the running plan's layouts, as far as these layouts fit the new mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence

import msgspec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.gathering import GatherRequest
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.choose import (
    CodecRequest,
    Errors,
    request_of,
    worth_encoding,
)
from autopar.planner.hints import check_pinned, pin_restriction, pinned_layouts
from autopar.planner.options import PlanOptions, with_compiler_options
from autopar.planner.plan import meshes_of, plan_analysis
from autopar.planner.problem import FEW_NODES, Restriction, Within
from autopar.planner.programs import as_asked
from autopar.planner.record import assignment_of, make_plan, split_as
from autopar.planner.solving import HIDDEN, solve_mesh
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.for_devices import for_devices
from autopar.steps.nodes import Node

# Time limit of the solver on each mesh, and time after which no further mesh is tried,
# in seconds.
MESH_S, ALL_S = 0.6, 1.2
# Time limit of the solver for a further problem of a mesh, in seconds; and the fraction
# of a step that the problem must be able to save to be solved.
REFINE_S, _CLOSE = 0.15, 0.01


def can_be_warm(cluster: Cluster, options: PlanOptions, running: Plan) -> bool:
    """Whether `warm_plan` supports everything that the options ask for.

    `warm_plan` plans only a single stage on equal devices, and does not support the
    option ``layouts``.
    """
    several = options.stages not in (None, 1) or len(running.stages) > 1
    several = several or bool(running.replicas)
    return not (several or cluster.groups or options.layouts is not None)


def warm_plan(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    running: Plan,
    *,
    sent: Plan | None = None,
    errors: Errors | None = None,
) -> Plan:
    """Finds a good plan of a step on a cluster, in a second or two.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      options: hints and limits for which `can_be_warm` is true.
      running: the plan in use for the same step.
      sent: as for `autopar.planner.plan.plan_analysis`.
      errors: as for `autopar.planner.plan.plan_analysis`.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: a pin does not fit, or the batch cannot be split.
    """
    split = _split(analysis, cluster, options, running)
    meshes = _order_meshes(meshes_of(split, cluster, options), running)
    asked = request_of(options, sent, errors)
    codecs = None if asked.mode == "none" else asked
    search = functools.partial(
        _search_in_time, split, cluster, meshes, options, running, codecs
    )
    result = search(asked.gathers)
    if result is not None and not worth_encoding(result.best):
        result = search(None)
    if result is None:  # The full search finds a plan, or reports why there is none.
        return plan_analysis(analysis, cluster, options, sent, errors)
    best = result.best
    check_pinned(options.pins or {}, split, best.assignment, best.pricer.mesh)
    return with_compiler_options(make_plan(split, result, codecs), options, running)


def _split(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, running: Plan
) -> Analysis:
    """Returns the step with the microbatches and rematerialised layers of the options.

    Numbers that the options leave open are taken from the running plan.
    """
    count, remat = options.microbatches, options.remat
    same = count in (None, "auto", running.microbatches)
    if same and remat in (None, "auto"):
        unpadded = msgspec.structs.replace(running, row_multiple=1)
        return for_devices(split_as(analysis, unpadded), cluster.num_devices)
    count = running.microbatches if count in (None, "auto") else options.count
    wanted = dataclasses.replace(options, microbatches=count)
    return as_asked(analysis, wanted, cluster.num_devices)


def _order_meshes(meshes: Sequence[MeshShape], running: Plan) -> list[MeshShape]:
    """Returns the meshes, sorted by similarity to the running plan's mesh."""
    sizes = running.axis_sizes

    def unlike(mesh: MeshShape) -> tuple[bool, int]:
        same = sum(a == b for a, b in zip(mesh.sizes, sizes, strict=False))
        return len(mesh.sizes) != len(sizes), -same

    return sorted(meshes, key=unlike)


def _search_in_time(
    analysis: Analysis,
    cluster: Cluster,
    meshes: Sequence[MeshShape],
    options: PlanOptions,
    running: Plan,
    codecs: CodecRequest | None,
    gathers: GatherRequest | None,
) -> SearchResult | None:
    """The best plan of the meshes that can be tried in time; None without a plan."""
    start = time.perf_counter()
    tried: list[tuple[MeshShape, Candidate | None]] = []
    for mesh in meshes:
        known = any(found is not None for _, found in tried)
        if known and time.perf_counter() - start > ALL_S:
            break
        pricer = Pricer(cluster, mesh, gathers=gathers)
        tried.append((mesh, _on_mesh(analysis, pricer, options, running, codecs)))
    solved = [found for _, found in tried if found is not None]
    if not solved:
        return None
    best = _refine(analysis, solved, options, start, codecs)
    coded = best.sending is not None and best.sending.has_codecs
    every = len(tried) == len(meshes) and not coded
    floor_s = min(c.bound_s for c in solved) if every else 0.0
    spent_s = time.perf_counter() - start
    return SearchResult(best, tuple(tried), spent_s, floor_s=floor_s)


def _refine(
    analysis: Analysis,
    solved: Sequence[Candidate],
    options: PlanOptions,
    start: float,
    codecs: CodecRequest | None,
) -> Candidate:
    """The best plan after further problems, which are solved if they may save enough.

    The first problem of a mesh does not model that several arrays share a message and
    its latency. In a small step, latencies are most of the time, and there is time to
    solve further problems, because they are small.

    Args:
      analysis: the step.
      solved: one plan of each mesh.
      options: hints and limits.
      start: start time of the search, from ``time.perf_counter``.
      codecs: the user's request about codecs; None: no request.
    """
    best = min(solved, key=lambda c: c.step_s)
    few = len(analysis.contraction.nodes) <= FEW_NODES
    for found in sorted(solved, key=lambda c: c.bound_s):
        late = time.perf_counter() - start > ALL_S
        if late or found.bound_s >= (1 - _CLOSE) * best.plain_s:
            break
        limit = _limit(analysis, found.pricer, options)
        with contextlib.suppress(PlanError):
            more = solve_mesh(
                analysis,
                found.pricer,
                limit,
                MESH_S if few else REFINE_S,
                [found],
                codecs,
                weights=None if few else (),
                most_s=best.step_s,
                experts=few,
            )
            if not few:
                more = dataclasses.replace(more, lower_s=found.bound_s)
            best = min(best, more, key=lambda c: c.step_s)
    return best


def _limit(
    analysis: Analysis, pricer: Pricer, options: PlanOptions
) -> Restriction | None:
    """Returns the strategies that pins allow."""
    if not options.pins:
        return None
    pinned = pinned_layouts(analysis, options.pins, pricer.mesh)
    return pin_restriction(analysis, pinned)


def _on_mesh(
    analysis: Analysis,
    pricer: Pricer,
    options: PlanOptions,
    running: Plan,
    codecs: CodecRequest | None,
) -> Candidate | None:
    """Returns a good plan on one mesh, from the running plan's layouts.

    The result is None if time ran out.
    """
    limit = _limit(analysis, pricer, options)
    starts: list[Candidate] = []
    # With another number of microbatches or rows, the program may have other nodes.
    alike = len(running.nodes) == len(analysis.contraction.nodes)
    if alike and len(pricer.sizes) == len(running.axis_sizes):
        with contextlib.suppress(PlanError):
            starts.append(carried_plan(analysis, pricer, running, limit))
    with contextlib.suppress(PlanError):
        return solve_mesh(
            analysis, pricer, limit, MESH_S, starts, codecs, weights=(HIDDEN,)
        )
    return None


def carried_plan(
    analysis: Analysis, pricer: Pricer, running: Plan, limit: Restriction | None
) -> Candidate:
    """The running plan's layouts on a mesh that has the same axes in other sizes.

    A node whose layout does not fit the new mesh is not split.

    Args:
      analysis: the step, in the plan's microbatches.
      pricer: the mesh and cluster.
      running: the plan.
      limit: restriction of the allowed strategies.

    Raises:
      PlanError: the layouts do not fit the memory of a device.
    """
    wanted = assignment_of(analysis, running).strategies

    def same(node: Node, strategy: Strategy) -> bool:
        return strategy == wanted[node.index]

    rule = Within(limit, same)
    found = solve_mesh(analysis, pricer, rule, MESH_S, weights=(HIDDEN,))
    # The solver's bound holds only for plans with these layouts. So 0 is recorded.
    return dataclasses.replace(found, lower_s=0.0)
