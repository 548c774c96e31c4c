"""Between assignments, which know the graph, and plans, which are plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment, CopyChoice
from autopar.layouts.layout import from_spec, to_spec
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.consistent import check_consistent
from autopar.plans import (
    SCHEMA,
    ClusterData,
    CopyDecision,
    NodeDecision,
    Plan,
    Predicted,
    Seconds,
    SolverReport,
    Spec,
    StagePlan,
)
from autopar.steps.analysis import Analysis
from autopar.steps.names import node_name, operator_name
from autopar.version import __version__

# Status of a plan whose layouts were not searched for.
GIVEN = "layouts as they were given"


def make_plan(analysis: Analysis, result: SearchResult) -> Plan:
    """Writes the best candidate of a search down as a plan."""
    best = result.best
    solution = best.solution
    predicted = Predicted(
        step_s=best.step_s,
        compute_s=best.compute_s,
        communication_s=best.communication_s,
        communication_bytes=best.communication_bytes,
        peak_memory_bytes=float(best.peak_memory_bytes),
    )
    solver = SolverReport(
        status=solution.status.value if result.searched else GIVEN,
        gap=float(max(0.0, solution.gap)) if result.searched else 0.0,
        seconds=result.seconds,
        cost=float(solution.cost),
        bound=float(solution.bound),
        meshes={str(m): c.step_s for m, c in result.tried if c is not None},
    )
    seconds = Seconds(
        trace=analysis.trace_s,
        graph=analysis.graph_s,
        solve=result.seconds,
        total=analysis.trace_s + analysis.graph_s + result.seconds,
    )
    return Plan(
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
        shapes={
            i.path: tuple(analysis.graph.values[i.value].shape)
            for i in analysis.graph.inputs
        },
    ).stamped()


def _stage(analysis: Analysis, best: Candidate) -> StagePlan:
    """The whole step on all devices."""
    names, sizes = best.pricer.mesh.names, best.pricer.sizes
    inputs, outputs = _interface(analysis, best.assignment, names)
    return StagePlan(
        name="step",
        devices=tuple(range(math.prod(sizes))),
        mesh={"axes": dict(zip(names, sizes, strict=True))},
        inputs=inputs,
        outputs=outputs,
        nodes=_node_decisions(analysis, best.assignment, names),
        copies=_copy_decisions(analysis, best.assignment, names),
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


def check_plan(analysis: Analysis, plan: Plan) -> None:
    """Checks that a plan was made for this step.

    Raises:
      PlanError: it was made for another one; the message says what differs. Or it
        is inconsistent.
    """
    if plan.fingerprint == analysis.fingerprint:
        check_consistent(analysis, plan)
        return
    have = {i.path for i in analysis.graph.inputs}
    want = set(plan.inputs)
    differ = sorted(have ^ want)
    what = (
        f"the plan has {len(want)} inputs, the step has {len(have)}; only in one of "
        f"them: {', '.join(differ[:4])}"
        if differ
        else "the inputs have the same names; shapes, dtypes or operators differ"
    )
    raise PlanError(
        f"the plan belongs to another step ({plan.fingerprint}, not "
        f"{analysis.fingerprint}): {what}. Make a new plan with autopar.plan."
    )


def restore(analysis: Analysis, plan: Plan) -> Assignment:
    """Turns a plan back into an assignment of the step's graph.

    Raises:
      PlanError: the plan belongs to another step or is inconsistent.
    """
    check_plan(analysis, plan)
    names = plan.axis_names
    copies = {
        ((c.producer, c.slot), c.backward): CopyChoice(
            from_spec(c.axes, names), c.reuse
        )
        for c in plan.copies
    }
    assignment = Assignment(
        analysis.graph,
        analysis.contraction,
        analysis.sources,
        plan.axis_sizes,
        tuple(from_spec(n.axes, names) for n in plan.nodes),
        copies,
        analysis.deferrals,
        {g.value: g.codec for g in plan.gradients if g.codec},
    )
    for given in analysis.graph.inputs:
        stored = to_spec(assignment.home_layout(given.value), names)
        if plan.inputs[given.path] != stored:
            raise PlanError(
                f"the plan contradicts itself: input '{given.path}' is "
                f"{plan.inputs[given.path]}, its node says {stored}. To change a "
                "layout, plan again with pins=: autopar.plan(..., pins={...})."
            )
    return assignment
