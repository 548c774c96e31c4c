"""Applies the user's edits to a plan and computes the costs again.

Edited layouts of inputs take precedence: the planner plans again all layouts that
depend on these inputs. Other edits are applied unchanged if they fit the step. An edit
that cannot be applied raises an error that names it (docs/plans.md has a table).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from autopar.cluster import Cluster
from autopar.compression.codecs.registry import parse_codec
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, from_spec
from autopar.layouts.strategies import strategy_space
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.choose import EDITED, CodecRequest, sent_as_asked
from autopar.planner.codecs.gathers import gathers_of
from autopar.planner.codecs.sites import Site, sites
from autopar.planner.hints import pin_restriction
from autopar.planner.record import (
    GIVEN,
    another_step,
    assignment_of,
    check_consistent,
    check_decisions,
    make_plan,
    split_as,
    stated_assignment,
)
from autopar.planner.replicas import ReplicaDevices, in_layouts_of, one_replica
from autopar.planner.search import plan_mesh, search, search_of_one
from autopar.planner.stages.codecs import gradient_names, sending_of, without_codecs
from autopar.planner.stages.entry import cut_as
from autopar.planner.stages.kept import kept_wanted
from autopar.planner.stages.staged import WantedPipeline, kept_plan, rooms_left
from autopar.planner.stages.submeshes import one_stage
from autopar.plans import GradientDecision, Plan
from autopar.plans.specs import spec_of, spec_text
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep
from autopar_passes.layer_loops.split import piece_paths

# The fields that a user may edit. After any edit the costs are computed again.
EDITABLE = (
    "inputs", "nodes", "copies", "gradients", "gathers", "attention",
    "sums_each_microbatch", "predicted", "cluster", "mesh", "schedule", "pipeline",
    "replicas",
)  # fmt: skip

# The fields that users may edit only in plans of several stages.
_OF_SEVERAL = ("schedule", "pipeline")
# Reasons why the other fields may not be edited, by name of the field.
_WHY_NOT = {
    "outputs": "carried state leaves as it came: edit the layout of its input",
    "devices": "other devices are another plan: make it with autopar.plan(..., "
    "cluster=, stages=)",
    "compression": "it says why gradients are sent as they are: edit their codecs",
    "microbatches": "other microbatches are another plan: make it with "
    "autopar.plan(..., microbatches=)",
    "row_multiple": "other rows are another plan: make it with autopar.plan",
    "row_blocks": "other blocks of rows are another plan: make it with autopar.plan",
    "row_capacity": "other slots of rows are another plan: make it with autopar.plan",
    "attention_kernel": "another kernel is another plan: make it with autopar.plan",
    "loss_blocks": "other blocks of tokens are another plan: make it with autopar.plan",
    "local": "it says what is computed from each microbatch alone",
    "rematerialisation": "it says which modules the layers that are computed again "
    "have",
    "remat": "other layers to compute again are another plan: make it with "
    "autopar.plan(..., remat=)",
    "name": "it numbers the stages",
}


def carried_out(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    seconds: float | None = None,
) -> Plan:
    """Returns a plan to which all edits are applied; the same plan if nothing was
    edited.

    Args:
      analysis: the step.
      plan: the plan, edited or not.
      cluster: the devices for which the plan is priced; default: the plan's own
        cluster.
      seconds: time limit of the solver.

    Raises:
      PlanError: the plan belongs to another step, or an edit cannot be carried out.
    """
    parts = plan.changed_parts
    if not parts:
        return plan
    _check_parts(plan, parts)
    where = plan.cluster.read() if cluster is None else cluster
    if "cluster" in parts:
        _check_text(plan)
    if len(plan.stages) > 1:
        made, said = _several_stages(analysis, plan, where, seconds)
    else:
        made, said = _only_stage(analysis, plan, where, seconds)
    return with_status(
        msgspec.structs.replace(
            made,
            target=plan.target,
            options=plan.options,
            compiler_options=plan.compiler_options,
        ),
        f"edited: {said}; {made.solver.status}",
    )


def _only_stage(
    analysis: Analysis, plan: Plan, cluster: Cluster, seconds: float | None
) -> tuple[Plan, str]:
    """A plan of one stage to which its edits are applied, and what was edited."""
    analysis = split_as(analysis, plan)
    if plan.fingerprint != analysis.fingerprint:
        raise another_step(analysis, plan)
    check_consistent(analysis, plan)
    if plan.replicas:
        made, said = _on_replicas(analysis, plan, cluster, seconds)
    else:
        parts = plan.changed_parts
        result, said = _edited_layouts(analysis, plan, cluster, parts, seconds)
        if result is None:
            result = _as_stated(analysis, plan, cluster)
            check_fits(result.best)
        made = _with_codecs_of(analysis, result, plan)
    return made, said or f"{', '.join(plan.changed_parts)} changed by hand"


def _on_replicas(
    analysis: Analysis, plan: Plan, cluster: Cluster, seconds: float | None
) -> tuple[Plan, str]:
    """A plan with replicas to which its edits are applied, and the edited layouts."""
    alone, said = one_replica(plan), ""

    def search_alone(view: Analysis, site: ReplicaDevices) -> Candidate:
        nonlocal said
        parts, part = plan.changed_parts, site.part
        result, said = _edited_layouts(view, alone, part, parts, seconds)
        return (result or _as_stated(view, alone, part)).best

    def check(found: Candidate) -> None:
        _check_sites(found.assignment.analysis, plan, found)

    asked = CodecRequest(EDITED if plan.gradients else "none", None, 0.0, plan, {})
    made = in_layouts_of(analysis, cluster, plan, asked, search_alone, check=check)
    if made.axis_names != plan.axis_names:
        raise PlanError(
            f"the plan's mesh was edited: the axis of replicas is named "
            f"'{made.axis_names[0]}', not '{plan.axis_names[0]}'."
        )
    return _with_reason_of(made, plan), said


def _several_stages(
    analysis: Analysis, plan: Plan, cluster: Cluster, seconds: float | None
) -> tuple[Plan, str]:
    """A plan of several stages to which its edits are applied, and what was edited."""
    parts = plan.changed_parts
    cut = cut_as(analysis, plan)
    _check_cut(cut, plan)
    wanted = kept_wanted(plan, cluster)
    alone = [one_stage(plan, k).with_gradients(()) for k in range(len(plan.stages))]
    said: list[str] = []
    _check_pieces(plan)
    if "inputs" in parts and "mesh" not in parts:
        found, said = _edited_stages(cut, alone, cluster, wanted, seconds)
    else:
        sites = zip(cut.stages, alone, wanted.sites, strict=True)
        found = [_as_stated(a, own, site.cluster).best for a, own, site in sites]
    request = CodecRequest("none", None, 0.0, None, {})
    if plan.gradients:
        request = CodecRequest(EDITED, None, 0.0, plan, {})
    if "gradients" in parts:
        choices = without_codecs(cut, found)
        names = gradient_names(cut.analysis.graph, choices)
        for stage, choice, own in zip(plan.stages, choices, names, strict=True):
            _check_given(stage.gradients, sending_of(choice).sites, own)
    made = kept_plan(cut, cluster, wanted, request, found)
    made = _with_reason_of(made, plan)
    _check_homes(plan, made)
    _check_pieces(made)
    rest = [part for part in parts if part != "inputs" or not said]
    said += [f"{', '.join(rest)} changed by hand"] if rest else []
    solver = msgspec.structs.replace(made.solver, status=GIVEN)
    return msgspec.structs.replace(made, solver=solver), "; ".join(said)


def _edited_stages(
    cut: CutStep,
    alone: Sequence[Plan],
    cluster: Cluster,
    wanted: WantedPipeline,
    seconds: float | None,
) -> tuple[list[Candidate], list[str]]:
    """Returns the layouts of all stages, planned again where inputs were edited.

    Args:
      cut: the step as stages.
      alone: each stage as a plan.
      cluster: all devices.
      wanted: the pipeline to plan, with its stages, schedule and rematerialised layers.
      seconds: time limit of the solver.

    Returns:
      The layouts, and what was edited of each stage.
    """
    found = [
        search_of_one(a, site.cluster, assignment_of(a, own), own.axis_names).best
        for a, own, site in zip(cut.stages, alone, wanted.sites, strict=True)
    ]
    said: list[str] = []
    rooms = rooms_left(cut, cluster, wanted, found)
    for number, own in enumerate(alone):
        on = wanted.sites[number].cluster
        device = dataclasses.replace(on.device, memory_bytes=rooms[number])
        limited = dataclasses.replace(on, device=device)
        result, text = _edited_layouts(
            cut.stages[number], own, limited, ("inputs",), seconds
        )
        if result is not None:
            pricer = dataclasses.replace(result.best.pricer, cluster=on)
            found[number] = dataclasses.replace(result.best, pricer=pricer)
            said.append(f"stage {number}: {text}")
    return found, said


def _edited_layouts(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster,
    parts: Sequence[str],
    seconds: float | None,
) -> tuple[SearchResult | None, str]:
    """The layouts of a stage, planned again for the edited layouts of its inputs.

    Args:
      analysis: the stage.
      plan: the stage as a plan.
      cluster: the devices of the stage.
      parts: the parts of the plan that were edited. If the mesh was edited, the layouts
        that the plan states are not planned again.
      seconds: time limit of the solver.

    Returns:
      The layouts and a text of what was edited; None and '' if no layout of an input
      was edited.
    """
    if "inputs" not in parts or "mesh" in parts:
        return None, ""
    check_decisions(analysis, plan)
    stated, wanted = assignment_of(analysis, plan), _wanted_layouts(analysis, plan)
    edited = {v: w for v, w in wanted.items() if stated.home_layout(v) != w}
    if not edited:
        return None, ""
    return _with_inputs(analysis, plan, cluster, wanted, edited, seconds)


def with_status(plan: Plan, status: str) -> Plan:
    """Returns the plan with another text on how it was found."""
    solver = msgspec.structs.replace(plan.solver, status=status)
    return msgspec.structs.replace(plan, solver=solver)


def _check_parts(plan: Plan, parts: tuple[str, ...]) -> None:
    """Raises `PlanError` for a field that cannot be edited, or not together with
    another field.
    """
    mesh = "mesh" in parts
    for part in parts:
        if part in _OF_SEVERAL and len(plan.stages) == 1:
            raise PlanError(
                f"the plan's {part} was edited, and cannot be: there is one stage."
            )
        if part == "gathers" and (len(plan.stages) > 1 or plan.replicas):
            raise PlanError(
                "the plan's gathers were edited, and cannot be: only plans of one "
                "stage without replicas gather parameters as codes."
            )
        if part == "replicas" and not plan.replicas:
            raise PlanError(
                "the plan's replicas were edited, and cannot be: it has none. Replicas "
                "are for clusters of unequal devices: autopar.plan(..., microbatches=)."
            )
        if part not in EDITABLE and not (mesh and part == "outputs"):
            why = _WHY_NOT.get(part, "it is a fact of the step")
            raise PlanError(f"the plan's {part} was edited, and cannot be: {why}.")
    both = [part for part in ("nodes", "copies", "attention") if part in parts]
    if "inputs" in parts and both and not mesh:
        raise PlanError(
            f"the plan's inputs and {' and '.join(both)} were both edited; the layouts "
            f"of inputs decide the rest: edit the inputs, or the {both[0]}."
        )


def _check_cut(cut: CutStep, plan: Plan) -> None:
    """Raises `PlanError` if an edited pipeline gives stages other work than the work
    that their layouts are for.
    """
    assert plan.pipeline is not None
    every = range(len(plan.pipeline.layers))
    if wrong := [k for k in plan.pipeline.recomputed if k not in every]:
        raise PlanError(
            f"the plan's pipeline.recomputed has layer {wrong[0]}, and the step has "
            f"layers 0 to {len(every) - 1}."
        )
    for stage, own in zip(cut.stages, plan.stages, strict=True):
        if list(own.inputs) != [given.path for given in stage.graph.inputs]:
            raise PlanError(
                "the plan's pipeline was edited so that a stage runs other layers than "
                "its layouts are for. Of the pipeline, only recomputed can be edited, "
                "and the codecs of cuts: make another plan with autopar.plan(..., "
                "stages=)."
            )


def _check_homes(plan: Plan, made: Plan) -> None:
    """Raises `PlanError` if edits moved inputs to other stages."""
    assert plan.pipeline is not None
    assert made.pipeline is not None
    here, there = plan.pipeline.homes, made.pipeline.homes
    if moved := sorted(p for p in {*here, *there} if here.get(p) != there.get(p)):
        raise PlanError(
            f"the plan's pipeline.homes was edited, and cannot be: '{moved[0]}' is on "
            "the stage that updates or first reads it."
        )


def _check_pieces(plan: Plan) -> None:
    """Raises `PlanError` if pieces of one array have different layouts or meshes."""
    assert plan.pipeline is not None
    meshes = {str(stage.mesh["axes"]) for stage in plan.stages}
    if plan.pipeline.pieces and len(meshes) > 1 and "mesh" in plan.changed_parts:
        raise PlanError(
            "the plan's mesh was edited so that stages with pieces of one array have "
            f"different meshes: {', '.join(sorted(meshes))}. Edit all of them alike."
        )
    known = {path: spec for stage in plan.stages for path, spec in stage.inputs.items()}
    for whole, sizes in plan.pipeline.pieces.items():
        pieces = [path for path in piece_paths(whole, sizes) if path in known]
        for path in pieces[1:]:
            if known[path] != known[pieces[0]]:
                raise PlanError(
                    f"'{pieces[0]}' and '{path}' are pieces of one array, and have "
                    "different layouts after the edit. Give them the same layout, as "
                    f"plan.edit({{'{whole}': ...}}) does."
                )


def _check_text(plan: Plan) -> None:
    text = str(plan.cluster.read())
    if text != plan.cluster.text:
        raise PlanError(
            f"the plan's cluster.text is '{plan.cluster.text}', its cluster.data is "
            f"'{text}': the data counts, so change it and the text alike."
        )


def _with_inputs(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster,
    wanted: dict[int, Layout],
    edited: dict[int, Layout],
    seconds: float | None,
) -> tuple[SearchResult, str]:
    """Plans again with the inputs' layouts; also returns a text that lists the edited
    inputs.

    Args:
      analysis: the stage.
      plan: the stage as a plan.
      cluster: the devices of the stage.
      wanted: the layout of each input.
      edited: the layout of each edited input.
      seconds: time limit of the solver.
    """
    _check_possible(analysis, plan, edited)
    homes = analysis.contraction.homes
    nodes = {homes[value].node for value in edited}
    touched = {v for v in wanted if v in homes and homes[v].node in nodes}
    kept = {v: wanted[v] for v in wanted if v in homes and v not in touched}
    said = f"layouts of {_count(len(edited))} changed by hand"
    if follow := len(touched) - len(edited):
        said += f", {follow} that share a decision follow"
    try:
        return _best_with_pins(
            analysis, plan, cluster, {**kept, **edited}, seconds
        ), said
    except InfeasibleError:
        result = _best_with_pins(analysis, plan, cluster, edited, seconds)
        return result, f"{said}, others move to fit the memory"


def _count(number: int) -> str:
    return "1 input" if number == 1 else f"{number} inputs"


def _best_with_pins(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster,
    layouts: dict[int, Layout],
    seconds: float | None,
) -> SearchResult:
    """The best layouts on the plan's mesh, with given layouts of some inputs."""
    mesh = plan_mesh(cluster, plan.axis_names, plan.axis_sizes)
    allowed = pin_restriction(analysis, layouts)
    return search(
        analysis,
        cluster,
        meshes=[mesh],
        seconds=seconds,
        restriction=lambda _: allowed,
        gathers=gathers_of(plan),
    )


