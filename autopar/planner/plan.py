"""Plans an analysed step: checks, search of layouts, choice of codecs, record."""

from __future__ import annotations

import dataclasses
import functools
import glob
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

import msgspec
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.codecs.choose import (
    CodecRequest,
    Errors,
    requested,
    sent_as_asked,
)
from autopar.planner.edited import carried_out, check_fits, with_status
from autopar.planner.hints import (
    Pins,
    check_pinned,
    fitting_meshes,
    pin_restriction,
    pinned_layouts,
)
from autopar.planner.manual import meshes_for_manual
from autopar.planner.options import DEFAULTS, PlanOptions
from autopar.planner.problem import Restriction
from autopar.planner.proposals import Proposal, of_program, record
from autopar.planner.rebatch import rebatched
from autopar.planner.record import make_plan, restore, split_as
from autopar.planner.remat import as_asked, fastest, may_gain, wanted
from autopar.planner.replicas import plan_replicas
from autopar.planner.search import candidate_meshes, given, search
from autopar.planner.stages.entry import plan_with_stages, without_stages
from autopar.planner.stages.kept import kept_pipeline
from autopar.plans import Plan
from autopar.plans.schema import Seconds
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_dims
from autopar.steps.microbatches import numbers_of_microbatches

P = ParamSpec("P")


