import math

import msgspec
import pytest
from checkout import GOLDEN
from pairwise import pairwise_s

from autopar.cli.target import load
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.problem import formulate
from autopar.planner.record import restore
from autopar.plans import Plan
from autopar.reports.alternatives import Trials, alternatives, plan_choices, trials_of
from autopar.reports.explain import (
    BoundPlan,
    LayoutDecision,
    array_name,
    bind_plan,
    group_collectives,
    input_decisions,
    mesh_of,
)
from autopar.steps.analysis import Analysis, analyse

KERNELS = "params/*/kernel"


def silent(_: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.parse("2x4:cpu")


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    workload = load(f"{GOLDEN / 'two_layers.py'}:workload", {})
    return analyse(workload.step, workload.args)


@pytest.fixture(scope="module")
def plan(analysis: Analysis, cluster: Cluster) -> Plan:
    options = PlanOptions(
        axis_names=("data", "tensor"), stages=1, microbatches=1, remat=0
    )
    return plan_analysis(analysis, cluster, options)


@pytest.fixture(scope="module")
def bound(analysis: Analysis, plan: Plan, cluster: Cluster) -> BoundPlan:
    return bind_plan(analysis, plan, cluster)


@pytest.fixture(scope="module")
def trials(bound: BoundPlan, cluster: Cluster) -> Trials:
    return trials_of(bound, cluster)


def decisions(bound: BoundPlan, pattern: str) -> list[LayoutDecision]:
    return [decision for _, decision in input_decisions([bound], pattern)]


def test_groups_add_up_to_the_prediction(bound: BoundPlan, plan: Plan) -> None:
    rows = group_collectives(bound, bound.collectives)
    assert rows
    expected = plan.predicted
    assert math.isclose(sum(r.seconds for r in rows), expected.communication_s)
    assert math.isclose(sum(r.sent_bytes for r in rows), expected.communication_bytes)
    assert [r.seconds for r in rows] == sorted((r.seconds for r in rows), reverse=True)


def test_a_level_of_one_device_has_no_axis(plan: Plan) -> None:
    one = plan.with_stage(mesh={"axes": {"data": 4}}, devices=(0, 1, 2, 3))
    found = mesh_of(one, Cluster.parse("4x1:cpu"))
    assert (found.names, found.sizes) == (("data",), (4,))


def test_inputs_are_named_by_their_path(bound: BoundPlan) -> None:
    analysis = bound.analysis
    for given in analysis.graph.inputs:
        assert array_name(analysis, given.value) == given.path


def test_a_decision_holds_all_inputs_that_share_it(bound: BoundPlan) -> None:
    found = decisions(bound, KERNELS)
    paths = {i.path for d in found for i in d.inputs}
    assert paths == {"params/0/kernel", "params/1/kernel"}
    for decision in found:
        assert decision.shared >= len(decision.inputs)
        assert decision.nbytes == 256 * 256 * 4
        axes = [axis for dim in decision.spec for axis in dim]
        split = math.prod(bound.plan.mesh["axes"][axis] for axis in axes)
        assert decision.shard_bytes == decision.nbytes / split


def test_the_gradient_belongs_to_its_parameter(bound: BoundPlan) -> None:
    """The plan is data parallel in part, so the gradients are reduced."""
    phases = {r.phase for d in decisions(bound, KERNELS) for r in d.collectives}
    assert "backward" in phases


def test_a_scalar_has_no_layout_to_choose(bound: BoundPlan, trials: Trials) -> None:
    (decision,) = decisions(bound, "opt_state/0/count")
    assert decision.node is None
    assert alternatives(trials, decision, limit=3, seconds=1.0, say=silent) == []


def test_a_pattern_that_matches_nothing_is_an_error(bound: BoundPlan) -> None:
    with pytest.raises(PlanError, match=r"'nothing\*' matches no input.*params/0/bias"):
        decisions(bound, "nothing*")


def test_the_plan_is_found_again_in_the_problem(bound: BoundPlan, plan: Plan) -> None:
    """The cost of the choices, added up here, is that of the plan's pairs."""
    formulation = formulate(bound.analysis, bound.pricer)
    chosen = plan_choices(bound.assignment, formulation)
    problem = formulation.problem
    cost = sum(c[chosen[i]] for i, c in enumerate(problem.node_costs)) + sum(
        m[chosen[i], chosen[j]]
        for (i, j), m in zip(problem.edges, problem.edge_costs, strict=True)
    )
    assignment = restore(bound.analysis, plan)
    assert math.isclose(cost, pairwise_s(assignment, bound.pricer))


def test_no_alternative_beats_a_proved_plan(
    bound: BoundPlan, trials: Trials, plan: Plan
) -> None:
    decision = decisions(bound, KERNELS)[0]
    said: list[str] = []
    found = alternatives(trials, decision, limit=4, seconds=5.0, say=said.append)
    assert len(found) == len(said) == 4
    specs = [decision.spec, *(a.spec for a in found)]
    assert len(set(specs)) == len(specs)
    assert [a.step_s for a in found] == sorted(a.step_s for a in found)
    for other in found:
        if other.proved:
            assert other.step_s >= plan.predicted.step_s * (1 - 1e-3)


def test_the_limit_is_kept(bound: BoundPlan, trials: Trials) -> None:
    decision = decisions(bound, KERNELS)[0]
    assert alternatives(trials, decision, limit=0, seconds=1.0, say=silent) == []


def test_the_mesh_must_be_one_of_the_cluster(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"mesh .* does not fit the cluster 3:cpu"):
        mesh_of(plan, Cluster.parse("3:cpu"))


def test_the_mesh_is_that_of_the_plan(plan: Plan, cluster: Cluster) -> None:
    mesh = mesh_of(plan, cluster)
    assert dict(zip(mesh.names, mesh.sizes, strict=True)) == plan.mesh["axes"]


def test_a_plan_with_names_of_its_own_is_explained(
    analysis: Analysis, cluster: Cluster
) -> None:
    made = plan_analysis(analysis, cluster, PlanOptions(axis_names=("hosts", "cores")))
    bound = bind_plan(analysis, made, cluster)
    assert bound.pricer.mesh.names == ("hosts", "cores")


def test_a_layout_that_the_planner_lacks_is_an_error(
    analysis: Analysis, plan: Plan, cluster: Cluster
) -> None:
    """Both axes on a factor of a contraction, in an order that is not considered."""
    index, node = next(
        (i, n)
        for i, n in enumerate(plan.nodes)
        if n.kind == "contraction" and n.factors[0] % 8 == 0
    )
    axes = (("tensor", "data"), *((),) * (len(node.factors) - 1))
    edited = msgspec.structs.replace(node, axes=axes)
    nodes = (*plan.nodes[:index], edited, *plan.nodes[index + 1 :])
    bound = bind_plan(analysis, plan.with_stage(nodes=nodes), cluster)
    formulation = formulate(analysis, bound.pricer)
    with pytest.raises(PlanError, match="that the planner does not consider"):
        plan_choices(bound.assignment, formulation)
