"""Explanations of a plan: the cost of a layout, and the costs of alternatives."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.estimate import all_collectives, estimate
from autopar.cost.pricer import Pricer
from autopar.cost.rows import exchanges
from autopar.cost.traffic import Collective
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards, to_spec
from autopar.planner.codecs.gathers import gathers_of
from autopar.planner.proposals import Proposal
from autopar.planner.record import assignment_of, restore
from autopar.planner.replicas import replica_pricer, slowest_of
from autopar.planner.search import plan_mesh
from autopar.plans import Plan, Spec
from autopar.plans.specs import matches_path
from autopar.reports.table import CollectiveRow, template
from autopar.steps.analysis import Analysis
from autopar.steps.microbatches import with_turns
from autopar.steps.program_text import array_name
from autopar.terminal import columns
from autopar.units import bytes_text, seconds_text
from autopar_passes.graph.operators import GraphInput
from autopar_passes.graph.roles import Role
from autopar_passes.layer_loops.split import whole_path

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan with its step and its communication.

    Attributes:
      analysis: the step.
      plan: the plan.
      assignment: the plan's layouts.
      pricer: the plan's mesh and cluster.
      collectives: all collectives of the plan.
      crossing: the collectives that reshard values received from other stages, or
        values to be sent to other stages.
    """

    analysis: Analysis
    plan: Plan
    assignment: Assignment
    pricer: Pricer
    collectives: tuple[Collective, ...]
    crossing: tuple[Collective, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutDecision:
    """The layout of one input, or of several inputs that share the decision.

    Attributes:
      node: the node of the planner's graph that stands for these inputs; None if the
        inputs have only one possible layout.
      inputs: the inputs that the user asked about.
      shared: number of inputs that share the decision.
      spec: the layout.
      nbytes: bytes of one of the unsharded arrays.
      shard_bytes: bytes of an array's shard on one device.
      collectives: the communication of all inputs that share the decision, and of their
        gradients and updates.
    """

    node: int | None
    inputs: tuple[GraphInput, ...]
    shared: int
    spec: Spec
    nbytes: int
    shard_bytes: float
    collectives: tuple[CollectiveRow, ...]


def bind_plan(
    analysis: Analysis, plan: Plan, cluster: Cluster, replica: int | None = None
) -> BoundPlan:
    """Combines a plan of one stage with its step.

    Args:
      analysis: the step.
      plan: the plan.
      cluster: the cluster of the plan.
      replica: number of the replica that the result describes, for a plan with
        replicas; None: the slowest replica.

    Raises:
      PlanError: the plan is for another step or cluster.
    """
    assignment = restore(analysis, plan)
    if not plan.replicas:
        pricer = Pricer(cluster, mesh_of(plan, cluster), gathers=gathers_of(plan))
        collectives = tuple(all_collectives(assignment, pricer))
        return BoundPlan(assignment.analysis, plan, assignment, pricer, collectives)
    number = slowest_of(plan) if replica is None else replica
    own, pricer = plan.replicas[number], replica_pricer(plan, cluster, number)
    view = with_turns(assignment.analysis, own.microbatches)
    return bind_part(
        plan, assignment_of(view, plan), pricer, own.step_s, own.peak_memory_bytes
    )


def bind_part(
    plan: Plan,
    assignment: Assignment,
    pricer: Pricer,
    step_s: float,
    peak_memory_bytes: float,
    crossing: Sequence[Collective] = (),
) -> BoundPlan:
    """Combines the part of a plan that some devices run with the predictions for it.

    Args:
      plan: the plan, with the stage of these devices as its only stage.
      assignment: the layouts of the stage or replica.
      pricer: the mesh and cluster of the stage or replica.
      step_s: predicted seconds of the part's work and communication in a step.
      peak_memory_bytes: predicted bytes on one device of the part.
      crossing: as for `BoundPlan`.
    """
    cost = estimate(assignment, pricer).cost
    predicted = msgspec.structs.replace(
        plan.predicted,
        step_s=step_s,
        compute_s=min(step_s, cost.work_s + cost.contention_s),
        peak_memory_bytes=peak_memory_bytes,
    )
    found = [*all_collectives(assignment, pricer), *crossing]
    return BoundPlan(
        assignment.analysis,
        msgspec.structs.replace(plan, predicted=predicted),
        assignment,
        pricer,
        tuple(sorted(found, key=lambda c: c.operator)),
        tuple(crossing),
    )


def mesh_of(plan: Plan, cluster: Cluster) -> MeshShape:
    """The plan's mesh on a cluster.

    Raises:
      PlanError: the cluster has no such mesh.
    """
    return plan_mesh(cluster, plan.axis_names, plan.axis_sizes)


def group_collectives(
    bound: BoundPlan, collectives: Sequence[Collective]
) -> tuple[CollectiveRow, ...]:
    """Groups equal collectives of repeated layers; the longest come first."""
    groups: dict[tuple[str, ...], list[tuple[str, Collective]]] = defaultdict(list)
    names = bound.plan.axis_names
    for collective in collectives:
        array = array_name(bound.analysis, collective.value)
        phase = bound.analysis.graph.operators[collective.operator].role.value
        axes = tuple(names[a] for a in collective.step.axes)
        key = (template(array), phase, collective.step.kind, *axes)
        groups[key].append((array, collective))
    rows = [
        CollectiveRow(
            kind=kind,
            axes=tuple(axes),
            arrays=tuple(dict.fromkeys(array for array, _ in found)),
            phase=phase,
            trips=sum(c.trips for _, c in found),
            sent_bytes=sum(c.sent_bytes(bound.pricer) for _, c in found),
            seconds=sum(c.seconds(bound.pricer) for _, c in found),
        )
        for (_, phase, kind, *axes), found in groups.items()
    ]
    rows += _coding_rows(bound, collectives)
    return tuple(sorted(rows, key=lambda r: -r.seconds))


def communication_rows(bound: BoundPlan) -> tuple[CollectiveRow, ...]:
    """All communication of a plan, also the exchange of rows before the step."""
    rows = [*group_collectives(bound, bound.collectives)]
    names = bound.plan.axis_names
    rows += [
        CollectiveRow(
            kind="exchange of rows",
            axes=tuple(names[a] for a in found.axes),
            arrays=found.paths,
            phase="before",
            trips=1.0,
            sent_bytes=found.sent_bytes(bound.pricer),
            seconds=found.seconds(bound.pricer),
        )
        for found in exchanges(bound.assignment, bound.pricer)
    ]
    return tuple(sorted(rows, key=lambda r: -r.seconds))


def _coding_rows(
    bound: BoundPlan, collectives: Sequence[Collective]
) -> Iterator[CollectiveRow]:
    """Yields a row for each codec of gathers, with its encoding and decoding."""
    groups: dict[str, list[Collective]] = defaultdict(list)
    for c in collectives:
        if c.code is not None:
            groups[c.code.codec].append(c)
    for codec, found in groups.items():
        names = (array_name(bound.analysis, c.value) for c in found)
        yield CollectiveRow(
            kind=f"encode as {codec}",
            axes=(),
            arrays=tuple(dict.fromkeys(names)),
            phase="gathers",
            trips=sum(c.trips for c in found),
            sent_bytes=0.0,
            seconds=sum(c.coding_s(bound.pricer) for c in found),
        )


def input_decisions(
    stages: Sequence[BoundPlan], pattern: str
) -> list[tuple[int, LayoutDecision]]:
    """The layouts of the inputs that a pattern matches, grouped by decision.

    Pieces of one array on several stages have one layout, and are returned once.

    Args:
      stages: the stages as plans.
      pattern: a pattern of paths. An array of stacked layers matches by its own path.

    Returns:
      The number of a stage, and a decision of it.

    Raises:
      PlanError: the pattern matches no input.
    """
    out: list[tuple[int, LayoutDecision]] = []
    seen: set[str] = set()
    for number, bound in enumerate(stages):
        groups: dict[int | None, list[GraphInput]] = {}
        for given in bound.analysis.graph.inputs:
            whole = whole_path(given.path)
            if matches_path(given.path, pattern) and whole not in seen:
                groups.setdefault(_node_of(bound, given), []).append(given)
        for node, inputs in groups.items():
            out.append((number, _decision(bound, node, inputs)))
            seen.update(filter(None, (whole_path(i.path) for i in inputs)))
    if not out:
        paths = [i.path for bound in stages for i in bound.analysis.graph.inputs]
        raise PlanError(
            f"'{pattern}' matches no input; they are named like {', '.join(paths[:3])}."
        )
    return out


def _node_of(bound: BoundPlan, given: GraphInput) -> int | None:
    home = bound.analysis.contraction.homes.get(given.value)
    return None if home is None else home.node


def _decision(
    bound: BoundPlan, node: int | None, inputs: Sequence[GraphInput]
) -> LayoutDecision:
    graph = bound.analysis.graph
    layout = bound.assignment.home_layout(inputs[0].value)
    nbytes = graph.values[inputs[0].value].nbytes
    shared = sum(_node_of(bound, i) == node for i in graph.inputs)
    touching = [] if node is None else _touching(bound, node)
    return LayoutDecision(
        node=node,
        inputs=tuple(inputs),
        shared=shared,
        spec=to_spec(layout, bound.plan.axis_names),
        nbytes=nbytes,
        shard_bytes=nbytes / shards(layout, bound.pricer.sizes),
        collectives=group_collectives(bound, touching),
    )


def _touching(bound: BoundPlan, node: int) -> list[Collective]:
    """The collectives of a node's values, and of its inputs' gradients and updates."""
    analysis = bound.analysis
    homes = analysis.contraction.homes
    values = {value for value, home in homes.items() if home.node == node}
    for given in analysis.graph.inputs:
        if _node_of(bound, given) == node:
            values |= _updates(analysis, given)
    return [c for c in bound.collectives if c.value in values]


def _updates(analysis: Analysis, given: GraphInput) -> set[int]:
    """The values that lead from an input's gradient to its updated value.

    Only values of the input's size are returned.

    The search starts at the updated value and goes back to operands. It ends at the
    first operator that reduces, whose result is the gradient.
    """
    graph = analysis.graph
    start = graph.outputs[given.output] if given.output >= 0 else None
    found: set[int] = set()
    waiting = [] if start is None else [start]
    while waiting:
        value = waiting.pop()
        if value in found or graph.values[value].size != graph.values[given.value].size:
            continue
        found.add(value)
        op = analysis.contraction.producer[value]
        if op.role is not Role.FORWARD and not op.rule.reduced_factors:
            waiting.extend(v for v in op.inputs if v is not None)
    return found


_HEADING: tuple[str, ...] = (
    "",
    "proposed by",
    "mesh",
    "program",
    "step",
    "memory",
    "CPU",
    "",
)


def proposal_lines(proposals: Sequence[Proposal], plan: Plan) -> list[str]:
    """The search's proposals, in order; a star marks the one that became the plan.

    A proposal without a star may be faster, but may need too much memory according to
    the compiler.
    """
    step_s = plan.predicted.step_s
    judged = (p for p in proposals if p.step_s is not None)
    taken = next((p for p in judged if math.isclose(p.step_s or 0.0, step_s)), None)
    rows = [_HEADING]
    for one in proposals:
        step, memory = "", ""
        if one.step_s is not None:
            step, memory = seconds_text(one.step_s), bytes_text(one.peak_bytes)
        rows.append(
            (
                "*" if one is taken else "",
                one.proposer,
                one.mesh,
                one.program or "as written",
                step,
                memory,
                seconds_text(one.cpu_s),
                one.note,
            )
        )
    return columns(rows, right=(4, 5, 6))
