"""Tests that ``planning_seconds`` bounds the whole search for a plan."""

from __future__ import annotations

import itertools
from typing import Any

import planner_cases
import pytest

import autopar
from autopar import Cluster, PlanError
from autopar.planner.deadline import LATE_S, deadline, limited_s, timer_for
from autopar.planner.options import PlanOptions, read_options
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import analyse

# A limit that is over before the first proposal.
NONE = 1e-6
ENDED = f"planning ended by planning_seconds={NONE:g}"


def planned(
    cluster: str = "2x4:cpu", name: str = "mlp_adamw_clip", **options: Any
) -> autopar.Plan:
    analysis = analyse(*planner_cases.workload(name))
    return plan_analysis(analysis, Cluster.parse(cluster), PlanOptions(**options))


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("8:cpu", {}),
        ("2x4:h100", {"seconds": None}),
        ("8:cpu,memory=30kB", {}),
        ("8:cpu,memory=30kB", {"remat": "auto", "stages": 1}),
        ("8:cpu", {"compression": "auto"}),
        ("2x4:h100", {"stages": "auto"}),
        ("2x4:cpu", {"stages": 2, "cut_codecs": "auto"}),
        ("6:cpu", {}),
        ("4:cpu+4:cpu", {}),
    ],
)
def test_ends_with_the_first_plan_and_says_what_was_not_tried(
    cluster: str, options: dict[str, Any]
) -> None:
    """Whatever is searched for, a plan is found, which says what it leaves out."""
    plan = planned(cluster, **options, planning_seconds=NONE)

    assert plan.solver.status.startswith(ENDED)
    [line] = [line for line in plan.decided if line.startswith(ENDED)]
    assert ", not tried: " in line
    assert line in str(plan)


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    free = planned()
    limited = planned(planning_seconds=1e6)

    assert limited.inputs == free.inputs
    assert limited.decided == free.decided
    assert limited.solver.status == free.solver.status


def test_every_length_of_the_limit_gives_a_plan() -> None:
    """Wherever the limit falls, the search ends with a plan."""
    analysis = analyse(*planner_cases.workload("mlp_adamw_clip"))
    cluster = Cluster.parse("8:cpu,memory=30kB")
    options = PlanOptions(planning_seconds=1.0, seconds=0.5)
    for limit in (2, 10, 50, 100, 400):
        ticks = itertools.count()
        with deadline(1e-3 * limit, clock=lambda ticks=ticks: 1e-3 * next(ticks)):
            plan = plan_analysis(analysis, cluster, options)
        assert plan.predicted.peak_memory_bytes <= cluster.memory_bytes


def test_a_step_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(autopar.InfeasibleError, match="no plan fits"):
        planned("2x4:cpu,memory=1kB", planning_seconds=NONE)


def test_a_problem_ends_with_the_whole_limit() -> None:
    now = [0.0]
    with deadline(3.0, clock=lambda: now[0]):
        assert limited_s(None) == 3.0
        assert limited_s(1.0) == 1.0
        elapsed_s = timer_for(3.0)
        assert elapsed_s() < 1.0
        now[0] = 3.0
        assert elapsed_s() >= 3.0
        assert limited_s(None) == LATE_S
        assert limited_s(0.1) == 0.1
        late_s = timer_for(LATE_S)
        assert late_s() < LATE_S
        now[0] += LATE_S
        assert late_s() >= LATE_S
    assert limited_s(None) is None


def test_the_option_is_checked_and_read() -> None:
    assert read_options({"planning_seconds": "60"}).planning_seconds == 60.0
    assert read_options({"planning_seconds": "inf"}).planning_seconds is None
    with pytest.raises(PlanError, match="--planning-seconds 0: expected the time"):
        read_options({"planning_seconds": "0"})
    with pytest.raises(PlanError, match="planning_seconds=0: expected the time"):
        PlanOptions(planning_seconds=0)
