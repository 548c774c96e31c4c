"""Keeps the stages and layouts of a plan, and chooses new codecs."""

from __future__ import annotations

import msgspec

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.hints import check_pinned
from autopar.planner.options import PlanOptions
from autopar.planner.record import GIVEN, assignment_of
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
      PlanError: the plan was made for another step, was edited, or contradicts the
        options; or the cluster does not have the plan's slices.
    """
    _check(options, kept)
    cut = cut_as(analysis, kept)
    assert kept.pipeline is not None
    pricers = stage_pricers(kept, cluster)
    sites = tuple(
        StageSite(devices=stage.devices, cluster=pricer.cluster, mesh=pricer.mesh)
        for stage, pricer in zip(kept.stages, pricers, strict=True)
    )
    wanted = WantedPipeline(
        layers=kept.pipeline.layers,
        parts=kept.pipeline.parts,
        schedule=schedule_of(kept),
        sites=sites,
        recomputed=kept.pipeline.recomputed,
    )
    found = [_candidate(cut, kept, k, site) for k, site in enumerate(sites)]
    _check_pins(cut, options, found)
    made = kept_plan(cut, cluster, wanted, codecs, found)
    solver = msgspec.structs.replace(made.solver, status=GIVEN)
    return msgspec.structs.replace(made, solver=solver)


def _candidate(cut: CutStep, kept: Plan, number: int, site: StageSite) -> Candidate:
    """The layouts of a stage, priced on its devices."""
    alone = one_stage(kept, number).with_gradients(())
    analysis = cut.stages[number]
    assignment = assignment_of(analysis, alone)
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
    # Edited codecs do not matter, because new codecs are chosen.
    if edited := [name for name in kept.changed_parts if name != "gradients"]:
        raise PlanError(
            f"layouts=: {', '.join(edited)} of the plan were edited, which is not "
            f"carried out for {len(kept.stages)} stages. Plan again with pins=."
        )


def _check_pins(cut: CutStep, options: PlanOptions, found: list[Candidate]) -> None:
    pins = dict(options.pins or {})
    check_matches(cut, pins)
    for analysis, candidate in zip(cut.stages, found, strict=True):
        own = own_pins(analysis, pins)
        check_pinned(own, analysis, candidate.assignment, candidate.pricer.mesh)