def _wanted_layouts(analysis: Analysis, plan: Plan) -> dict[int, Layout]:
    """Value of each input -> the layout of that input in the plan."""
    out: dict[int, Layout] = {}
    for given_input in analysis.graph.inputs:
        path, shape = given_input.path, analysis.graph.values[given_input.value].shape
        spec = plan.inputs[path]
        if len(spec) != len(shape):
            raise PlanError(
                f"input '{path}': {spec_text(spec)} has {len(spec)} entries, and its "
                f"shape {tuple(shape)} has {len(shape)}."
            )
        spec = spec_of(spec, shape, plan.mesh["axes"], f"input '{path}'")
        out[given_input.value] = from_spec(spec, plan.axis_names)
    return out


def _check_possible(analysis: Analysis, plan: Plan, edited: dict[int, Layout]) -> None:
    """Raises `PlanError` if edited layouts contradict the step or each other."""
    homes, paths = analysis.contraction.homes, analysis.input_paths
    for value, layout in edited.items():
        if value not in homes:
            raise PlanError(
                f"input '{paths[value]}' is too small to be split: leave its layout "
                "as it was."
            )
        number = homes[value].node
        if not _possible(analysis, plan, number, {value: layout}):
            raise PlanError(
                f"input '{paths[value]}' cannot be stored as "
                f"{spec_text(plan.inputs[paths[value]])}: the way it is used rules it "
                "out. Change its axes."
            )
        together = {v: w for v, w in edited.items() if homes[v].node == number}
        if not _possible(analysis, plan, number, together):
            said = " and ".join(
                f"'{paths[v]}' as {spec_text(plan.inputs[paths[v]])}" for v in together
            )
            raise PlanError(
                f"inputs that share one decision were edited to differ: {said}. Give "
                "them the same layout."
            )


