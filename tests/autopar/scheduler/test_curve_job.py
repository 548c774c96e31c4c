"""Tests jobs with a curve: the costs of starts, changes and lost nodes."""

from __future__ import annotations

import dataclasses

import pytest
from dispatching import BATCH, curve

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import NodeEvent, Options, simulate
from autopar.scheduler.simulator.jobs import CurveJob, Moves

LINE = curve(8.0, 16.0, 24.0, 32.0).on("cpu")  # a step a second on one device
MOVES = Moves(start_s=5.0, join_s=3.0, change_s=1.0)


def job(steps: int, **fields: float) -> CurveJob:
    given = {"name": "one", "application": "tiny", "submitted_s": 0.0, "batch": BATCH}
    return CurveJob(Job(**{**given, "steps": steps, **fields}), LINE, 4, MOVES)  # pyright: ignore


def ran(made: CurveJob, seconds: float, at_s: float) -> float:
    made.advance(at_s, seconds, 0.0)
    return at_s + seconds


def test_a_start_takes_its_seconds() -> None:
    made = job(10)
    made.reallocate((1,), "")
    now = ran(made, 10.0, 0.0)
    assert made.completed_s is None
    ran(made, 10.0, now)
    assert made.completed_s == pytest.approx(5 + 10)


def test_a_job_that_grows_trains_until_the_others_are_there() -> None:
    """5 s of start, 5 steps; 3 steps on one device, a pause, 12 on two."""
    made = job(20)
    made.reallocate((1,), "")
    now = ran(made, 10.0, 0.0)
    made.reallocate((1, 1), "")
    ran(made, 100.0, now)
    assert made.completed_s == pytest.approx(10 + 3 + 1 + 12 / 2)
    assert made.restarts == 1


def test_a_job_that_shrinks_pauses_at_once() -> None:
    made = job(20)
    made.reallocate((1, 1), "")
    now = ran(made, 10.0, 0.0)
    made.reallocate((1,), "")
    ran(made, 100.0, now)
    assert made.completed_s == pytest.approx(10 + 1 + 10)


def test_a_job_that_is_stopped_starts_again_with_what_it_did() -> None:
    made = job(20)
    made.reallocate((1,), "")
    now = ran(made, 10.0, 0.0)
    made.reallocate((), "")
    now = ran(made, 50.0, now)
    made.reallocate((1,), "")
    ran(made, 50.0, now)
    assert made.completed_s == pytest.approx(60 + 5 + 15)


@pytest.mark.parametrize("policy", ["goodput", "fifo"])
def test_a_job_goes_on_where_it_loses_a_node(policy: str) -> None:
    """A policy that changes nothing gives back what was asked for, or has it wait."""
    events = (NodeEvent(at_s=20.0, node=1, away=True),)
    events += (NodeEvent(at_s=60.0, node=1, away=False),)
    options = Options(interval_s=10.0, events=events)
    made = job(400, devices=4)
    history = simulate([made], Nodes.parse("4x1:cpu"), policy_of(policy), options)
    spans = [(s.start_s, len(s.allocation)) for s in history.spans]
    expected = (
        [(10, 4), (20, 3), (60, 4)] if policy == "goodput" else [(10, 4), (60, 4)]
    )
    assert spans == expected


def test_jobs_do_not_wait_behind_one_that_needs_a_lost_node() -> None:
    events = (NodeEvent(at_s=20.0, node=1, away=True),)
    events += (NodeEvent(at_s=200.0, node=1, away=False),)
    options = Options(interval_s=10.0, events=events)
    wide, small = job(400, devices=4), job(8, name="two", submitted_s=5.0, devices=1)
    simulate([wide, small], Nodes.parse("4x1:cpu"), policy_of("fifo"), options)
    assert (small.completed_s or 0.0) < 50.0 < 200.0 < (wide.completed_s or 0.0)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_that_dies_unnoticed_costs_seconds_and_perhaps_steps(nodes: int) -> None:
    """The node dies at 25 s, after 15 s of training; this is noticed at 40 s.

    On one node the job goes back from step 15 to step 10, waits 30 s more, and starts
    again on the other node. On two nodes it pauses, and goes on with one device.
    """
    moves = dataclasses.replace(MOVES, fence_s=30.0, save_every=10)
    given = Job(name="one", application="tiny", submitted_s=0.0, batch=BATCH, steps=40)
    made = CurveJob(given, LINE, nodes, moves)
    events = (NodeEvent(at_s=25.0, node=0, away=True, noticed_s=15.0),)
    options = Options(interval_s=10.0, react_s=5.0, events=events)
    simulate([made], Nodes.parse("2x1:cpu"), policy_of("goodput"), options)
    expected = 40 + 30 + 5 + (40 - 10) if nodes == 1 else 40 + 1 + (40 - 30)
    assert made.completed_s == pytest.approx(expected)


