"""Keeps the stages and layouts of a plan, and chooses new codecs."""

from __future__ import annotations

import dataclasses
import glob
import itertools
from collections.abc import Sequence

import msgspec
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.hints import check_pinned
from autopar.planner.options import PlanOptions
from autopar.planner.record import GIVEN, check_decisions, stated_assignment
from autopar.planner.search import search_of_one
from autopar.planner.stages.entry import (
    cut_as,
    cut_budget,
    cut_for,
    plan_pipeline,
    with_given_codecs,
    with_wanted_codes,
)
from autopar.planner.stages.stage_search import (
    StageHints,
    StageSite,
    check_matches,
    own_pins,
)
from autopar.planner.stages.staged import (
    WantedPipeline,
    kept_plan,
    schedule_of,
    staged_plan,
)
from autopar.planner.stages.submeshes import one_stage, stage_pricers
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.stages import CutStep, sizes_from_paths, with_pieces
from autopar_passes.layer_loops.split import whole_path
from autopar_passes.remat.copies import KERNELS


def kept_pipeline(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    kept: Plan,
    codecs: CodecRequest,
) -> Plan:
    """Returns the stages and layouts of a plan, on a cluster with the same slices.

    Args:
      analysis: the step on the whole batch.
      cluster: the devices to plan for.
      options: hints, which must agree with the plan.
      kept: a plan of several stages of the same step.
      codecs: the user's request about codecs.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
      PlanError: the plan was made for another step, or contradicts the options or
        itself; or the cluster does not have the plan's slices.
    """
    _check(options, kept)
    cut = cut_as(analysis, kept)
    wanted = dataclasses.replace(
        kept_wanted(kept, cluster), activation_codecs=(), cotangent_codecs=()
    )
    wanted = with_given_codecs(wanted, str(options.cut_codecs))
    cut = with_wanted_codes(cut, wanted)
    found = [stated_layouts(cut, kept, k, wanted) for k in range(len(kept.stages))]
    _check_pins(cut, options, found)
    made = kept_plan(cut, cluster, wanted, codecs, found, cut_budget(options))
    solver = msgspec.structs.replace(made.solver, status=GIVEN)
    return msgspec.structs.replace(made, solver=solver)


def _remat_of(kept: Plan) -> str | None:
    """The option ``remat`` that rematerialises as a plan of one stage does."""
    count, level = len(kept.remat.layers), kept.remat.level
    return f"{count}:{level}" if count or level == KERNELS else None


def layouts_in_stages(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    kept: Plan,
    codecs: CodecRequest,
) -> Plan:
    """Plans the stages that the options ask for, with the layouts of a plan of one.

    Inputs keep their layouts by the names of mesh axes, on a smaller mesh in each
    stage. If a stage has no devices left for an axis, the axis splits nothing there. Of
    several choices of such axes, the fastest is taken. By default the stages run as
    many microbatches as the plan (if it has several) and rematerialise as many layers.

    Args:
      analysis: the step on the whole batch.
      cluster: the devices to plan for.
      options: hints and limits, with a number of stages of two or more.
      kept: a plan of one stage of the same step, without edits.
      codecs: the user's request about codecs.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
      PlanError: no mesh of a stage has the layouts, the options contradict the plan, or
        the plan has replicas or drops the step's own checkpoints.
    """
    if kept.replicas or not kept.remat.checkpoints or options.pins:
        why = "has replicas" if kept.replicas else "drops the step's jax.checkpoint"
        why = (
            "says all layouts of inputs, and pins= were given" if options.pins else why
        )
        raise PlanError(
            f"stages={options.stages}: the plan given as layouts= {why}, which cannot "
            "be kept in several stages. Leave one of the two out."
        )
    several = kept.microbatches if kept.microbatches > 1 else None
    program = dataclasses.replace(
        options,
        layouts=None,
        microbatches=options.microbatches or several,
        remat=options.remat or _remat_of(kept),
        coupled="microbatch" if kept.local else options.coupled,
    )
    assert isinstance(options.stages, int)
    best: Plan | None = None
    failed: list[PlanError] = []
    left: list[str] = []
    names = kept.axis_names
    for size in range(len(names), 0, -1):
        for axes in itertools.combinations(names, size):
            asked = dataclasses.replace(
                program, axis_names=axes, max_axes=size, pins=_input_pins(kept, axes)
            )
            try:
                made = plan_pipeline(analysis, cluster, asked, options.stages, codecs)
            except PlanError as error:
                failed.append(error)
                continue
            if best is None or made.predicted.step_s < best.predicted.step_s:
                best, left = made, [name for name in names if name not in axes]
    if best is None:
        raise failed[0]
    if left:
        said = f"layouts: stages have no devices for axis {', '.join(left)}"
        best = msgspec.structs.replace(best, decided=(*best.decided, said))
    solver = msgspec.structs.replace(best.solver, status=GIVEN)
    return msgspec.structs.replace(best, solver=solver)


def _input_pins(kept: Plan, axes: Sequence[str]) -> dict[str, PartitionSpec]:
    """Pins the inputs of a step to a plan's layouts, restricted to some of its axes."""
    out: dict[str, PartitionSpec] = {}
    for path, spec in kept.inputs.items():
        own = [tuple(name for name in names if name in axes) for names in spec]
        if own:
            out[glob.escape(path)] = PartitionSpec(*(names or None for names in own))
    return out


