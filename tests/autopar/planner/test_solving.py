"""Tests the solution for one mesh in a limited time, and its starting points."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar import Cluster, PlanError
from autopar.cost.combining import SUMS
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import ReshardStep
from autopar.layouts.strategies import Strategy
from autopar.planner import solving
from autopar.planner.problem import Within, formulate
from autopar.planner.search import candidate_meshes, search
from autopar.planner.solving import Limit, solve_mesh
from autopar.planner.weights import HIDDEN, WHOLE, partly
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.nodes import Node
from autopar_solver import ShardingProblem, Solution, Status


def mlp(rows: int = 64) -> Analysis:
    params = mlp_params(width=32, hidden=128, layers=2)
    return analyse(*training(mlp_loss, params, mlp_batch(rows, 32)))


class TestLimit:
    def test_parts_of_what_is_left(self) -> None:
        limit = Limit(10.0)
        assert limit.part_s(0.5) == 5.0
        part = limit.part(0.5)
        part.spend(4.0)
        assert (limit.spent_s, part.spent_s) == (4.0, 4.0)
        assert limit.part_s(0.5) == 3.0
        limit.spend(6.0)
        assert limit.over
        assert not part.over
        assert limit.part_s(0.5) == 0.5

    def test_none_is_never_over(self) -> None:
        limit = Limit(None)
        limit.spend(1e9)
        assert not limit.over
        assert limit.part_s(0.1) is None


class Late:
    """A solver that finds nothing in time if all strategies are allowed."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self.solve = solving.solve

    def __call__(self, problem: ShardingProblem, **options: Any) -> Solution:
        if sum(map(len, problem.node_costs)) < self.whole or options["warm_start"]:
            return self.solve(problem, **options)
        return Solution(
            choices=(),
            cost=math.inf,
            bound=-math.inf,
            status=Status.UNKNOWN,
            seconds=options["seconds"],
        )


@pytest.mark.parametrize("cluster", ["8:h100", "2x4:cpu"])
def test_where_time_runs_out_the_search_starts_from_experts(
    monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    analysis, parsed = mlp(4096), Cluster.parse(cluster)
    mesh = candidate_meshes(parsed)[-1]
    free = solve_mesh(analysis, Pricer(parsed, mesh))
    whole = sum(map(len, free.formulation.problem.node_costs))
    monkeypatch.setattr(solving, "solve", Late(whole))
    with pytest.raises(PlanError, match=r"within 5 s\. Give the solver more time"):
        search(analysis, parsed, meshes=[mesh], seconds=5.0, experts=False)
    found = search(analysis, parsed, meshes=[mesh], seconds=5.0).best
    assert found.step_s <= free.step_s * 1.2
    assert found.report.bound <= free.step_s * (1 + 1e-9)


def test_the_bound_of_a_restricted_plan_is_none_of_all_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan that is known says nothing about what others take."""
    analysis, cluster = mlp(), Cluster.parse("8:cpu")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    known = solve_mesh(analysis, pricer, lambda _, strategy: not any(strategy))
    free = solve_mesh(analysis, pricer)
    assert known.step_s > free.step_s
    whole = sum(map(len, free.formulation.problem.node_costs))

    def late(problem: ShardingProblem, **options: Any) -> Solution:
        return Late(whole)(problem, **options | {"warm_start": None})

    monkeypatch.setattr(solving, "solve", late)
    found = solve_mesh(analysis, pricer, seconds=1.0, starts=[known])
    assert found.step_s == known.step_s
    assert found.report.bound == 0.0
    assert found.report.status is Status.FEASIBLE


def test_a_problem_is_priced_once_for_all_weights_and_rules() -> None:
    """What is derived of it is what a formulation of its own would be."""
    cluster = Cluster.parse("2x4:h100")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    first = formulate(mlp(), pricer, memory_limit=1e9)
    for weights in (partly(0.3, 0.7), HIDDEN, WHOLE):
        found = first.at(weights)
        again = formulate(mlp(), pricer, memory_limit=1e9, weights=weights)
        same_costs(found.problem, again.problem)

    def rows(node: Node, strategy: Strategy) -> bool:
        return not strategy or not any(strategy[1:])

    rule = Within(None, rows)
    weights = partly(0.5, 0.2)
    found = first.at(weights).within(mlp(), rule)
    again = formulate(mlp(), pricer, rule, memory_limit=1e9, weights=weights)
    same_costs(found.problem, again.problem)
    assert found.spaces == again.spaces


def same_costs(one: ShardingProblem, other: ShardingProblem) -> None:
    assert one.edges == other.edges
    assert [t.node for t in one.memory] == [t.node for t in other.memory]
    for a, b in zip(
        (*one.node_costs, *one.edge_costs, *(t.usage for t in one.memory)),
        (*other.node_costs, *other.edge_costs, *(t.usage for t in other.memory)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-18)


class TestSharedMessages:
    """What a collective is charged that may share a message."""

    def pricer(self) -> Pricer:
        cluster = Cluster.parse("8x8:h100")
        return Pricer(cluster, candidate_meshes(cluster)[0])

    @pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
    @pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
    def test_a_large_array_costs_what_it_takes_alone(
        self, kind: str, axes: tuple[int, ...]
    ) -> None:
        pricer, step = self.pricer(), ReshardStep(kind, axes, 1.0, ())
        parts = pricer.group(axes) if kind == "reduce_scatter" else 1
        nbytes = 1.01 * parts * pricer.combiner.most_bytes
        together = frozenset({kind})
        alone = pricer.collective_s(step, nbytes)
        assert pricer.price_s(step, nbytes, together) == pytest.approx(alone)

    @pytest.mark.parametrize("nbytes", [100.0, 1e4, 1e6, 2e7])
    @pytest.mark.parametrize("message", [1.0, 1.5, 10.0, 1e3, 1e9])
    def test_no_message_makes_it_cheaper(self, nbytes: float, message: float) -> None:
        pricer = self.pricer()
        most = pricer.combiner.most_bytes
        step = ReshardStep("all_reduce", (0, 1), 1.0, ())
        paid = pricer.collective_s(step, nbytes, min(most, message * nbytes))
        least = pricer.price_s(step, nbytes, SUMS)
        assert pricer.bytes_s(step, nbytes) <= least <= paid * (1 + 1e-9)

    def test_without_a_limit_of_messages_bytes_alone_count(self) -> None:
        pricer = self.pricer()
        known = pricer.cluster.device.corrections
        endless = dataclasses.replace(known, combined_bytes=1e30)
        device = dataclasses.replace(pricer.cluster.device, calibration=endless)
        cluster = dataclasses.replace(pricer.cluster, device=device)
        pricer = dataclasses.replace(pricer, cluster=cluster)
        step = ReshardStep("all_gather", (1,), 1.0, ())
        least = pricer.price_s(step, 1e6, frozenset({"all_gather"}))
        assert least == pytest.approx(pricer.bytes_s(step, 1e6))
