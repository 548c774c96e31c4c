"""Keeps the stages and layouts of a plan, and chooses new codecs."""

from __future__ import annotations

import msgspec

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.hints import check_pinned
from autopar.planner.options import PlanOptions
from autopar.planner.record import GIVEN, check_decisions, stated_assignment
from autopar.planner.search import search_of_one
from autopar.planner.stages.entry import cut_as
from autopar.planner.stages.stage_search import StageSite, check_matches, own_pins
from autopar.planner.stages.staged import WantedPipeline, kept_plan, schedule_of
from autopar.planner.stages.submeshes import one_stage, stage_pricers
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep


def kept_pipeline(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    kept: Plan,
    codecs: CodecRequest,
) -> Plan:
    """The stages and layouts of a plan, on a cluster with the same slices.

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
    wanted = kept_wanted(kept, cluster)
    found = [stated_layouts(cut, kept, k, wanted) for k in range(len(kept.stages))]
    _check_pins(cut, options, found)
    made = kept_plan(cut, cluster, wanted, codecs, found)
    solver = msgspec.structs.replace(made.solver, status=GIVEN)
    return msgspec.structs.replace(made, solver=solver)


def kept_wanted(kept: Plan, cluster: Cluster) -> WantedPipeline:
    """The pipeline of a plan, on a cluster with the same slices.

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
    )


def stated_layouts(
    cut: CutStep, kept: Plan, number: int, wanted: WantedPipeline
) -> Candidate:
    """The layouts of a stage in a plan, priced on its devices without codecs.

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
