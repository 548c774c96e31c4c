"""Finds the best plan for each other layout that an input of a plan could have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, shards, to_spec
from autopar.layouts.strategies import layout_of
from autopar.planner.candidate import Candidate, candidate_of, choices_of
from autopar.planner.hints import pin_restriction
from autopar.planner.problem import Formulation, Restriction, formulate
from autopar.planner.record import assignment_of
from autopar.planner.replicas import one_replica, price_replica, sites_of, slowest_of
from autopar.planner.search import plan_mesh, search_of_one
from autopar.planner.solving import solve_mesh
from autopar.planner.stages.kept import kept_wanted, stated_layouts
from autopar.planner.stages.stage_search import has_equal_pieces, layouts_like
from autopar.planner.stages.staged import price_pipeline, rooms_left
from autopar.plans import Spec
from autopar.plans.specs import spec_text
from autopar.reports.explain import BoundPlan, LayoutDecision
from autopar.reports.staged import BoundStages
from autopar.steps.analysis import Analysis
from autopar.steps.microbatches import with_turns
from autopar_passes.graph.operators import GraphInput
from autopar_passes.layer_loops.split import whole_path
from autopar_solver import Solution, Status

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Trials:
    """A stage or a replica of a plan, for which other layouts are tried.

    Attributes:
      analysis: the program of the stage.
      pricer: the stage's mesh and devices. The memory of these devices is set to the
        memory that one microbatch may take.
      assignment: the layouts of the plan, without codecs.
      step_s: seconds of a step of the whole plan without codecs.
      judge: a function of other layouts of the stage. It returns the seconds of a step
        of the whole plan with these layouts, and the most bytes on a device. Both are
        infinite if the layouts do not fit.
      proves: whether the layouts that are fastest for the stage are also those of the
        fastest whole plan.
    """

    analysis: Analysis
    pricer: Pricer
    assignment: Assignment
    step_s: float
    judge: Callable[[Candidate], tuple[float, float]]
    proves: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """Another layout of an input, and the best plan that has this layout.

    Attributes:
      spec: the layout.
      step_s: predicted seconds of one step; infinite if no plan fits.
      shard_bytes: bytes of an array's shard on one device.
      peak_memory_bytes: peak memory of one device.
      proved: whether the solver proved that no plan with this layout is faster.
    """

    spec: Spec
    step_s: float
    shard_bytes: float
    peak_memory_bytes: float
    proved: bool


def trials_of(bound: BoundPlan, cluster: Cluster) -> Trials:
    """Returns what is needed to try other layouts of a plan of one stage.

    Args:
      bound: the plan; for a plan with replicas, its slowest replica.
      cluster: the cluster of the plan.
    """
    plan = bound.plan
    if plan.replicas:
        return _replica_trials(bound, cluster)
    step_s = plan.predicted.step_s
    if any(g.codec for g in plan.gradients):
        names = plan.axis_names
        found = search_of_one(bound.analysis, cluster, bound.assignment, names)
        step_s = found.best.step_s

    def judge(found: Candidate) -> tuple[float, float]:
        return found.step_s, found.peak_memory_bytes

    return Trials(bound.analysis, bound.pricer, bound.assignment, step_s, judge, True)


def _replica_trials(bound: BoundPlan, cluster: Cluster) -> Trials:
    """As `trials_of`, for one replica; all replicas have the same layouts."""
    plan, sites = bound.plan, sites_of(cluster)
    base = bound.analysis.counted
    assert base is not None
    views = [with_turns(base, replica.microbatches) for replica in plan.replicas]
    part, alone = sites[slowest_of(plan)].part, one_replica(plan)

    def judge(found: Candidate) -> tuple[float, float]:
        every = [
            (price_replica(view, found, site), site.part.memory_bytes)
            for view, site in zip(views, sites, strict=True)
        ]
        if any(c.peak_memory_bytes > limit for c, limit in every):
            return math.inf, math.inf
        held = max(c.peak_memory_bytes for c, _ in every)
        return max(c.step_s for c, _ in every), held

    analysis = dataclasses.replace(bound.analysis, turns=None)
    pricer = Pricer(part, plan_mesh(part, alone.axis_names, alone.axis_sizes))
    assignment, step_s = assignment_of(analysis, alone), plan.predicted.step_s
    if any(g.codec for g in plan.gradients):
        found = search_of_one(analysis, part, assignment, alone.axis_names)
        step_s, _ = judge(found.best)
    return Trials(analysis, pricer, assignment, step_s, judge)


def stage_trials(bound: BoundStages, cluster: Cluster, seconds: float) -> list[Trials]:
    """Returns what is needed to try other layouts, for each stage of a pipeline.

    Args:
      bound: the plan.
      cluster: all devices.
      seconds: time limit of the solver for stages that share pieces of an array.
    """
    cut, plan = bound.cut, bound.plan
    wanted = kept_wanted(plan, cluster)
    numbers = range(len(plan.stages))
    stated = [stated_layouts(cut, plan, k, wanted) for k in numbers]
    step_s, _ = price_pipeline(cut, cluster, wanted, stated)
    pricers: list[Pricer] = []
    for room, found in zip(
        rooms_left(cut, cluster, wanted, stated), stated, strict=True
    ):
        on = found.pricer.cluster
        device = dataclasses.replace(on.device, memory_bytes=room)
        limited = dataclasses.replace(on, device=device)
        pricers.append(dataclasses.replace(found.pricer, cluster=limited))

    def beside(number: int, found: Candidate) -> Candidate | None:
        """The best layouts of another stage that agree with ``found``.

        The two stages hold pieces of the same arrays, which must have equal layouts.
        """
        analysis, own = cut.stages[number], stated[number]
        lies = layouts_like(analysis, found)
        if all(own.assignment.home_layout(v) == want for v, want in lies.items()):
            return own
        return _solve(
            analysis, pricers[number], pin_restriction(analysis, lies), seconds
        )

    def judge_stage(stage: int, found: Candidate) -> tuple[float, float]:
        if not has_equal_pieces(cut.stages[stage], found):
            return math.inf, math.inf
        every = [found if k == stage else beside(k, found) for k in numbers]
        made = [c for c in every if c is not None]
        if len(made) < len(every):
            return math.inf, math.inf
        found_s, memory = price_pipeline(cut, cluster, wanted, made)
        limits = [site.cluster.device.memory_bytes for site in wanted.sites]
        fits = all(n <= limit for n, limit in zip(memory, limits, strict=True))
        return (found_s, max(memory)) if fits else (math.inf, math.inf)

    return [
        Trials(
            cut.stages[k],
            pricers[k],
            stated[k].assignment,
            step_s,
            functools.partial(judge_stage, k),
        )
        for k in numbers
    ]


def alternatives(
    trials: Trials, decision: LayoutDecision, *, limit: int, seconds: float, say: Say
) -> list[Alternative]:
    """Finds the best plan with each of the most promising other layouts of an input.

    A layout is promising if the plan gets little slower when only this layout changes.

    Args:
      trials: the stage of the input.
      decision: the decision on the input's layout.
      limit: number of layouts to try.
      seconds: time limit of the solver for each layout.
      say: shows progress.
    """
    if decision.node is None:
        return []
    formulation = formulate(trials.analysis, trials.pricer)
    chosen = plan_choices(trials.assignment, formulation)
    found: list[Alternative] = []
    for strategy, layout in _promising(trials, decision, formulation, chosen)[:limit]:
        spec = to_spec(layout, trials.pricer.mesh.names)
        say(f"{decision.inputs[0].path}: planning again with {spec_text(spec)}")
        patched = list(chosen)
        patched[decision.node] = strategy
        pinned = _pieces(trials.analysis, decision.inputs[0])
        restriction = pin_restriction(trials.analysis, dict.fromkeys(pinned, layout))
        tried = (
            _solve(trials.analysis, trials.pricer, restriction, seconds),
            _evaluate(trials, formulation, tuple(patched)),
        )
        shard_bytes = decision.nbytes / shards(layout, trials.pricer.sizes)
        found.append(_fastest(trials, spec, shard_bytes, tried))
    return sorted(found, key=lambda a: a.step_s)


def _pieces(analysis: Analysis, given: GraphInput) -> list[int]:
    """The values of an input and of the other pieces of the same array."""
    whole = whole_path(given.path)
    if not whole:
        return [given.value]
    return [i.value for i in analysis.graph.inputs if whole_path(i.path) == whole]


def _promising(
    trials: Trials,
    decision: LayoutDecision,
    formulation: Formulation,
    chosen: Sequence[int],
) -> list[tuple[int, Layout]]:
    """A strategy for each other layout of an input, the cheapest first."""
    value = decision.inputs[0].value
    home = trials.analysis.contraction.homes[value]
    strategies = formulation.spaces[home.node].strategies
    alone = _costs_alone(formulation, chosen, home.node)
    found: dict[Layout, int] = {}
    for k in sorted(range(len(strategies)), key=lambda k: (alone[k], k)):
        found.setdefault(layout_of(strategies[k], home.dims), k)
    found.pop(trials.assignment.home_layout(value), None)
    return [(k, layout) for layout, k in found.items()]


def _fastest(
    trials: Trials, spec: Spec, shard_bytes: float, tried: Sequence[Candidate | None]
) -> Alternative:
    """The fastest plan with a layout, of those that fit."""
    judged = [(*trials.judge(c), c) for c in tried if c is not None]
    step_s, held, best = min(
        judged, key=lambda found: found[0], default=(math.inf, math.inf, None)
    )
    proved = best is not None and best.report.status is Status.OPTIMAL
    return Alternative(spec, step_s, shard_bytes, held, proved and trials.proves)


def _solve(
    analysis: Analysis, pricer: Pricer, restriction: Restriction, seconds: float
) -> Candidate | None:
    """The best plan under a restriction; None if no plan fits or is found."""
    try:
        return solve_mesh(analysis, pricer, restriction, seconds)
    except PlanError:
        return None


def _evaluate(
    trials: Trials, formulation: Formulation, choices: tuple[int, ...]
) -> Candidate | None:
    """Prices the plan with one changed choice; None if it is infeasible."""
    cost = _cost(formulation, choices)
    if not math.isfinite(cost):
        return None
    solution = Solution(
        choices=choices, cost=cost, bound=-math.inf, status=Status.FEASIBLE, seconds=0.0
    )
    made = candidate_of(trials.analysis, formulation, solution, trials.assignment)
    fits = made.peak_memory_bytes <= trials.pricer.cluster.memory_bytes
    return made if fits else None


def _cost(formulation: Formulation, choices: Sequence[int]) -> float:
    """The objective value of choices."""
    problem = formulation.problem
    nodes = (costs[choices[i]] for i, costs in enumerate(problem.node_costs))
    edges = zip(problem.edges, problem.edge_costs, strict=True)
    return float(sum(nodes) + sum(c[choices[i], choices[j]] for (i, j), c in edges))


def _costs_alone(
    formulation: Formulation, chosen: Sequence[int], node: int
) -> list[float]:
    """The cost of each strategy of a node, with unchanged choices of its neighbours."""
    problem = formulation.problem
    total = problem.node_costs[node].astype(float)
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if i == node and j == node:
            total = total + costs.diagonal()
        elif i == node:
            total = total + costs[:, chosen[j]]
        elif j == node:
            total = total + costs[chosen[i]]
    return [float(cost) for cost in total]


def plan_choices(assignment: Assignment, formulation: Formulation) -> tuple[int, ...]:
    """Returns, for each node of the solver's problem, the index of the plan's strategy.

    The nodes are those of the program, and then the copies.

    Raises:
      PlanError: the plan holds a layout that the planner does not consider.
    """
    found = choices_of(formulation, assignment)
    if found is None:
        raise PlanError(
            "the plan holds a layout that the planner does not consider; make the "
            "plan again to compare it with others."
        )
    return tuple(found)