@pytest.mark.parametrize("policy", ["goodput", "pollux", "sia", "fair", "fifo"])
def test_jobs_end_where_a_node_is_lost_and_another_joins(policy: str) -> None:
    """The tables of a policy follow the number of devices, down and up."""
    events = (
        NodeEvent(at_s=0.0, node=4, away=True),
        NodeEvent(at_s=70.0, node=1, away=True),
        NodeEvent(at_s=130.0, node=4, away=False),
    )
    options = Options(interval_s=10.0, react_s=2.0, events=events)
    made = [job(200, name=f"job{k}", submitted_s=20.0 * k, devices=2) for k in range(4)]
    nodes = Nodes.parse("5x1:cpu")
    history = simulate(made, nodes, policy_of(policy), options)
    assert not [x.failed for x in history.jobs if x.failed]
    assert all(x.completed_s is not None for x in history.jobs)
    used = {r.available: r.used for r in history.rounds if r.active == 4}
    assert used.keys() >= {3, 4}
    assert all(used[n] == n for n in (3, 4)) or policy == "fifo"


def test_a_placement_that_cannot_run_is_named() -> None:
    empty = curve(8.0).on("h100")
    made = CurveJob(
        Job(name="one", application="", submitted_s=0.0, steps=3), empty, 1, MOVES
    )
    made.reallocate((1,), "")
    with pytest.raises(ScheduleError, match="job 'one' cannot run on 1 devices"):
        made.advance(0.0, 10.0, 0.0)


def test_a_step_takes_what_its_kind_of_devices_takes() -> None:
    """The engine says on which kind a job is; over several it is as slow as one."""
    slow, fast = curve(8.0, 16.0).on("cpu"), curve(80.0, 160.0).on("cpu")
    given = Job(name="one", application="tiny", submitted_s=0.0, batch=BATCH, steps=100)

    def spent_s(cluster: str, devices: int) -> float:
        made = CurveJob(
            dataclasses.replace(given, devices=devices), slow, 2, MOVES, {"fast": fast}
        )
        nodes, policy = Nodes.parse(cluster), policy_of("fifo")
        simulate([made], nodes, policy, Options(interval_s=5.0))
        return (made.completed_s or 0.0) - 10.0  # of a decision and of the start

    assert spent_s("1x1:slow", 1) == pytest.approx(100)
    assert spent_s("1x1:fast", 1) == pytest.approx(10)
    assert spent_s("1x1:slow+1x1:fast", 2) == pytest.approx(50)


def test_a_move_takes_what_its_pair_takes_and_a_policy_is_told() -> None:
    moves = Moves(
        start_s=5.0, join_s=0.0, change_s=1.0, by_pair=lambda old, new: old[1] + new[1]
    )
    given = Job(name="one", application="tiny", submitted_s=0.0, batch=BATCH, steps=20)
    made = CurveJob(given, LINE, 4, moves)
    made.reallocate((1,), "")
    ran(made, 10.0, 0.0)
    assert made.view(10.0, oracle=False).move_s((1, 1), (2, 2)) == 3
    made.reallocate((1, 1), "")
    ran(made, 100.0, 10.0)
    assert made.completed_s == pytest.approx(10 + 3 + 15 / 2)
    constant = dataclasses.replace(moves, told_s=30.0)
    view = CurveJob(given, LINE, 4, constant).view(0.0, oracle=False)
    assert view.move_s((1, 1), (2, 2)) == 30
    assert view.move_s((0, 0), (2, 2)) == 5


def test_short_jobs_come_first_where_owners_state_their_steps() -> None:
    """Two devices, and jobs of 400, 400 and 20 steps, the short one last."""

    def mean_s(*, states: bool) -> float:
        made = [
            CurveJob(
                Job(
                    name=f"job{k}", application=f"program{k}", submitted_s=2.0 * k,
                    batch=BATCH, steps=steps,
                ),
                LINE, 2, MOVES, states_steps=states,
            )
            for k, steps in enumerate((400, 400, 20))
        ]  # fmt: skip
        options = Options(interval_s=10.0, react_s=2.0)
        simulate(made, Nodes.parse("2x1:cpu"), policy_of("goodput"), options)
        return sum(x.completed_s or 0.0 for x in made) / len(made)

    assert mean_s(states=True) < 0.9 * mean_s(states=False)