def _possible(
    analysis: Analysis, plan: Plan, number: int, layouts: dict[int, Layout]
) -> bool:
    """Whether a node has a strategy that gives inputs their layouts."""
    node = analysis.contraction.nodes[number]
    allowed = pin_restriction(analysis, layouts)
    space = strategy_space(analysis.graph, analysis.contraction, node, plan.axis_sizes)
    return any(allowed(node, strategy) for strategy in space.strategies)


def _as_stated(analysis: Analysis, plan: Plan, cluster: Cluster) -> SearchResult:
    """Prices the plan's decisions without changing them."""
    check_decisions(analysis, plan)
    assignment = stated_assignment(analysis, plan)
    _check_nodes(analysis, plan, assignment)
    result = search_of_one(analysis, cluster, assignment, plan.axis_names)
    if not math.isfinite(result.best.solution.cost):
        raise _impossible(plan, result.best)
    return result


def _check_nodes(analysis: Analysis, plan: Plan, assignment: Assignment) -> None:
    """Raises `PlanError` for a decision that is not among the node's strategies."""
    graph, contraction = analysis.graph, analysis.contraction
    for node, strategy, decision in zip(
        contraction.nodes, assignment.strategies, plan.nodes, strict=True
    ):
        space = strategy_space(graph, contraction, node, plan.axis_sizes)
        if strategy not in space.strategies:
            raise PlanError(
                f"node '{decision.name}' cannot have axes {spec_text(decision.axes)}: "
                "the planner does not consider them. Change them, or the layout of an "
                "input."
            )


