"""Plans an analysed step: checks the options, searches layouts, chooses codecs and
records the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import math
import time
from collections.abc import Mapping, Sequence

import msgspec
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.cost.work import least_work_s
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.codecs.choose import (
    CodecRequest,
    Errors,
    request_of,
    sent_as_asked,
    worth_encoding,
)
from autopar.planner.codecs.gathers import why_none, with_exact_gathers
from autopar.planner.deadline import (
    OutOfTimeError,
    deadline,
    is_over,
    leave_untried,
    new_search,
)
from autopar.planner.deciding import decide
from autopar.planner.edited import carried_out, check_fits, with_status
from autopar.planner.hints import (
    Pins,
    check_pinned,
    fitting_meshes,
    pin_restriction,
    pinned_layouts,
)
from autopar.planner.idle_devices import (
    UnsplitBatchError,
    padded_part,
    part_to_try,
    plan_best,
    plan_with_padding,
    rewrites,
    rows_by_path,
)
from autopar.planner.options import (
    DEFAULTS,
    PlanOptions,
    of_one_stage,
    with_compiler_options,
)
from autopar.planner.problem import Restriction
from autopar.planner.programs import NEAR, Planned, Unfit, remat_wanted
from autopar.planner.recipes import has_context
from autopar.planner.record import (
    another_step,
    make_plan,
    only_batch_differs,
    restore,
    split_as,
)
from autopar.planner.replicas import in_layouts_of, plan_replicas
from autopar.planner.search import (
    SearchResult,
    candidate_meshes,
    meshes_for_manual,
    search,
    search_of_one,
)
from autopar.planner.solving import HIDDEN
from autopar.planner.stages.kept import (
    kept_pipeline,
    layouts_in_stages,
    pipeline_beside,
)
from autopar.planner.weights import Weights
from autopar.plans import NodeDecision, Plan, StagePlan
from autopar.plans.files import checks_of
from autopar.plans.schema import Seconds
from autopar.plans.specs import check_divides, spec_of
from autopar.steps.analysis import Analysis
from autopar.steps.for_devices import (
    for_devices,
    why_scores_are_kept,
)
from autopar.steps.offload import asked_state


def rebatch_plan(analysis: Analysis, plan: Plan) -> Plan:
    """Returns a plan with the shapes of a step that differs only in its batch size.

    The layouts and the marks of edits stay the same. The costs at the new batch size
    are not computed.

    Raises:
      PlanError: the step has another structure, or an axis does not divide a size.
    """
    analysis = split_as(analysis, plan)
    if plan.fingerprint == analysis.fingerprint:
        return plan
    values = analysis.graph.values
    shapes = {i.path: tuple(values[i.value].shape) for i in analysis.graph.inputs}
    stage = plan.stage
    if only_batch_differs(analysis, plan):
        _check_inputs(stage, plan.shapes, shapes)
    if plan.structure != analysis.structure:
        raise another_step(analysis, plan)
    _check_copies(analysis, stage)
    edited = plan.changed_parts
    made = msgspec.structs.replace(
        plan.with_stage(nodes=_nodes(analysis, stage)),
        shapes=shapes,
        fingerprint=analysis.fingerprint,
    )
    kept = {part: plan.checks[part] for part in edited if part in plan.checks}
    return msgspec.structs.replace(made, checks=checks_of(made, made.stages) | kept)


def _check_inputs(
    stage: StagePlan,
    before: Mapping[str, Sequence[int]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for path, shape in shapes.items():
        was = "x".join(map(str, before.get(path, ())))
        owner = f"the plan's layouts do not carry over: input '{path}' (was {was})"
        spec_of(stage.inputs[path], shape, stage.mesh["axes"], owner)


def _nodes(analysis: Analysis, stage: StagePlan) -> tuple[NodeDecision, ...]:
    axes = stage.mesh["axes"]
    made: list[NodeDecision] = []
    for node, decision in zip(analysis.contraction.nodes, stage.nodes, strict=True):
        factors = tuple(size for size, _ in node.factors)
        owner = f"the plan's layouts do not carry over: '{decision.name}'"
        for size, names in zip(factors, decision.axes, strict=True):
            check_divides(size, names, axes, owner)
        made.append(msgspec.structs.replace(decision, factors=factors))
    return tuple(made)


def _check_copies(analysis: Analysis, stage: StagePlan) -> None:
    for copy in stage.copies:
        source = analysis.sources[copy.producer, copy.slot]
        shape = analysis.graph.values[source.example].shape
        owner = f"the plan's layouts do not carry over: a copy of '{copy.name}'"
        spec_of(copy.axes, shape, stage.mesh["axes"], owner)


def plan_analysis(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions = DEFAULTS,
    sent: Plan | None = None,
    errors: Errors | None = None,
    *,
    advise: bool = True,
    unfit: Unfit | None = None,
) -> Plan:
    """Plans a step that is already analysed; `autopar.plan` describes the result.

    The plan's `Seconds.solve` is the duration of the whole search.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      options: hints and limits.
      sent: a plan; each gradient uses the codec that it has there, if possible. The
        search of layouts then assumes ``options.compression``.
      errors: relative errors that were measured while training, by name of the gradient
        and codec. For all others the expected error is used.
      advise: if no plan fits, whether the error states a memory size that is enough.
      unfit: as for `autopar.planner.deciding.decide`.

    Raises:
      InfeasibleError: no plan fits the memory of a device.
      PlanError: a pin does not fit, the batch cannot be split, or Flax's rules were
        not turned into pins (`with_logical_pins`).
    """
    begin = time.perf_counter()
    with deadline(options.planning_seconds), new_search() as untried:
        found = _plan(analysis, cluster, options, sent, errors, advise, unfit)
        if left_out := untried():
            ended = f"planning ended by planning_seconds={options.planning_seconds:g}"
            found = with_status(found, f"{ended}; {found.solver.status}")
            said = *found.decided, f"{ended}, not tried: {left_out}"
            found = msgspec.structs.replace(found, decided=said)
    solve_s = time.perf_counter() - begin
    trace_s, graph_s = analysis.trace_s, analysis.graph_s
    total_s = trace_s + graph_s + solve_s
    spent = Seconds(trace=trace_s, graph=graph_s, solve=solve_s, total=total_s)
    found = msgspec.structs.replace(found, seconds=spent)
    return with_compiler_options(found, options, options.layouts)


def _plan(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    sent: Plan | None,
    errors: Errors | None,
    advise: bool,
    unfit: Unfit | None,
) -> Plan:
    """As `plan_analysis`, without what it records about the whole search."""
    if options.logical_axis_rules:
        raise PlanError(
            "plan_analysis: logical_axis_rules need the step's arguments; turn them "
            "into pins with with_logical_pins(options, call)."
        )
    kept = options.layouts
    if kept is not None and len(kept.stages) > 1:
        _check_no_remat(options, kept)
        asked = request_of(options, sent, errors)
        held = carried_out(analysis, kept, cluster, seconds=options.seconds)
        made = kept_pipeline(analysis, cluster, options, held, asked)
        return with_status(made, held.solver.status) if kept.changed_parts else made
    if isinstance(options.microbatches, tuple) and not cluster.groups:
        raise PlanError(
            f"microbatches={list(options.microbatches)} are those of replicas of "
            f"unequal devices, and {cluster} has equal ones. Give one number."
        )
    if cluster.groups and options.gather_codecs not in ("none", "auto"):
        raise PlanError(
            f"gather_codecs={options.gather_codecs!r}: replicas on groups of unequal "
            f"devices, as of {cluster}, gather parameters as they are. Leave "
            "gather_codecs out."
        )
    codecs = request_of(options, sent, errors)
    if kept is not None:
        return _with_layouts(analysis, cluster, kept, options, codecs)

    def plan(
        program: Analysis,
        on: Cluster,
        asked: PlanOptions,
        untried: Sequence[str] | None = None,
        *,
        quick: bool = False,
        most_s: float = math.inf,
        meshes: Sequence[MeshShape] = (),
    ) -> Planned:
        programs = rewrites(program, on, names_codecs=codecs.names_codecs)
        return _search_layouts(
            programs,
            on,
            meshes or meshes_of(programs[-1], on, asked),
            asked.pins or {},
            codecs,
            asked.seconds,
            untried=untried,
            weights=(HIDDEN,) if quick else None,
            most_s=most_s,
        )

    def search(on: Cluster) -> Plan:
        return decide(analysis, on, options, plan, codecs, advise=advise, unfit=unfit)

    part = part_to_try(analysis, cluster, options)
    if part is None:
        return search(cluster)
    one_stage = of_one_stage(options, schedule=None)

    def search_padded(on: Cluster) -> Plan:
        return plan_with_padding(
            analysis,
            on.num_devices,
            lambda step: decide(step, on, one_stage, plan, codecs, advise=False),
        )

    few = padded_part(analysis, cluster, part, options)
    return plan_best(cluster, part, search, few, search_padded)


def meshes_of(
    analysis: Analysis, cluster: Cluster, options: PlanOptions
) -> Sequence[MeshShape]:
    """Returns the meshes to try, which have the axes that pins and the step name.

    Raises:
      PlanError: no mesh exists, or no mesh divides the batch.
    """
    meshes = candidate_meshes(cluster, options.max_axes, options.axis_names)
    meshes = meshes_for_manual(analysis, cluster, meshes)
    if options.pins:
        meshes = fitting_meshes(analysis, options.pins, meshes)
    if options.split_batch:
        check_batch(analysis, cluster, meshes)
    return meshes


def _check_no_remat(options: PlanOptions, kept: Plan) -> None:
    """Checks that the options request no rematerialisation that a kept plan lacks."""
    if options.remat not in (None, "auto"):
        raise PlanError(
            f"remat={options.remat!r}: the plan given as layouts= has "
            f"{len(kept.stages)} stages and says itself which layers compute again; "
            "leave remat out, or edit pipeline.recomputed of the plan."
        )


def _check_program(analysis: Analysis, kept: Plan, options: PlanOptions) -> None:
    """Checks that the options agree with a plan whose layouts the user wants to keep.

    Raises:
      PlanError: the options ask for another program, or for replicas.
    """
    asked = options.microbatches
    count = sum(asked) if isinstance(asked, tuple) else asked
    if count not in (None, "auto", kept.microbatches):
        raise PlanError(
            f"microbatches={asked}: the plan given as layouts= has "
            f"{kept.microbatches}; leave microbatches out."
        )
    if set(asked_state(analysis, options.offload)) - set(kept.offload):
        raise PlanError(
            f"offload={options.offload!r}: the plan given as layouts= keeps other "
            "state in the memory of the hosts; leave offload out."
        )
    if options.remat in (None, "auto"):
        return
    whole = dataclasses.replace(options, microbatches=kept.microbatches)
    said, has = remat_wanted(analysis, whole), kept.remat
    if (said.layers, said.level, said.checkpoints) != (
        has.layers,
        has.level,
        has.checkpoints,
    ):
        raise PlanError(
            f"remat={options.remat!r}: the plan given as layouts= computes other "
            "layers again; leave remat out."
        )


def plan_beside(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    running: Plan,
    sent: Plan | None = None,
) -> Plan:
    """Makes a plan for another batch size that leaves the state of a running plan where
    it is.

    Several stages stay if they can run the batch (`pipeline_beside`). In one stage, the
    plan has the layouts of the running plan if the mesh axes divide the batch. If not,
    only the state keeps its layouts, and the batch is split as far as possible.

    Args:
      analysis: the step with the other batch size.
      cluster: the cluster of the running plan.
      options: hints and limits of the running plan.
      running: the plan of the step with its usual batch size.
      sent: as for `plan_analysis`.

    Raises:
      InfeasibleError: with these layouts the batch does not fit the memory of a device.
      PlanError: the cluster has no such mesh as the running plan.
    """
    found = _beside(analysis, cluster, options, running, sent)
    return with_compiler_options(found, options, running)


def _beside(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    running: Plan,
    sent: Plan | None,
) -> Plan:
    """As `plan_beside`, perhaps without its compiler options."""
    codecs = request_of(options, sent)
    if running.replicas:
        return _replicas_beside(analysis, cluster, options, running, codecs)
    if len(running.stages) > 1:
        with contextlib.suppress(PlanError):
            return pipeline_beside(analysis, cluster, options, running, codecs)
        return plan_analysis(analysis, cluster, options, sent)  # the state moves
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
    analysis = for_devices(analysis, cluster.num_devices)
    pins = _state_pins(analysis, running)
    return _search_layouts(
        [analysis], cluster, meshes, pins, codecs, options.seconds
    ).plan


def _replicas_beside(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    running: Plan,
    codecs: CodecRequest,
) -> Plan:
    """As `plan_beside`, on replicas of unequal devices.

    Raises:
      InfeasibleError: the batch does not fit the memory of a device.
      PlanError: the batch can be divided among the replicas only on another mesh, or
        not at all.
    """
    kept = dataclasses.replace(
        options,
        pins=_state_pins(analysis, running),
        axis_names=running.axis_names[1:],
        microbatches="auto",
        layouts=None,
    )
    found = plan_replicas(analysis, cluster, kept, codecs)
    if found.axis_sizes != running.axis_sizes:
        raise PlanError(
            "a batch of this size is planned on another mesh than the running one; "
            "fill it up, or leave it out."
        )
    return found


def _state_pins(analysis: Analysis, plan: Plan) -> dict[str, PartitionSpec]:
    """Pins the carried inputs to their layouts in a plan."""
    return {
        glob.escape(given.path): PartitionSpec(
            *(axes or None for axes in plan.inputs[given.path])
        )
        for given in analysis.graph.inputs
        if given.output >= 0
    }


def _check_axes_of(layouts: Plan, options: PlanOptions) -> None:
    """Checks that the options about mesh axes agree with the layouts to keep."""
    # The options name the axes of the mesh of one replica.
    kept = layouts.axis_names[1 if layouts.replicas else 0 :]
    names = options.axis_names
    said = {
        f"axis_names={tuple(names or ())}": names is not None and tuple(names) != kept,
        f"max_axes={options.max_axes}": (options.max_axes or len(kept)) < len(kept),
    }
    if wrong := [text for text, contradicts in said.items() if contradicts]:
        raise PlanError(
            f"{wrong[0]}: the plan given as layouts= has the mesh axes "
            f"{', '.join(kept)}; leave {wrong[0].partition('=')[0]} out."
        )


def _search_layouts(
    programs: Sequence[Analysis],
    cluster: Cluster,
    meshes: Sequence[MeshShape],
    pins: Pins,
    codecs: CodecRequest,
    seconds: float | None,
    *,
    untried: Sequence[str] | None = (),
    weights: Sequence[Weights] | None = None,
    most_s: float = math.inf,
) -> Planned:
    """Returns the fastest layouts of the fastest program of a step.

    The plan has codecs if the user requested them.
    """
    asked = None if codecs.mode == "none" else codecs
    limit_s = most_s
    found: list[tuple[Analysis, SearchResult]] = []
    failed: list[PlanError] = []
    for program in programs:
        if found and is_over():
            leave_untried("another form of the step for the devices")
            continue
        if found and least_work_s(program, cluster) >= most_s:
            continue  # Its work alone takes longer than the step of another program.
        restrict = functools.partial(_restrict_to_pins, program, pins)
        try:
            result = search(
                program,
                cluster,
                meshes=meshes,
                seconds=seconds,
                restriction=restrict if pins else None,
                codecs=asked,
                untried=untried,
                weights=weights,
                most_s=most_s,
                gathers=codecs.gathers,
            )
        except PlanError as error:
            failed.append(error)
        except OutOfTimeError:
            if not found:
                raise
        else:
            found.append((program, result))
            most_s = min(most_s, result.best.step_s)
    if not found:
        # Of several programs that do not fit, the one with the least memory matters.
        unfit = [e for e in failed if isinstance(e, InfeasibleError) and e.least_bytes]
        if len(unfit) < len(failed):
            raise failed[0]
        raise min(unfit, key=lambda e: e.least_bytes)
    analysis, result = min(found, key=lambda pair: pair[1].best.step_s)
    if not worth_encoding(result.best):
        exact = _search_layouts(
            programs, cluster, meshes, pins, codecs.with_exact_gathers(), seconds,
            untried=untried, weights=weights, most_s=limit_s,
        )  # fmt: skip
        return exact._replace(plan=with_exact_gathers(exact.plan))
    check_pinned(pins, analysis, result.best.assignment, result.best.pricer.mesh)
    near_s = (1 + NEAR) * result.best.step_s
    near = tuple(m for m, c in result.tried if c is not None and c.step_s <= near_s)
    return Planned(make_plan(analysis, result, asked), result.slowdown, near)


def _restrict_to_pins(analysis: Analysis, pins: Pins, pricer: Pricer) -> Restriction:
    return pin_restriction(analysis, pinned_layouts(analysis, pins, pricer.mesh))


def _with_layouts(
    analysis: Analysis,
    cluster: Cluster,
    layouts: Plan,
    options: PlanOptions,
    codecs: CodecRequest,
) -> Plan:
    """Keeps the layouts of a plan, which may be for another batch size, and chooses
    codecs.
    """
    if bool(cluster.groups) is not bool(layouts.replicas):
        has = "has replicas" if layouts.replicas else "has no replicas"
        raise PlanError(
            f"layouts=: the plan {has}, which are for groups of unequal devices, and "
            f"{cluster} is {'of groups' if cluster.groups else 'of equal devices'}. "
            "Leave layouts out."
        )
    several = isinstance(options.stages, int) and options.stages > 1
    if not several:
        _check_program(analysis, layouts, options)
    _check_axes_of(layouts, options)
    whole, analysis = analysis, split_as(analysis, layouts)
    pins, seconds = options.pins or {}, options.seconds
    started = time.perf_counter()
    kept = carried_out(
        analysis, rebatch_plan(analysis, layouts), cluster, seconds=seconds
    )
    if several:
        made = layouts_in_stages(whole, cluster, options, kept, codecs)
        return with_status(made, kept.solver.status) if layouts.changed_parts else made
    if kept.replicas:
        asked = options.microbatches
        shares = asked if isinstance(asked, tuple) else ()
        made = in_layouts_of(
            analysis, cluster, kept, codecs, shares=shares, pins=options.pins
        )
        return with_status(made, kept.solver.status) if layouts.edited else made
    own = dataclasses.replace(restore(analysis, kept), gathers={})
    names, gathers = kept.axis_names, codecs.gathers
    result = search_of_one(analysis, cluster, own, names, gathers)
    worth = worth_encoding(result.best)
    if not worth:
        result = search_of_one(analysis, cluster, own, names)
    best = result.best
    check_fits(best)
    check_pinned(pins, analysis, best.assignment, best.pricer.mesh)
    asked = None if codecs.mode == "none" else codecs
    if asked is not None:
        best = sent_as_asked(analysis, best, asked)
        spent_s = time.perf_counter() - started
        result = dataclasses.replace(result, best=best, seconds=spent_s)
    made = make_plan(analysis, result, asked)
    if not worth:
        made = with_exact_gathers(made)
    elif why := why_none(made, options.gather_codecs, gathers):
        made = msgspec.structs.replace(made, decided=(*made.decided, why))
    return with_status(made, kept.solver.status) if layouts.changed_parts else made


def check_batch(
    analysis: Analysis, cluster: Cluster, meshes: Sequence[MeshShape]
) -> None:
    """Raises `UnsplitBatchError` if no mesh axis divides the rows of the batch.

    Rows of a kernel are exempt if its sequence may be split instead.
    """
    parts = analysis.microbatches
    if has_context(analysis) or analysis.row_multiple > 1:
        return
    leading = rows_by_path(analysis)
    sizes = sorted({size for m in meshes for size in m.sizes if size > 1})
    if not leading or not sizes:
        return
    if any(n % size == 0 for n in leading.values() for size in sizes):
        return
    path, n = next(iter(leading.items()))
    up, rows = cluster.num_devices, n * parts
    fewer = [
        count
        for count in range(1, parts)
        if rows % count == 0 and any(rows // count % size == 0 for size in sizes)
    ]
    error = UnsplitBatchError(
        f"the batch cannot be split: the number of its rows is {n} ('{path}'"
        f"{f', in each of {parts} microbatches' if parts > 1 else ''}), and no "
        f"mesh axis of {cluster} ({', '.join(map(str, sizes))}) divides it.\n"
        f"  try: {f'microbatches={fewer[-1]}, ' if fewer else ''}"
        f"a batch of {-(-n // up) * up * parts}, or split_batch=False "
        "to plan without data parallelism. With last_batch='run', such a batch runs "
        "after one that can be split."
    )
    scores = why_scores_are_kept(analysis, up, cluster.device)
    raise error.because(f"its sequence cannot be split: {scores}") if scores else error
