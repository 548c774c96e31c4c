"""Converts assignments, which refer to the graph, to plans, which are plain data, and
back.

A user may have edited the file of a plan, so `restore` checks each decision against the
step. If one does not fit, it refuses the whole plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from autopar.cost.breakdown import interval_s
from autopar.errors import PlanError
from autopar.garbage import collector_paused
from autopar.layouts.assignment import Assignment, CopyChoice, apart_bytes
from autopar.layouts.gathering import GatherCodec
from autopar.layouts.layout import from_spec, to_spec
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.choose import (
    CodecRequest,
    describe_compression,
    gradients_s,
    record_decisions,
    warn_if_unused,
)
from autopar.planner.codecs.gathers import (
    NO_FASTER,
    check_gather_codec,
    gathered,
    why_exact,
)
from autopar.planner.scheme import worth_of
from autopar.plans import (
    GATHER,
    RING,
    SCHEMA,
    AttentionDecision,
    ClusterData,
    Compression,
    CopyDecision,
    GatherDecision,
    NodeDecision,
    Plan,
    Predicted,
    Seconds,
    SolverReport,
    Spec,
    StagePlan,
)
from autopar.plans.specs import spec_text
from autopar.steps.analysis import Analysis
from autopar.steps.for_devices import for_devices
from autopar.steps.offload import keep_on_host
from autopar.steps.padding import with_row_multiple
from autopar.steps.program_text import node_name, operator_name
from autopar.steps.remat import modules_again, rematerialise
from autopar.steps.uses import ValueClass, value_class
from autopar.units import seconds_text
from autopar.version import __version__
from autopar_passes.graph.roles import InputRole
from autopar_passes.replay.replicas import AXIS

# The solver status that is recorded for a plan whose layouts the user gave.
GIVEN = "layouts as they were given"


@collector_paused()
def make_plan(
    analysis: Analysis, result: SearchResult, codecs: CodecRequest | None = None
) -> Plan:
    """Records the best candidate of a search as a plan.

    Args:
      analysis: the step.
      result: the search.
      codecs: the user's request about codecs, if gradients have codecs.
    """
    best = result.best
    pricer = dataclasses.replace(best.pricer, mesh=best.mesh)
    named = dataclasses.replace(best.estimate, pricer=pricer)
    solution = result.report
    low_s, high_s = interval_s(best.cost, best.pricer.cluster.device)
    predicted = Predicted(
        step_s=best.step_s,
        compute_s=best.compute_s,
        communication_s=best.communication_s,
        hidden_s=best.hidden_s,
        communication_bytes=best.communication_bytes,
        peak_memory_bytes=float(best.held_bytes),
        low_s=low_s,
        high_s=high_s,
    )
    solver = SolverReport(
        status=solution.status.value if result.searched else GIVEN,
        gap=min(max(0.0, float(solution.gap)), 1.0) if result.searched else 0.0,
        seconds=result.seconds,
        cost=float(solution.cost),
        # A search that ended early may give a negative bound. Zero is then the better
        # bound.
        bound=max(0.0, float(solution.bound)),
        meshes={str(c.mesh): c.step_s for _, c in result.tried if c is not None},
    )
    seconds = Seconds(
        trace=analysis.trace_s,
        graph=analysis.graph_s,
        solve=result.seconds,
        total=analysis.trace_s + analysis.graph_s + result.seconds,
    )
    made = Plan(
        schema=SCHEMA,
        version=__version__,
        cluster=ClusterData.of(best.pricer.cluster),
        stages=(_stage(analysis, best),),
        predicted=predicted,
        solver=solver,
        seconds=seconds,
        roles={i.path: i.role.value for i in analysis.graph.inputs},
        unsupported_ops=analysis.graph.unsupported,
        assumed=analysis.graph.assumed_trips,
        fingerprint=analysis.fingerprint,
        structure=analysis.structure,
        microbatches=analysis.microbatches,
        row_multiple=analysis.row_multiple,
        row_blocks=analysis.row_blocks,
        row_capacity=analysis.row_capacity,
        attention_kernel=analysis.attention_kernel,
        loss_blocks=analysis.loss_blocks,
        local=() if analysis.split is None else analysis.split.local,
        remat=analysis.remat,
        offload=analysis.offload,
        shapes={
            i.path: tuple(analysis.graph.values[i.value].shape)
            for i in analysis.graph.inputs
        },
        worth=worth_of(named, best.step_s),
    )
    if codecs is not None:
        made = msgspec.structs.replace(
            made.with_stage(gradients=record_decisions(best, codecs)),
            compression=_describe_compression(analysis, result, codecs),
        )
    return made.with_checks()


def _describe_compression(
    analysis: Analysis, result: SearchResult, codecs: CodecRequest
) -> Compression:
    """Says why these codecs were chosen, and what they gain."""
    best, more = result.best, ""
    before_s = best.plain_s
    if codecs.sent is None and best.sending is not None and best.sending.sites:
        told: list[str] = []
        if result.before_s < (1 - 1e-6) * best.plain_s:
            before_s = result.before_s
            told.append(f"in other layouts; {seconds_text(best.plain_s)} in these")
        if codecs.chooses:
            told.append(f"{seconds_text(gradients_s(best))} of it gradients")
        more = f" ({', '.join(told)})" if told else ""
    parts = [(analysis, best)]
    warn_if_unused(parts, codecs)
    return describe_compression(parts, codecs, before_s, best.step_s, more)


def _stage(analysis: Analysis, best: Candidate) -> StagePlan:
    """Returns the record of the whole step as one stage on all devices."""
    names, sizes = best.mesh.names, best.mesh.sizes
    inputs, outputs = _interface(analysis, best.assignment, names)
    return StagePlan(
        name="step",
        devices=tuple(range(math.prod(sizes))),
        mesh={"axes": dict(zip(names, sizes, strict=True))},
        inputs=inputs,
        outputs=outputs,
        nodes=_node_decisions(analysis, best.assignment, names),
        copies=_copy_decisions(analysis, best.assignment, names),
        gathers=_gather_decisions(analysis, best, names),
        attention=_attention_decisions(analysis, best.assignment),
        rematerialisation=modules_again(analysis),
        sums_each_microbatch=best.assignment.sums_each_microbatch,
    )


def _interface(
    analysis: Analysis, assignment: Assignment, names: Sequence[str]
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    inputs = {
        i.path: to_spec(assignment.home_layout(i.value), names)
        for i in analysis.graph.inputs
    }
    outputs: dict[str, Spec] = {}
    for position, path in enumerate(analysis.output_paths):
        layout = assignment.output(position)
        if layout is not None:
            outputs[path] = to_spec(layout, names)
    return inputs, outputs


def _node_decisions(
    analysis: Analysis, assignment: Assignment, names: Sequence[str]
) -> tuple[NodeDecision, ...]:
    members = Counter(op.class_index for op in analysis.graph.operators)
    return tuple(
        NodeDecision(
            name=node_name(analysis, node),
            kind=node.kind,
            factors=tuple(size for size, _ in node.factors),
            axes=to_spec(strategy, names),
            count=members[node.root],
        )
        for node, strategy in zip(
            analysis.contraction.nodes, assignment.strategies, strict=True
        )
    )


def _copy_decisions(
    analysis: Analysis, assignment: Assignment, names: Sequence[str]
) -> tuple[CopyDecision, ...]:
    return tuple(
        CopyDecision(
            name=operator_name(analysis, producer),
            producer=producer,
            slot=slot,
            backward=backward,
            axes=to_spec(choice.layout, names),
            reuse=choice.reuse,
        )
        for ((producer, slot), backward), choice in assignment.copies.items()
    )


def _gather_decisions(
    analysis: Analysis, best: Candidate, names: Sequence[str]
) -> tuple[GatherDecision, ...]:
    sent: dict[ValueClass, float] = defaultdict(float)
    dense: dict[ValueClass, float] = defaultdict(float)
    for c in best.collectives:
        if c.code is not None:
            key = value_class(analysis.contraction, c.value)
            whole = best.pricer.sent_bytes(
                c.step, analysis.graph.values[c.value].nbytes
            )
            sent[key] += c.sent_bytes(best.pricer)
            dense[key] += c.trips * whole
    known = best.assignment.gathers
    coded = {(*key, chosen.codec, ""): chosen.axes for key, chosen in known.items()}
    exact = {} if best.pricer.gathers is None else gathered(best.assignment)
    for key, (_, why) in exact.items():
        if key not in known:
            coded[*key, "", why or NO_FASTER] = frozenset()
    return tuple(
        GatherDecision(
            name=operator_name(analysis, producer),
            producer=producer,
            slot=slot,
            codec=codec,
            axes=tuple(names[a] for a in sorted(axes)),
            reason=reason,
            wire_bytes=sent[producer, slot],
            dense_bytes=dense[producer, slot],
        )
        for (producer, slot, codec, reason), axes in coded.items()
    )


def _attention_decisions(
    analysis: Analysis, assignment: Assignment
) -> tuple[AttentionDecision, ...]:
    nodes = analysis.contraction.nodes
    return tuple(
        AttentionDecision(
            name=node_name(analysis, nodes[node]),
            node=node,
            keys=GATHER if node in assignment.gathered else RING,
        )
        for node, factor in _shared_sequences(analysis).items()
        if assignment.strategies[node][factor]
    )


def _shared_sequences(analysis: Analysis) -> dict[int, int]:
    """The nodes of attention kernels whose devices may share keys and values.

    Each node comes with its factor that is the sequence.
    """
    contraction = analysis.contraction
    return {
        contraction.node_of[op.class_index]: own
        for op in analysis.graph.operators
        for e in op.rule.exchanges
        if e.around
        and (own := contraction.node(op).members[op.class_index][e.factor]) >= 0
    }


def split_as(analysis: Analysis, plan: Plan) -> Analysis:
    """Returns the step as a plan runs it.

    The step has the plan's microbatches and rematerialised layers. Equal matrix
    products of the optimizer update are computed together, in batches that suit the
    plan's number of devices.

    Raises:
      PlanError: the step cannot be split or rewritten in this way.
    """
    if len(plan.stages) > 1:
        return analysis
    analysed = analysis.microbatches, analysis.remat, analysis.row_multiple
    if (plan.microbatches, plan.remat, plan.row_multiple) != analysed:
        analysis = with_row_multiple(analysis, plan.row_multiple)
        couple = bool(plan.local)
        analysis = rematerialise(analysis, plan.remat, plan.microbatches, couple=couple)
    return as_planned(keep_on_host(analysis, plan.offload), plan)


def as_planned(analysis: Analysis, plan: Plan) -> Analysis:
    """Returns a step with its microbatches, rewritten for the devices of a plan.

    Raises:
      PlanError: the step cannot be rewritten in this way.
    """
    devices = 1 if plan.replicas else math.prod(plan.axis_sizes)
    return for_devices(
        analysis,
        devices,
        plan.row_blocks,
        plan.row_capacity,
        attention_kernel=plan.attention_kernel,
        loss_blocks=plan.loss_blocks,
    )


def check_plan(analysis: Analysis, plan: Plan) -> None:
    """Checks that a plan was made for this step.

    Raises:
      PlanError: the plan was made for another step (the message says what differs), or
        the plan is inconsistent.
    """
    plan.check_one_stage()
    analysis = split_as(analysis, plan)
    if plan.fingerprint != analysis.fingerprint:
        raise another_step(analysis, plan)
    check_consistent(analysis, plan)


def another_step(analysis: Analysis, plan: Plan) -> PlanError:
    """Returns the error for a plan of another step; the error says what differs."""
    have = {i.path for i in analysis.graph.inputs}
    want = set(plan.shapes or plan.inputs)
    differ = sorted(have ^ want)
    what = _differing_shapes(analysis, plan)
    if differ:
        what = (
            f"the plan has {len(want)} inputs, the step has {len(have)}; only in one "
            f"of them: {', '.join(differ[:4])}"
        )
    elif plan.structure == analysis.structure:
        what = (
            "only the batch differs; layouts=plan in place of plan= keeps the "
            "layouts (autopar plan --layouts PLAN)"
        )
    elif plan.structure and only_batch_differs(analysis, plan):
        what = (
            "at this size of the batch, other arrays are large enough to have a layout"
        )
    return PlanError(
        f"the plan belongs to another step ({plan.fingerprint}, not "
        f"{analysis.fingerprint}): {what}. Make a new plan with autopar.plan."
    )


def _differing_shapes(analysis: Analysis, plan: Plan) -> str:
    """Text that lists the inputs whose shapes differ between a step and a plan.

    The inputs of both have the same names.
    """
    values = analysis.graph.values
    shapes = {i.path: tuple(values[i.value].shape) for i in analysis.graph.inputs}
    found = [
        f"'{path}' is {list(shape)} in the step and {list(plan.shapes[path])} in the "
        "plan"
        for path, shape in shapes.items()
        if shape != tuple(plan.shapes.get(path, shape))
    ]
    if not found:
        return (
            "it is another program: the inputs have the same names and shapes, and "
            "dtypes or operators differ"
        )
    more = f", and {len(found) - 1} other inputs differ" if len(found) > 1 else ""
    return f"{found[0]}{more}"


def only_batch_differs(analysis: Analysis, plan: Plan) -> bool:
    """Whether a step has the same inputs as a plan, except for the batch size."""
    differs = False
    shapes = {i.path: i for i in analysis.graph.inputs}
    if shapes.keys() != plan.shapes.keys():
        return False
    for path, given in shapes.items():
        shape, planned = analysis.graph.values[given.value].shape, plan.shapes[path]
        batch = given.role is InputRole.BATCH and len(shape) == len(planned)
        if tuple(shape) != tuple(planned):
            if not batch:
                return False
            differs = True
    return differs


def assignment_of(analysis: Analysis, plan: Plan) -> Assignment:
    """The assignment that a plan's decisions describe: nodes, copies and codecs.

    The layouts of inputs in the plan follow from these decisions; they are not read.
    """
    names = plan.axis_names
    copies = {
        ((c.producer, c.slot), c.backward): CopyChoice(
            from_spec(c.axes, names), c.reuse
        )
        for c in plan.copies
    }
    cluster = plan.cluster.read()
    device = (cluster.groups[0] if cluster.groups else cluster).device
    return Assignment(
        analysis,
        plan.axis_sizes,
        tuple(from_spec(n.axes, names) for n in plan.nodes),
        copies,
        {g.value: g.codec for g in plan.gradients if g.codec},
        sums_each_microbatch=plan.stages[0].sums_each_microbatch,
        apart_bytes=apart_bytes(device, math.prod(plan.axis_sizes)),
        replicas=(AXIS,) if plan.replicas else (),
        gathers={
            (g.producer, g.slot): GatherCodec(
                g.codec, frozenset(names.index(a) for a in g.axes)
            )
            for g in plan.stage.gathers
            if g.codec
        },
        gathered=frozenset(d.node for d in plan.stage.attention if d.keys == GATHER),
    )


def restore(analysis: Analysis, plan: Plan) -> Assignment:
    """Turns a plan back into an assignment of the step's graph.

    Raises:
      PlanError: the plan belongs to another step or is inconsistent.
    """
    analysis = split_as(analysis, plan)
    check_plan(analysis, plan)
    return stated_assignment(analysis, plan)


def stated_assignment(analysis: Analysis, plan: Plan) -> Assignment:
    """Returns the assignment of a plan's decisions, compared with its inputs' layouts.

    Args:
      analysis: the step, or the stage of which the plan consists.
      plan: a plan of one stage whose decisions fit the analysis (`check_decisions`).

    Raises:
      PlanError: the layouts of inputs or outputs contradict the decisions.
    """
    assignment = assignment_of(analysis, plan)
    inputs, outputs = _interface(analysis, assignment, plan.axis_names)
    for given in analysis.graph.inputs:
        if plan.inputs[given.path] != inputs[given.path]:
            raise _contradiction(
                f"input '{given.path}' is {spec_text(plan.inputs[given.path])}",
                f"{_home_name(analysis, plan, given.value)} says "
                f"{spec_text(inputs[given.path])}",
            )
    for path in sorted(plan.outputs.keys() | outputs.keys()):
        said, is_ = plan.outputs.get(path), outputs.get(path)
        if said != is_:
            raise _contradiction(
                f"output '{path}' is {'absent' if said is None else spec_text(said)}",
                f"it leaves as {'nothing' if is_ is None else spec_text(is_)}",
            )
    return assignment


def _home_name(analysis: Analysis, plan: Plan, value: int) -> str:
    home = analysis.contraction.homes.get(value)
    return "its size" if home is None else f"node '{plan.nodes[home.node].name}'"


def _contradiction(one: str, other: str) -> PlanError:
    return PlanError(
        f"the plan contradicts itself: {one}, {other}. To change a layout, edit the "
        "inputs of a plan that autopar.plan made, or plan again with "
        "autopar.plan(..., pins={...})."
    )


def check_consistent(analysis: Analysis, plan: Plan) -> None:
    """Checks the mesh, and each decision of a plan, against the step's graph.

    Raises:
      PlanError: the plan does not fit; the message names the first mismatch.
    """
    _check_runs(plan)
    check_decisions(analysis, plan)


def check_decisions(analysis: Analysis, plan: Plan) -> None:
    """As `check_consistent`, for a stage on any devices: the mesh is not checked.

    Args:
      analysis: the step, or the stage of which the plan consists.
      plan: a plan of one stage.

    Raises:
      PlanError: the plan does not fit; the message names the first mismatch.
    """
    axes = plan.mesh["axes"]
    nodes = analysis.contraction.nodes
    if len(nodes) != len(plan.nodes):
        raise _wrong(f"it decides {len(plan.nodes)} nodes, the step has {len(nodes)}")
    for node, decision in zip(nodes, plan.nodes, strict=True):
        _check_node([size for size, _ in node.factors], decision, axes)
    for copy in plan.copies:
        if (copy.producer, copy.slot) not in analysis.sources:
            raise _wrong(f"nothing reads the copy '{copy.name}'")
        _check_axes(copy.name, copy.axes, axes)
    for gather in (g for g in plan.stage.gathers if g.codec):
        source = analysis.sources.get((gather.producer, gather.slot))
        if source is None:
            raise _wrong(f"nothing reads the gathered '{gather.name}'")
        if why := why_exact(analysis, source.example):
            raise _wrong(f"'{gather.name}' cannot be gathered as codes: {why}")
        check_gather_codec(gather.codec, f"the codec of '{gather.name}'")
        _check_axes(gather.name, (gather.axes,), axes)
    shared = _shared_sequences(analysis) if plan.stage.attention else {}
    for decision in plan.stage.attention:
        if decision.node not in shared:
            raise _wrong(
                f"node {decision.node} ('{decision.name}') is no attention kernel "
                "whose devices share keys and values"
            )
        if decision.keys not in (RING, GATHER):
            raise _wrong(
                f"the keys of '{decision.name}' are '{decision.keys}', and may be "
                f"'{RING}' or '{GATHER}'"
            )
    if plan.stage.rematerialisation != modules_again(analysis):
        raise _wrong("it computes other modules again than its layers have")
    if list(plan.inputs) != [i.path for i in analysis.graph.inputs]:
        raise _wrong("its inputs are not those of the step")


def _check_runs(plan: Plan) -> None:
    """Raises `PlanError` if a valid plan has a decision that cannot be run yet."""
    stage = plan.stage
    if stage.devices != tuple(range(len(stage.devices))):
        raise PlanError(
            f"the plan is for devices {stage.devices} of its cluster, and plans of one "
            "stage run on the first devices, in order."
        )


def _check_node(
    factors: Sequence[int], decision: NodeDecision, axes: dict[str, int]
) -> None:
    if list(decision.factors) != list(factors) or len(decision.axes) != len(factors):
        raise _wrong(
            f"'{decision.name}' has factors {tuple(factors)}, the plan gives axes "
            f"{decision.axes} to {decision.factors}"
        )
    _check_axes(decision.name, decision.axes, axes)
    for size, names in zip(factors, decision.axes, strict=True):
        parts = math.prod(axes[n] for n in names)
        if size % parts:
            raise _wrong(f"'{decision.name}': {size} cannot be split {parts} ways")


def _check_axes(name: str, spec: Spec, axes: dict[str, int]) -> None:
    used = [n for names in spec for n in names]
    for n in used:
        if n not in axes:
            raise _wrong(f"'{name}': mesh axis '{n}' is not one of {', '.join(axes)}")
    if len(set(used)) < len(used):
        raise _wrong(f"'{name}': {spec} uses a mesh axis twice")


def _wrong(what: str) -> PlanError:
    return PlanError(
        f"the plan does not fit its step: {what}. It may have been edited; make a new "
        "plan with autopar.plan."
    )
