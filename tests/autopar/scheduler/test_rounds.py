"""Tests when decisions are made: at intervals, and at once after an event."""

from __future__ import annotations

import dataclasses
import math

import pytest
from dispatching import BATCH, curve
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job, Rounds
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import POLICIES, policy_of
from autopar.scheduler.simulator.engine import History, NodeEvent, Options, simulate
from autopar.scheduler.simulator.jobs import CurveJob, Moves
from autopar.scheduler.simulator.metrics import finish_time_ratios

LINE = curve(8.0, 16.0, 24.0, 32.0).on("cpu")  # a step a second on one device
NODES = Nodes.parse("4x1")
EVERY = 60.0


def jobs() -> list[CurveJob]:
    """A job of 100 steps on four devices, and a job that is submitted at 13 s."""
    made = [("one", 400, 0.0), ("two", 40, 13.0)]
    return [
        CurveJob(
            Job(
                name=name, application="tiny", submitted_s=at_s, batch=BATCH,
                steps=steps, devices=4,
            ),
            LINE,
            4,
            Moves(start_s=5.0, join_s=0.0, change_s=0.0),
        )
        for name, steps, at_s in made
    ]  # fmt: skip


def history(
    policy: str = "fifo", react_s: float | None = 5.0, **fields: object
) -> History:
    options = Options(interval_s=EVERY, react_s=react_s, **fields)  # pyright: ignore
    return simulate(jobs(), NODES, policy_of(policy), options)


def times(found: History) -> list[float]:
    return [item.at_s for item in found.rounds]


def test_a_look_decides_where_a_job_came_or_ended():
    """Placed at the first look; ends at 5 + 5 + 100 s, and the other begins then."""
    found = history()
    assert times(found) == [5.0, 15.0, 60.0, 110.0, 120.0]
    assert [job.completed_s for job in found.jobs] == [110.0, 110.0 + 5.0 + 10.0]


def test_without_looks_decisions_are_in_intervals_alone():
    found = history(react_s=None)
    assert times(found) == [60.0, 120.0, 180.0]
    assert [job.completed_s for job in found.jobs] == [165.0, 180.0 + 5.0 + 10.0]


def test_a_node_that_leaves_or_joins_calls_for_a_decision():
    events = (
        NodeEvent(at_s=31.0, node=3, away=True),
        NodeEvent(at_s=72.0, node=3, away=False),
    )
    found = set(times(history("goodput", events=events)))
    assert found >= {35.0, 75.0}
    assert not {35.0, 75.0} & set(times(history("goodput")))


def test_looks_that_do_not_divide_the_interval_do_not_move_it():
    """Looks at 7, 14 ... 56, then 60 is due."""
    found = history(react_s=7.0)
    assert times(found)[:3] == [7.0, 14.0, 60.0]
    assert 120.0 in times(found)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"optimus", "rubick"}))
def test_every_policy_may_react(policy: str):
    slow, fast = history(policy, None), history(policy)
    assert all(job.completed_s for job in fast.jobs)
    spent = [
        sum((job.completed_s or math.inf) for job in found.jobs)
        for found in (slow, fast)
    ]
    assert spent[1] < spent[0]


def test_a_mean_over_decisions_counts_how_long_each_held():
    """Four jobs were there for 90 of 110 s: the share is 1.16 devices, so one."""
    found = history()
    counts = ((0.0, 1), (10.0, 1), (20.0, 4))
    rounds = tuple(
        dataclasses.replace(found.rounds[0], at_s=at_s, active=active)
        for at_s, active in counts
    )
    ratios = finish_time_ratios(dataclasses.replace(found, rounds=rounds), jobs())
    assert ratios["one"] == pytest.approx(110.0 / (5 + 400))


@given(
    st.floats(0.1, 100.0),
    st.floats(0.05, 100.0),
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
)
def test_decisions_are_due_in_every_interval_and_at_changes_only(
    interval_s: float, react_s: float, changes: list[int]
):
    """Against the definition, look by look; times are sums, with their rounding."""
    rounds = Rounds(interval_s, react_s, first_s=0.0)
    now_s, found, decided = 0.0, 0, 0
    left: int | None = None
    for change in changes:
        found += change
        due = now_s >= decided * interval_s
        called = rounds.calls(now_s, found)
        assert called == (due or found != left)
        if due:
            decided += 1
        if called:
            rounds.settle(found)
            left = found
        step_s = rounds.until_look_s(now_s)
        assert 0 < step_s <= min(react_s, interval_s) * (1 + 1e-9)
        now_s += step_s


def test_a_late_look_decides_once():
    """A clock that jumps over several intervals makes one decision due, not many."""
    rounds = Rounds(10.0, None, first_s=0.0)
    assert rounds.calls(0.0, None)
    assert rounds.until_look_s(4.0) == 6.0
    assert rounds.until_look_s(37.0) == 0.0
    assert rounds.calls(37.0, None)
    assert not rounds.calls(38.0, "other")
    assert rounds.until_look_s(38.0) == 2.0


@pytest.mark.parametrize("react_s", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused(react_s: float):
    with pytest.raises(ScheduleError, match="a look follows another"):
        Options(react_s=react_s)
