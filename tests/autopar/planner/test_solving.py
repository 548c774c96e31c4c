"""One mesh in a limited time: what is spent, and what the search starts from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar import Cluster, PlanError
from autopar.cost.combining import SUMS
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import ReshardStep
from autopar.planner import solving
from autopar.planner.candidate import Candidate
from autopar.planner.limit import Limit
from autopar.planner.problem import formulate
from autopar.planner.search import candidate_meshes, search
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse
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
    """A solver that finds nothing in time where all strategies are allowed."""

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


@pytest.mark.parametrize(
    ("bound_s", "asked", "solved"),
    [(0.9, True, 4), (0.994, True, 4), (0.996, False, 4), (0.9995, False, 0)],
)
def test_experts_are_asked_where_they_may_be_worth_it(
    monkeypatch: pytest.MonkeyPatch, bound_s: float, asked: bool, solved: int
) -> None:
    """Not where no plan saves more than half a percent; problems go on a little."""
    calls: list[str] = []

    class Known(solving._Rounds):
        certain = True

        def go_on(self) -> bool:
            calls.append("problem")
            self.problems += 1
            return True

        def ask_experts(self) -> None:
            calls.append("experts")

    cluster = Cluster.parse("8:cpu")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    best = solve_mesh(mlp(), pricer)
    rounds = Known(solving._Task(mlp(), None, Limit(None)), pricer, best, None)
    rounds.bound_s, rounds.problems = bound_s * best.step_s, 1
    solving._go_on(rounds, math.inf, True)
    assert ("experts" in calls) is asked
    assert calls.count("problem") == solved


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


def test_a_problem_that_time_ended_is_not_begun_again_from_the_same_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster.parse("8:cpu")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    best = solve_mesh(mlp(), pricer)
    late = dataclasses.replace(best.solution, status=Status.FEASIBLE)
    late = dataclasses.replace(best, solution=late)
    begun: list[float] = []

    def ended(_: object, __: object, start: Candidate, *___: object) -> Candidate:
        begun.append(start.step_s)
        return late

    monkeypatch.setattr(solving, "_solved", ended)
    rounds = solving._Rounds(solving._Task(mlp(), None, Limit(9.0)), pricer, best, None)
    rounds.begin(experts=False)
    assert not rounds.certain
    assert not rounds.go_on()
    # From a faster plan it may end elsewhere.
    faster = dataclasses.replace(best, items=best.items[1:])
    assert faster.step_s < best.step_s
    rounds.take(faster)
    assert rounds.go_on()
    assert begun == [best.step_s, faster.step_s]


def test_terms_of_memory_are_those_of_a_problem_with_the_same_strategies() -> None:
    cluster = Cluster.parse("2x4:h100")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    first = formulate(mlp(), pricer, memory_limit=1e9)
    again = formulate(mlp(), pricer, memory_limit=1e9)
    assert again.problem.memory is not first.problem.memory
    again = formulate(mlp(), pricer, memory_limit=1e8, like=first)
    assert again.problem.memory is first.problem.memory
    assert again.problem.memory_limit == 1e8

    def whole(_: object, strategy: tuple[tuple[int, ...], ...]) -> bool:
        return not any(strategy)

    rest = formulate(mlp(), pricer, whole, memory_limit=1e9, like=first)
    assert rest.spaces != first.spaces
    assert all(len(t.usage) == 1 for t in rest.problem.memory if t.node == 0)
    # A problem without terms has none to take.
    plain = formulate(mlp(), pricer)
    assert formulate(mlp(), pricer, memory_limit=1e9, like=plain).problem.memory


def test_nobody_is_told_why_another_plan_than_a_known_one_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster.parse("8:h100,memory=1MB")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    monkeypatch.setattr(solving, "infeasible", lambda *_: PlanError("explained"))
    for below_s, text in ((math.inf, "explained"), (1.0, "no other plan")):
        task = solving._Task(mlp(1 << 20), None, Limit(None), below_s=below_s)
        with pytest.raises(PlanError, match=text):
            solving._solved(task, pricer, None, {}, None)


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
        known = pricer.cluster.device.calibrated
        endless = dataclasses.replace(known, combined_bytes=1e30)
        device = dataclasses.replace(pricer.cluster.device, calibration=endless)
        cluster = dataclasses.replace(pricer.cluster, device=device)
        pricer = dataclasses.replace(pricer, cluster=cluster)
        step = ReshardStep("all_gather", (1,), 1.0, ())
        least = pricer.price_s(step, 1e6, frozenset({"all_gather"}))
        assert least == pytest.approx(pricer.bytes_s(step, 1e6))
