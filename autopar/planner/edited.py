"""Applies the user's edits to a plan and computes the costs again.

Edited layouts of inputs take precedence: the planner plans again all layouts that
depend on these inputs. Other edits are applied unchanged if they fit the step. No edit
is ignored. An edit that cannot be applied is an error that names the edit
(docs/plans.md has the table).
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
from autopar.planner.codecs.sites import Site, sites
from autopar.planner.hints import pin_restriction
from autopar.planner.record import (
    another_step,
    assignment_of,
    check_consistent,
    make_plan,
    restore,
    split_as,
)
from autopar.planner.search import plan_mesh, search, search_of_one
from autopar.plans import Plan
from autopar.plans.specs import spec_of, spec_text
from autopar.steps.analysis import Analysis

# The fields that a user may edit. After any edit the costs are computed again.
EDITABLE = (
    "inputs", "nodes", "copies", "gradients", "sums_each_microbatch", "predicted",
    "cluster",
)  # fmt: skip
# Reasons why the other fields may not be edited, by name of the field.
_OTHER_MESH = (
    "another mesh is another plan: make it with autopar.plan(..., axis_names=, "
    "max_axes=)"
)
_WHY_NOT = {
    "outputs": "carried state leaves as it came: edit the layout of its input",
    "devices": _OTHER_MESH,
    "mesh": _OTHER_MESH,
    "compression": "it says why gradients are sent as they are: edit their codecs",
    "microbatches": "other microbatches are another plan: make it with "
    "autopar.plan(..., microbatches=)",
    "replicas": "they are for clusters of unequal devices: make another plan with "
    "autopar.plan(..., microbatches=)",
    "local": "it says what is computed from each microbatch alone",
    "schedule": "there is one stage",
    "pipeline": "there is one stage",
    "rematerialisation": "it says which modules the layers of remat have",
    "remat": "other layers to compute again are another plan: make it with "
    "autopar.plan(..., remat=)",
    "name": "it names the only stage",
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
    if len(plan.stages) > 1:
        raise PlanError(
            f"the plan's {', '.join(parts)} was edited, and edits of plans of several "
            "stages are not carried out. Make another plan with autopar.plan(..., "
            "stages=, schedule=, microbatches=)."
        )
    if plan.replicas:
        raise PlanError(
            f"the plan's {', '.join(parts)} was edited, and edits of plans with "
            "replicas are not carried out. Make another plan with autopar.plan(..., "
            "pins=, microbatches=)."
        )
    _check_parts(parts)
    analysis = split_as(analysis, plan)
    if plan.fingerprint != analysis.fingerprint:
        raise another_step(analysis, plan)
    check_consistent(analysis, plan)
    where = plan.cluster.read() if cluster is None else cluster
    if "cluster" in parts:
        _check_text(plan)
    if "inputs" in parts:
        result, said = _with_inputs(analysis, plan, where, seconds)
    else:
        result = _as_stated(analysis, plan, where)
        said = f"{', '.join(parts)} changed by hand"
    made = _with_codecs_of(analysis, result, plan, edited="gradients" in parts)
    return with_status(
        msgspec.structs.replace(made, target=plan.target, options=plan.options),
        f"edited: {said}; {made.solver.status}",
    )


def with_status(plan: Plan, status: str) -> Plan:
    """The plan with another text on how it was found."""
    solver = msgspec.structs.replace(plan.solver, status=status)
    return msgspec.structs.replace(plan, solver=solver)


def _check_parts(parts: tuple[str, ...]) -> None:
    """Raises `PlanError` for a field that cannot be edited, or not together with
    another field.
    """
    for part in parts:
        if part not in EDITABLE:
            why = _WHY_NOT.get(part, "it is a fact of the step")
            raise PlanError(f"the plan's {part} was edited, and cannot be: {why}.")
    both = [part for part in ("nodes", "copies") if part in parts]
    if "inputs" in parts and both:
        raise PlanError(
            f"the plan's inputs and {' and '.join(both)} were both edited; the layouts "
            f"of inputs decide the rest: edit the inputs, or the {both[0]}."
        )


def _check_text(plan: Plan) -> None:
    text = str(plan.cluster.read())
    if text != plan.cluster.text:
        raise PlanError(
            f"the plan's cluster.text is '{plan.cluster.text}', its cluster.data is "
            f"'{text}': the data counts, so change it and the text alike."
        )


def _with_inputs(
    analysis: Analysis, plan: Plan, cluster: Cluster, seconds: float | None
) -> tuple[SearchResult, str]:
    """Plans again with the inputs' layouts; also returns a text that lists the edited
    inputs.
    """
    stated = assignment_of(analysis, plan)
    wanted = _wanted_layouts(analysis, plan)
    edited = {v: w for v, w in wanted.items() if stated.home_layout(v) != w}
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
        analysis, cluster, meshes=[mesh], seconds=seconds, restriction=lambda _: allowed
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
    assignment = restore(analysis, plan)
    _check_nodes(analysis, plan, assignment)
    result = search_of_one(analysis, cluster, assignment, plan.axis_names)
    if not math.isfinite(result.best.solution.cost):
        raise _impossible(plan, result.best)
    check_fits(result.best)
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
    """The error that names two decisions which exclude each other."""
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


def _with_codecs_of(
    analysis: Analysis, result: SearchResult, plan: Plan, *, edited: bool
) -> Plan:
    """Makes a plan from layouts that a search found and the codecs of another plan.

    Args:
      analysis: the step.
      result: the layouts.
      plan: the plan that names the codec of each gradient.
      edited: whether the user changed the codecs of ``plan``. After a change, each
        gradient must use its codec. Without a change, a gradient that its codec cannot
        send is sent without a codec.

    Raises:
      PlanError: the user changed the codecs, and a codec cannot send its gradient.
    """
    if not plan.gradients:
        return make_plan(analysis, result)
    best = result.best
    if edited:
        mesh = best.pricer.mesh.axes
        found = sites(analysis, best.assignment, mesh, best.collectives)
        _check_given(plan, found)
    asked = CodecRequest(EDITED, None, 0.0, plan, {})
    best = sent_as_asked(analysis, best, asked)
    assert best.sending is not None
    made = make_plan(analysis, dataclasses.replace(result, best=best), asked)
    if edited:
        return made
    compression = msgspec.structs.replace(plan.compression, error=best.sending.error)
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


def _check_given(plan: Plan, found: Sequence[Site]) -> None:
    """Raises `PlanError` if an edited codec cannot send its gradient."""
    given = {g.name: g for g in plan.gradients}
    names = {site.name for site in found}
    if differ := sorted(names ^ set(given)):
        raise PlanError(
            f"gradients: the plan sums {len(names)} gradients over devices, the edited "
            f"plan names {len(given)}; only in one of them: {', '.join(differ[:4])}."
        )
    for site in found:
        decision = given[site.name]
        if (decision.value, decision.shape) != (site.value, site.shape):
            raise PlanError(
                f"gradients: '{site.name}' is value {site.value} of shape "
                f"{site.shape}, the edited plan says {decision.value} of shape "
                f"{decision.shape}."
            )
        _check_codec(site, decision.codec)


def _check_codec(site: Site, text: str) -> None:
    if not text:
        return
    try:
        why = site.refuses(parse_codec(text))
    except ValueError as error:
        raise PlanError(f"gradients: '{site.name}': {error}") from error
    if why:
        raise PlanError(
            f"gradients: '{site.name}' cannot be sent as '{text}': {why} Try another "
            "codec."
        )
