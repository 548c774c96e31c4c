"""Plans an analysed step: checks, search of layouts, choice of codecs, record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import msgspec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.planner.candidate import SearchResult
from autopar.planner.codecs.choose import (
    CodecChoice,
    choose,
    described,
    gradient_decisions,
    joint,
    joint_uniform,
    uniform,
)
from autopar.planner.codecs.options import budget_of, parsed
from autopar.planner.hints import (
    Pins,
    check_pinned,
    fitting_meshes,
    pin_restriction,
    pinned_layouts,
)
from autopar.planner.problem import Restriction
from autopar.planner.record import make_plan, restore
from autopar.planner.search import candidate_meshes, given, search
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar_passes.graph.roles import InputRole

# Most plans are proved optimal in a tenth of this; with very tight memory the
# solver would go on for minutes to close the last percent.
SOLVER_SECONDS = 10.0


def plan_analysis(
    analysis: Analysis,
    cluster: Cluster,
    *,
    pins: Pins | None = None,
    axis_names: Sequence[str] | None = None,
    max_axes: int | None = None,
    seconds: float | None = SOLVER_SECONDS,
    split_batch: bool = True,
    compression: str = "none",
    error_budget: float | None = None,
    layouts: Plan | None = None,
) -> Plan:
    """`plan`, for a step that is already analysed."""
    started = time.perf_counter()
    codec = parsed(compression)
    budget = budget_of(error_budget, compression)
    meshes = candidate_meshes(cluster, max_axes, axis_names)
    if pins:
        meshes = fitting_meshes(analysis, pins, meshes)
    if split_batch:
        check_batch(analysis, cluster, meshes)

    def restrict(pricer: Pricer) -> Restriction:
        layouts = pinned_layouts(analysis, pins or {}, pricer.mesh)
        return pin_restriction(analysis, layouts)

    if layouts is not None:
        kept = restore(analysis, layouts)
        result = given(analysis, cluster, kept, layouts.axis_names)
    else:
        result = search(
            analysis,
            cluster,
            meshes=meshes,
            seconds=seconds,
            restriction=restrict if pins else None,
        )
    if pins:
        check_pinned(pins, analysis, result.best.assignment, result.best.pricer.mesh)
    made = make_plan(analysis, result)
    if compression == "none":
        return made
    restriction = restrict if pins else None
    if codec is not None and layouts is not None:
        choice = first = uniform(analysis, result.best, codec)
    elif codec is not None:
        choice, first = joint_uniform(
            analysis, result, codec, seconds=seconds, restriction=restriction
        )
    elif layouts is not None:
        choice = first = choose(analysis, result.best, budget, {})
    else:
        choice, first = joint(
            analysis,
            result,
            budget=budget,
            errors={},
            seconds=seconds,
            restriction=restriction,
        )
    result = dataclasses.replace(result, seconds=time.perf_counter() - started)
    return with_choice(analysis, result, choice, first, compression, budget)


def with_choice(
    analysis: Analysis,
    result: SearchResult,
    choice: CodecChoice,
    first: CodecChoice,
    mode: str,
    budget: float,
) -> Plan:
    """The plan of a choice of codecs."""
    found = dataclasses.replace(result, best=choice.candidate)
    plan = make_plan(analysis, found)
    gradients = gradient_decisions(choice)
    coded = [g for g in gradients if g.codec]
    sent = choice.other_bytes + sum(g.wire_bytes + g.within_bytes for g in coded)
    predicted = msgspec.structs.replace(
        plan.predicted,
        step_s=choice.step_s,
        communication_s=plan.predicted.communication_s - choice.saved_s,
        communication_bytes=sent,
        peak_memory_bytes=plan.predicted.peak_memory_bytes + choice.memory_bytes,
    )
    return msgspec.structs.replace(
        plan,
        predicted=predicted,
        gradients=gradients,
        compression=described(analysis, choice, first, mode, budget),
    )


def check_batch(
    analysis: Analysis, cluster: Cluster, meshes: Sequence[MeshShape]
) -> None:
    """Raises `PlanError` where no mesh axis divides the leading batch dimension."""
    shapes = {
        i.path: analysis.graph.values[i.value].shape
        for i in analysis.graph.inputs
        if i.role is InputRole.BATCH
    }
    leading = {path: s[0] for path, s in shapes.items() if s and s[0] > 1}
    sizes = sorted({size for m in meshes for size in m.sizes if size > 1})
    if not leading or not sizes:
        return
    if any(n % size == 0 for n in leading.values() for size in sizes):
        return
    path, n = next(iter(leading.items()))
    up = cluster.num_devices
    raise PlanError(
        f"the batch cannot be split: its leading dimension is {n} ('{path}'), and no "
        f"mesh axis of {cluster} ({', '.join(map(str, sizes))}) divides it.\n"
        f"  try: a batch of {-(-n // up) * up}, or split_batch=False to plan without "
        "data parallelism."
    )