def _impossible(plan: Plan, found: Candidate) -> PlanError:
    """Returns the error that names two decisions of a plan which exclude each other."""
    problem, choices = found.formulation.problem, found.solution.choices
    names = [f"node '{n.name}'" for n in plan.nodes]
    names += [
        f"the {'backward' if c.backward else 'forward'} copy of operator "
        f"{c.value_class[0]}"
        for c in found.formulation.copies
    ]
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if np.isinf(costs[choices[i], choices[j]]):
            return PlanError(
                f"the plan contradicts itself: {names[i]} and {names[j]} cannot go "
                "together as they were edited."
            )
    return PlanError("the plan contradicts itself: its decisions cannot go together.")


def _with_codecs_of(analysis: Analysis, result: SearchResult, plan: Plan) -> Plan:
    """Makes a plan from layouts that a search found, with the codecs of another plan.

    If the user changed the codecs, each gradient must use its codec. Otherwise a
    gradient that its codec cannot send is sent without a codec.

    Args:
      analysis: the step.
      result: the layouts.
      plan: the plan that names the codec of each gradient.

    Raises:
      PlanError: the user changed the codecs, and a codec cannot send its gradient.
    """
    if not plan.gradients:
        return make_plan(analysis, result)
    _check_sites(analysis, plan, result.best)
    asked = CodecRequest(EDITED, None, 0.0, plan, {})
    best = sent_as_asked(analysis, result.best, asked)
    made = make_plan(analysis, dataclasses.replace(result, best=best), asked)
    return _with_reason_of(made, plan)


