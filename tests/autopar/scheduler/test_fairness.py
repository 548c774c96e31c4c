"""Tests finish-time fairness with jobs on a fair share."""

from __future__ import annotations

import pytest
from dispatching import BATCH, curve

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import Options, simulate
from autopar.scheduler.simulator.jobs import CurveJob, Moves
from autopar.scheduler.simulator.metrics import finish_time_ratios, share_s

LINE = curve(8.0, 16.0, 24.0, 32.0).on("cpu")  # a step a second on one device
MOVES = Moves(start_s=5.0, join_s=0.0, change_s=1.0)
NODES = Nodes.parse("4x1")


def job(name: str, steps: int, at_s: float = 0.0, devices: int = 4) -> CurveJob:
    given = Job(
        name=name, application="tiny", submitted_s=at_s, batch=BATCH, steps=steps,
        devices=devices,
    )  # fmt: skip
    return CurveJob(given, LINE, 4, MOVES)


def test_a_job_alone_on_the_whole_cluster() -> None:
    assert share_s(job("one", 400), 4.0, NODES) == pytest.approx(5 + 400 / 4)


def test_a_share_between_two_sizes_is_the_smaller_one() -> None:
    assert share_s(job("one", 400), 2.9, NODES) == pytest.approx(5 + 400 / 2)


def test_less_than_one_device_is_one_for_a_part_of_the_time() -> None:
    assert share_s(job("one", 400), 0.5, NODES) == pytest.approx((5 + 400) * 2)


def test_a_curve_on_which_nothing_runs_is_named() -> None:
    given = Job(name="none", application="tiny", submitted_s=0.0, steps=1)
    made = CurveJob(given, curve(0.5, 1.0).on("gpu"), 4, MOVES)
    with pytest.raises(ScheduleError, match="'none' runs on no number of devices"):
        share_s(made, 2.0, NODES)


def test_first_come_first_served_is_unfair_to_the_second() -> None:
    """It waits for all of the first, where half of the cluster was its share."""

    def jobs() -> list[CurveJob]:
        return [job("first", 4000), job("second", 400, at_s=1.0)]

    policy = policy_of("fifo")
    history = simulate(jobs(), NODES, policy, Options(interval_s=10.0))
    ratios = finish_time_ratios(history, jobs())
    assert ratios["first"] < 1
    assert ratios["second"] > 3