def _with_seconds(
    plan: Callable[Concatenate[Analysis, P], Plan],
) -> Callable[Concatenate[Analysis, P], Plan]:
    """Writes into a plan how long all of its search took."""

    @functools.wraps(plan)
    def timed(analysis: Analysis, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        begin = time.perf_counter()
        found = plan(analysis, *args, **kwargs)
        trace_s, graph_s = analysis.trace_s, analysis.graph_s
        solve_s = time.perf_counter() - begin
        total_s = trace_s + graph_s + solve_s
        spent = Seconds(trace=trace_s, graph=graph_s, solve=solve_s, total=total_s)
        return msgspec.structs.replace(found, seconds=spent)

    return timed


@_with_seconds
def plan_analysis(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions = DEFAULTS,
    sent: Plan | None = None,
    errors: Errors | None = None,
    *,
    advise: bool = True,
) -> Plan:
    """`autopar.plan`, for a step that is already analysed.

    The plan's `Seconds.solve` are those of the whole search.

    Args:
      analysis: the step.
      cluster: what to plan for.
      options: hints and limits.
      sent: a plan whose codecs hold gradient by gradient, where they can be used;
        ``options.compression`` is what layouts are found for then.
      errors: relative errors that were measured while training, by name of the
        gradient and codec; the others are expected ones.
      advise: whether the error, if no plan fits, says a size of memory that is enough.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: a pin does not fit, the batch cannot be split, or Flax's rules were
        not turned into pins (`with_logical_pins`).
    """
    if options.logical_axis_rules:
        raise PlanError(
            "plan_analysis: logical_axis_rules need the step's arguments; turn them "
            "into pins with with_logical_pins(options, call)."
        )
    kept = options.layouts
    if kept is not None and len(kept.stages) > 1:
        _check_no_remat(options, kept)
        asked = requested(options, sent, errors)
        return kept_pipeline(analysis, cluster, options, kept, asked)
    if isinstance(options.microbatches, tuple) and not cluster.groups:
        raise PlanError(
            f"microbatches={list(options.microbatches)} are those of replicas of "
            f"unequal devices, and {cluster} has equal ones. Give one number."
        )
    if cluster.groups and options.stages in (None, 1):
        return plan_replicas(analysis, cluster, options)
    if options.stages not in (None, 1):
        return _in_stages(analysis, cluster, options, requested(options, sent, errors))
    if options.microbatches == "auto":
        return _fastest_split(analysis, cluster, options, sent, errors, advise=advise)
    if options.remat == "auto" and options.layouts is None:

        def plan(on: Cluster, asked: PlanOptions, advise: bool) -> Plan:
            return plan_analysis(analysis, on, asked, sent, errors, advise=advise)

        return fastest(analysis, cluster, options, plan, advise=advise)
    program = _program_text(options)
    analysis = _split(analysis, options)
    names, pins = options.axis_names, options.pins or {}
    codecs = requested(options, sent, errors)
    layouts, seconds = options.layouts, options.seconds
    if layouts is not None:
        _check_axes_of(layouts, options)
        return _with_layouts(analysis, cluster, layouts, pins, codecs, seconds)
    meshes = candidate_meshes(cluster, options.max_axes, names)
    meshes = meshes_for_manual(analysis, cluster, meshes)
    if pins:
        meshes = fitting_meshes(analysis, pins, meshes)
    if options.split_batch:
        check_batch(analysis, cluster, meshes)
    with of_program(program):
        return _searched(
            analysis, cluster, meshes, pins, codecs, seconds, advise=advise
        )


def _program_text(options: PlanOptions) -> str:
    """What a program computes again, and in how many microbatches; '' for neither."""
    parts: list[str] = []
    if options.microbatches not in (None, 1):
        parts.append(f"{options.microbatches} microbatches")
    if options.remat not in (None, 0, "0", "auto"):
        parts.append(f"remat {options.remat}")
    return ", ".join(parts)


def _check_no_remat(options: PlanOptions, kept: Plan) -> None:
    """Checks that nothing is said of what a plan of several stages computes again."""
    if options.remat not in (None, "auto"):
        raise PlanError(
            f"remat={options.remat!r} is for plans of one stage, and the plan given as "
            f"layouts= has {len(kept.stages)}; leave remat out."
        )


def _in_stages(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, codecs: CodecRequest
) -> Plan:
    """A pipeline, or where that is as fast, a plan without stages.

    Raises:
      InfeasibleError: neither fits.
      PlanError: the step cannot be cut or split as is asked for.
    """
    if isinstance(options.stages, int):
        found = plan_with_stages(analysis, cluster, options, None, codecs)
        assert found is not None
        return found
    other, failed = _beside_stages(analysis, cluster, options, codecs)
    begin = time.thread_time()
    try:
        staged = plan_with_stages(analysis, cluster, options, other, codecs)
        _record_stages(staged, time.thread_time() - begin)
        found = staged or other
    except PlanError as error:
        if other is not None:
            say(f"planning without stages only: {error}")
            return other
        if isinstance(error, InfeasibleError) and isinstance(failed, InfeasibleError):
            raise failed from error
        raise
    if found is not None:
        return found
    assert failed is not None
    if not cluster.groups:
        raise failed
    raise PlanError(
        f"one kind of devices alone trains fastest on {cluster}: plan for a part of "
        "it, cluster.groups[0] and so on."
    ) from failed


def _record_stages(found: Plan | None, cpu_s: float) -> None:
    """Says what stages come to, where proposals are recorded."""
    if found is None:
        record(Proposal("stages", "", note="one stage is as fast", cpu_s=cpu_s))
        return
    expected = found.predicted
    name = f"{len(found.stages)} stages, {found.microbatches} microbatches"
    made = expected.step_s, expected.peak_memory_bytes
    record(Proposal(name, "", *made, cpu_s=cpu_s))


def _beside_stages(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, codecs: CodecRequest
) -> tuple[Plan | None, PlanError | None]:
    """The plan that pipelines are compared with, or why there is none.

    It has one stage; on groups of unequal devices it has replicas.

    Raises:
      PlanError: the step cannot be planned, with equal devices.
    """
    if not cluster.groups:
        alone = without_stages(options)
        sent, errors = codecs.sent, codecs.errors
        try:
            return plan_analysis(analysis, cluster, alone, sent, errors), None
        except InfeasibleError as error:
            return None, error
    alone = dataclasses.replace(options, stages=None, schedule=None, remat=None)
    try:
        return plan_replicas(analysis, cluster, alone), None
    except PlanError as error:
        say(f"planning stages only: {error}")
        return None, error


def _split(analysis: Analysis, options: PlanOptions) -> Analysis:
    """The step, split into microbatches and computing again as is asked for.

    Raises:
      PlanError: it cannot be rewritten so, or the layouts are for another program.
    """
    kept, asked = options.layouts, options.microbatches
    if kept is None:
        return as_asked(analysis, options)
    if asked not in (None, kept.microbatches):
        raise PlanError(
            f"microbatches={asked}: the plan given as layouts= has "
            f"{kept.microbatches}; leave microbatches out."
        )
    if options.remat not in (None, "auto"):
        whole = dataclasses.replace(options, microbatches=kept.microbatches)
        said, has = wanted(analysis, whole), kept.remat
        if (said.layers, said.level, said.checkpoints) != (
            has.layers,
            has.level,
            has.checkpoints,
        ):
            raise PlanError(
                f"remat={options.remat!r}: the plan given as layouts= computes other "
                "layers again; leave remat out."
            )
    return split_as(analysis, kept)


def _fastest_split(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    sent: Plan | None,
    errors: Errors | None,
    *,
    advise: bool,
) -> Plan:
    """The plan with the number of microbatches that is fastest of what fits.

    It tries 1, 2, 4 ... until more of them are slower.

    Raises:
      InfeasibleError: none fits; that of the most microbatches.
      PlanError: the batch cannot be split, and does not fit as a whole.
    """
    if options.layouts is not None:
        return plan_analysis(
            analysis, cluster, dataclasses.replace(options, microbatches=None), sent
        )
    best: Plan | None = None
    failed: PlanOptions | None = None
    for count in numbers_of_microbatches(analysis):
        if best is not None and not may_gain(analysis, cluster, options, best, count):
            break
        asked = dataclasses.replace(options, microbatches=count)
        try:
            found = plan_analysis(analysis, cluster, asked, sent, errors, advise=False)
        except InfeasibleError:
            failed = asked
            continue
        except PlanError as error:
            # More microbatches do not divide the rows either, nor keep the meaning.
            if best is not None:
                break
            if failed is None:
                raise
            say(f"the batch is split no further: {error}")
            break
        if best is not None and found.predicted.step_s >= best.predicted.step_s:
            break
        best = found
    if best is not None:
        return best
    assert failed is not None
    return plan_analysis(analysis, cluster, failed, sent, errors, advise=advise)


def plan_beside(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    running: Plan,
    sent: Plan | None = None,
) -> Plan:
    """A plan for another batch, under which the state of a running plan stays put.

    It has the running plan's layouts where the axes divide the batch. Where they do
    not, the state keeps its layouts, pinned ones among them, and the batch is split as
    far as it can be.

    Args:
      analysis: the step with the other batch.
      cluster: that of the running plan.
      options: hints and limits; those of the running plan.
      running: the plan of the step with its usual batch.
      sent: as for `plan_analysis`.

    Raises:
      InfeasibleError: the batch does not fit the memory of a device like this.
      PlanError: the running plan's mesh is none that the cluster has.
    """
    if running.replicas:
        return _replicas_beside(analysis, cluster, options, running)
    try:
        kept = dataclasses.replace(options, layouts=running, microbatches=None)
        return plan_analysis(analysis, cluster, kept, sent)
    except PlanError:
        meshes = [
            mesh
            for mesh in candidate_meshes(cluster, options.max_axes, running.axis_names)
            if mesh.sizes == running.axis_sizes
        ]
        if not meshes:
            raise
    pins = _state_pins(analysis, running)
    codecs = requested(options, sent)
    return _searched(analysis, cluster, meshes, pins, codecs, options.seconds)


def _replicas_beside(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, running: Plan
) -> Plan:
    """`plan_beside`, on replicas of unequal devices.

    Raises:
      InfeasibleError: the batch does not fit the memory of a device.
      PlanError: it cannot be dealt out, or only on another mesh.
    """
    kept = dataclasses.replace(
        options,
        pins=_state_pins(analysis, running),
        axis_names=running.axis_names[1:],
        microbatches="auto",
        layouts=None,
    )
    found = plan_replicas(analysis, cluster, kept)
    if found.axis_sizes != running.axis_sizes:
        raise PlanError(
            "a batch of this size is planned on another mesh than the running one; "
            "fill it up, or leave it out."
        )
    return found


def _state_pins(analysis: Analysis, plan: Plan) -> dict[str, PartitionSpec]:
    """Pins of the carried inputs to where a plan has them."""
    return {
        glob.escape(given.path): PartitionSpec(
            *(axes or None for axes in plan.inputs[given.path])
        )
        for given in analysis.graph.inputs
        if given.output >= 0
    }


def _check_axes_of(layouts: Plan, options: PlanOptions) -> None:
    """Checks that what is said about mesh axes holds for the layouts to keep."""
    kept, names = layouts.axis_names, options.axis_names
    said = {
        f"axis_names={tuple(names or ())}": names is not None and tuple(names) != kept,
        f"max_axes={options.max_axes}": (options.max_axes or len(kept)) < len(kept),
    }
    if wrong := [text for text, contradicts in said.items() if contradicts]:
        raise PlanError(
            f"{wrong[0]}: the plan given as layouts= has the mesh axes "
            f"{', '.join(kept)}; leave {wrong[0].partition('=')[0]} out."
        )


def _searched(
    analysis: Analysis,
    cluster: Cluster,
    meshes: Sequence[MeshShape],
    pins: Pins,
    codecs: CodecRequest,
    seconds: float | None,
    *,
    advise: bool = True,
) -> Plan:
    """The fastest layouts, with codecs where they are asked for."""

    def restrict(pricer: Pricer) -> Restriction:
        return pin_restriction(analysis, pinned_layouts(analysis, pins, pricer.mesh))

    asked = None if codecs.mode == "none" else codecs
    result = search(
        analysis,
        cluster,
        meshes=meshes,
        seconds=seconds,
        restriction=restrict if pins else None,
        advise=advise,
        codecs=asked,
    )
    check_pinned(pins, analysis, result.best.assignment, result.best.pricer.mesh)
    return make_plan(analysis, result, asked)


def _with_layouts(
    analysis: Analysis,
    cluster: Cluster,
    layouts: Plan,
    pins: Pins,
    codecs: CodecRequest,
    seconds: float | None,
) -> Plan:
    """The layouts of a plan, of another batch perhaps, and codecs chosen for them."""
    started = time.perf_counter()
    kept = carried_out(analysis, rebatched(analysis, layouts), cluster, seconds=seconds)
    result = given(analysis, cluster, restore(analysis, kept), kept.axis_names)
    best = result.best
    check_fits(best)
    check_pinned(pins, analysis, best.assignment, best.pricer.mesh)
    asked = None if codecs.mode == "none" else codecs
    if asked is not None:
        best = sent_as_asked(analysis, best, asked)
        spent_s = time.perf_counter() - started
        result = dataclasses.replace(result, best=best, seconds=spent_s)
    made = make_plan(analysis, result, asked)
    return with_status(made, kept.solver.status) if layouts.edited else made


def check_batch(
    analysis: Analysis, cluster: Cluster, meshes: Sequence[MeshShape]
) -> None:
    """Raises `PlanError` where no mesh axis divides the rows of the batch."""
    graph, parts = analysis.graph, analysis.microbatches
    leading = {
        graph.inputs[k].path: graph.values[graph.inputs[k].value].shape[dim] // parts
        for k, dim in batch_dims(graph).items()
    }
    sizes = sorted({size for m in meshes for size in m.sizes if size > 1})
    if not leading or not sizes:
        return
    if any(n % size == 0 for n in leading.values() for size in sizes):
        return
    path, n = next(iter(leading.items()))
    up = cluster.num_devices
    raise PlanError(
        f"the batch cannot be split: the number of its rows is {n} ('{path}'"
        f"{', in each microbatch' if parts > 1 else ''}), and no "
        f"mesh axis of {cluster} ({', '.join(map(str, sizes))}) divides it.\n"
        f"  try: a batch of {-(-n // up) * up * parts}, or split_batch=False "
        "to plan without data parallelism. With last_batch='run', such a batch runs "
        "after one that can be split."
    )