def _with_reason_of(made: Plan, plan: Plan) -> Plan:
    """Returns a plan with another plan's reason for equal codecs."""
    if not plan.gradients or "gradients" in plan.changed_parts:
        return made
    compression = msgspec.structs.replace(
        plan.compression, error=made.compression.error
    )
    return msgspec.structs.replace(made, compression=compression).with_checks()


def check_fits(best: Candidate) -> None:
    """Raises `PlanError` if given layouts need more memory than a device has."""
    have = best.pricer.cluster.memory_bytes
    if best.peak_memory_bytes > have:
        raise PlanError(
            f"these layouts need {best.peak_memory_bytes / 1e9:.3g} GB on each device "
            f"of {best.pricer.cluster}, which has {have / 1e9:.3g} GB. Let "
            "autopar.plan choose the layouts, or plan for more devices."
        )


def _check_sites(analysis: Analysis, plan: Plan, best: Candidate) -> None:
    """Raises `PlanError` if codecs were edited and one cannot send its gradient."""
    if "gradients" in plan.changed_parts:
        mesh = best.pricer.mesh.axes
        found = sites(analysis, best.assignment, mesh, best.collectives)
        _check_given(plan.gradients, found, [site.name for site in found])


def _check_given(
    decisions: Sequence[GradientDecision], found: Sequence[Site], names: Sequence[str]
) -> None:
    """Raises `PlanError` if an edited codec cannot send its gradient.

    Args:
      decisions: the plan's decisions about the gradients of a stage.
      found: the gradients of the stage.
      names: the name of each gradient in the plan.
    """
    given = {g.name: g for g in decisions}
    if differ := sorted({*names} ^ set(given)):
        raise PlanError(
            f"gradients: the plan sums {len(names)} gradients over devices, the edited "
            f"plan names {len(given)}; only in one of them: {', '.join(differ[:4])}."
        )
    for name, site in zip(names, found, strict=True):
        decision = given[name]
        if (decision.value, decision.shape) != (site.value, site.shape):
            raise PlanError(
                f"gradients: '{name}' is value {site.value} of shape "
                f"{site.shape}, the edited plan says {decision.value} of shape "
                f"{decision.shape}."
            )
        _check_codec(name, site, decision.codec)


def _check_codec(name: str, site: Site, text: str) -> None:
    if not text:
        return
    try:
        why = site.refuses(parse_codec(text))
    except ValueError as error:
        raise PlanError(f"gradients: '{name}': {error}") from error
    if why:
        raise PlanError(
            f"gradients: '{name}' cannot be sent as '{text}': {why} Try another codec."
        )