def pipeline_beside(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    running: Plan,
    codecs: CodecRequest,
) -> Plan:
    """Plans a step with fewer rows in the stages of a running plan.

    Stages, meshes, schedule, codecs of cuts and the layouts of the state are those of
    the running plan. The batch is split into as many microbatches, or as many as its
    rows and the schedule allow.

    Args:
      analysis: the step with fewer rows.
      cluster: the cluster of the running plan.
      options: hints and limits of the running plan.
      running: a plan of several stages of the step with more rows.
      codecs: the user's request about codecs.

    Raises:
      InfeasibleError: a stage does not fit the memory of its devices.
      PlanError: the batch cannot be split for these stages.
    """
    assert running.pipeline is not None
    whole = analysis.whole or analysis
    whole = with_pieces(whole, sizes_from_paths(whole, running.pipeline.pieces))
    wanted = kept_wanted(running, cluster)
    pins = {**(options.pins or {}), **_pins_of_state(whole, running)}
    hints = StageHints(pins=pins, seconds=options.seconds, keeps_meshes=True)
    rows, most = batch_rows(whole.graph), running.microbatches
    failed: list[PlanError] = []
    for count in range(most, 0, -1):
        if rows % count:
            continue
        try:
            cut = cut_for(whole, options, wanted, count)
            return staged_plan(cut, cluster, wanted, codecs, hints)
        except PlanError as error:
            failed.append(error)
    raise failed[0]


def _pins_of_state(whole: Analysis, running: Plan) -> dict[str, PartitionSpec]:
    """Pins the carried inputs of stages to their layouts in a plan."""
    carried = {i.path for i in whole.graph.inputs if i.output >= 0}
    return {
        glob.escape(own): PartitionSpec(*(axes or None for axes in spec))
        for number, stage in enumerate(running.stages)
        for path, spec in stage.inputs.items()
        if (own := whole_path(path) or path) in carried
        and (own != path or running.home(path) == number)
    }


def kept_wanted(kept: Plan, cluster: Cluster) -> WantedPipeline:
    """Returns the pipeline of a plan, on a cluster with the same slices.

    Args:
      kept: a plan of several stages.
      cluster: all devices.

    Raises:
      PlanError: the cluster does not have the plan's slices, or the schedule does not
        fit the parts of the stages.
    """
    assert kept.pipeline is not None
    pricers = stage_pricers(kept, cluster)
    return WantedPipeline(
        layers=kept.pipeline.layers,
        parts=kept.pipeline.parts,
        schedule=schedule_of(kept),
        sites=tuple(
            StageSite(devices=stage.devices, cluster=pricer.cluster, mesh=pricer.mesh)
            for stage, pricer in zip(kept.stages, pricers, strict=True)
        ),
        recomputed=kept.pipeline.recomputed,
        activation_codecs=kept.pipeline.activation_codecs,
        cotangent_codecs=kept.pipeline.cotangent_codecs,
    )


def stated_layouts(
    cut: CutStep, kept: Plan, number: int, wanted: WantedPipeline
) -> Candidate:
    """Returns the layouts of a stage in a plan, priced on its devices without codecs.

    Args:
      cut: the step as stages.
      kept: the plan.
      number: number of the stage.
      wanted: the pipeline of the plan.

    Raises:
      PlanError: the layouts contradict each other, or the planner does not consider
        them.
    """
    alone = one_stage(kept, number).with_gradients(())
    analysis, site = cut.stages[number], wanted.sites[number]
    check_decisions(analysis, alone)
    assignment = stated_assignment(analysis, alone)
    return search_of_one(analysis, site.cluster, assignment, alone.axis_names).best


def _check(options: PlanOptions, kept: Plan) -> None:
    """Raises `PlanError` if the options contradict the plan."""
    names = options.axis_names
    most = max(len(stage.axis_names) for stage in kept.stages)
    said = {
        f"stages={options.stages}": options.stages
        not in (None, "auto", len(kept.stages)),
        f"schedule={options.schedule!r}": options.schedule not in (None, kept.schedule),
        f"microbatches={options.microbatches}": options.microbatches
        not in (None, "auto", kept.microbatches),
        f"axis_names={tuple(names or ())}": names is not None
        and any(stage.axis_names != tuple(names) for stage in kept.stages),
        f"max_axes={options.max_axes}": (options.max_axes or most) < most,
    }
    if wrong := [text for text, contradicts in said.items() if contradicts]:
        raise PlanError(
            f"{wrong[0]}: the plan given as layouts= has {len(kept.stages)} stages, "
            f"{kept.schedule} of {kept.microbatches} microbatches and the mesh axes "
            f"{', '.join(kept.stages[0].axis_names)}; leave "
            f"{wrong[0].partition('=')[0]} out."
        )


def _check_pins(cut: CutStep, options: PlanOptions, found: list[Candidate]) -> None:
    pins = dict(options.pins or {})
    check_matches(cut, pins)
    for analysis, candidate in zip(cut.stages, found, strict=True):
        own = own_pins(analysis, pins)
        check_pinned(own, analysis, candidate.assignment, candidate.pricer.mesh)
