"""Tests the cost of assignments against the problem that the solver gets."""

from __future__ import annotations

import functools
import itertools
import math
import random

import planner_cases as cases
import pytest
from pairwise import corrections, pairwise_s

from autopar.cluster import Cluster
from autopar.cost.breakdown import FIELDS, CostBreakdown, exposed_s, step_s
from autopar.cost.estimate import estimate
from autopar.cost.live import live
from autopar.cost.pricer import Pricer
from autopar.cost.rows import exchange_s
from autopar.cost.traffic import join_messages, traffic
from autopar.layouts.strategies import Mode
from autopar.planner.candidate import Candidate, candidate_of
from autopar.planner.problem import Formulation, formulate, with_joined_bytes
from autopar.planner.search import candidate_meshes
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import Solution, Status
from autopar_solver import evaluate_choices as check_choices

CLUSTERS = ("2x4:cpu", "2x4:h100", "2x4:v5e")
PLANS = 6


@functools.cache
def analysis(name: str) -> Analysis:
    return analyse(*cases.workload(name))


def pricer_of(text: str, *, combining: bool) -> Pricer:
    cluster = Cluster.parse(text)
    return Pricer(cluster, candidate_meshes(cluster)[0], combining=combining)


def random_plans(
    found: Analysis, formulation: Formulation, draw: random.Random
) -> list[tuple[float, Candidate]]:
    """Random choices that the problem allows, each with the solver's objective."""
    counts = [len(c) for c in formulation.problem.node_costs]
    out: list[tuple[float, Candidate]] = []
    while len(out) < PLANS:
        choices = [draw.randrange(n) for n in counts]
        for copy in formulation.copies:
            fetched = [k for k, m in enumerate(copy.modes) if m is Mode.FETCH]
            choices[copy.node] = draw.choice(fetched)
        cost = check_choices(formulation.problem, choices).cost
        if math.isfinite(cost):
            solution = Solution(
                choices=tuple(choices),
                cost=cost,
                bound=0.0,
                status=Status.FEASIBLE,
                seconds=0.0,
            )
            out.append((cost, candidate_of(found, formulation, solution)))
    return out


@pytest.mark.parametrize(
    ("name", "text"), list(zip(cases.names(), itertools.cycle(CLUSTERS), strict=False))
)
def test_the_objective_is_the_cost_less_its_corrections(name: str, text: str) -> None:
    """Equal to 1e-9, with combined messages and without."""
    found = analysis(name)
    for combining in (False, True):
        pricer = pricer_of(text, combining=combining)
        formulation = formulate(found, pricer)
        plans = random_plans(found, formulation, random.Random(name))
        for objective, candidate in plans:
            assignment = candidate.assignment
            known = with_joined_bytes(found, pricer)
            pairs = pairwise_s(assignment, known)
            assert pairs == pytest.approx(objective, rel=1e-9)
            lacking = corrections(assignment, known)
            total = step_s(estimate(assignment, pricer).cost)
            assert objective + lacking.total_s == pytest.approx(total, rel=1e-9)
            assert lacking.messages_s >= -1e-12
            assert lacking.rows_s >= -1e-12
            assert combining or lacking.messages_s == 0
            assert candidate.step_s == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("name", ["fori_loop", "cond"])
def test_the_objective_is_the_cost_where_nothing_is_merged(name: str) -> None:
    """Some random plans have no copies alike; messages are not combined."""
    found = analysis(name)
    pricer = pricer_of("2x4:cpu", combining=False)
    formulation = formulate(found, pricer)
    exact = [
        step_s(candidate.cost) == pytest.approx(objective, rel=1e-9)
        for objective, candidate in random_plans(found, formulation, random.Random(1))
    ]
    assert any(exact)


@pytest.mark.parametrize("name", ["mlp_adamw_clip", "scan_layers", "embedding"])
def test_the_breakdown_adds_up(name: str) -> None:
    found = analysis(name)
    pricer = pricer_of("2x4:h100", combining=True)
    formulation = formulate(found, pricer)
    for _, candidate in random_plans(found, formulation, random.Random(name)):
        cost = candidate.cost
        sent = join_messages(pricer, traffic(candidate.assignment))
        assert cost.communication_s == pytest.approx(
            sum(c.seconds(pricer) for c in sent)
            + exchange_s(candidate.assignment, pricer)
        )
        assert cost.communication_bytes == pytest.approx(
            sum(c.sent_bytes(pricer) for c in sent)
        )
        assert cost.held_bytes == pytest.approx(
            sum(live(candidate.assignment, pricer.cluster.device).held_bytes().values())
        )
        assert candidate.estimate.seconds() == pytest.approx(step_s(cost))


class TestValues:
    """Costs add and scale field by field; what is exposed does not."""

    def some(self, seed: int) -> CostBreakdown:
        draw = random.Random(seed)
        return CostBreakdown(**{name: draw.random() for name in FIELDS})

    def test_sums(self) -> None:
        a, b = self.some(1), self.some(2)
        for name in FIELDS:
            assert getattr(a + b, name) == getattr(a, name) + getattr(b, name)
            assert getattr(a * 3.0, name) == getattr(a, name) * 3.0
        assert 3.0 * a == a * 3.0
        assert a + CostBreakdown() == a

    def test_work_and_communication_add(self) -> None:
        a, b = self.some(1), self.some(2)
        assert (a + b).work_s == pytest.approx(a.work_s + b.work_s)
        both = (a + b).communication_s
        assert both == pytest.approx(a.communication_s + b.communication_s)

    def test_what_is_exposed_is_computed_from_sums(self) -> None:
        """A stage with cover to spare hides what another leaves exposed."""
        busy = CostBreakdown(matrix_s=4.0, cover_s=4.0, hideable_s=1.0)
        waits = CostBreakdown(hideable_s=2.0, waiting_s=1.0)
        assert exposed_s(busy) + exposed_s(waits) == 3.0
        assert exposed_s(busy + waits) == 1.0
        assert step_s(busy + waits) == 5.0

    def test_waiting_communication_is_never_hidden(self) -> None:
        cost = CostBreakdown(waiting_s=2.0, waiting_latency_s=0.5, cover_s=10.0)
        assert exposed_s(cost) == 2.5
