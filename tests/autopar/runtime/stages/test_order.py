"""Tests that threads issue the tasks of all stages in an order of the schedule."""

import threading

import pytest

from autopar.runtime.stages.order import Threads, issue_order, run_in_threads, turns
from autopar_passes.stages.cut import Phase
from autopar_solver import Schedule, ScheduleKind, make_table

SCHEDULES = [
    Schedule(ScheduleKind.GPIPE),
    Schedule(ScheduleKind.ONE_F_ONE_B),
    Schedule(ScheduleKind.INTERLEAVED, 2),
    Schedule(ScheduleKind.ZERO_BUBBLE),
]


def ordered(schedule, stages, microbatches, here=None):
    """Each stage's tasks in order, the order of all, and the inputs of each task."""
    table = make_table(schedule, stages, microbatches)
    order = issue_order(table)
    keys = dict.fromkeys(issue.key for issue in order)
    waits = {key: makers(key, keys, table.parts) for key in keys}
    own = list(range(stages)) if here is None else here
    waits = {k: [m for m in found if m.stage in own] for k, found in waits.items()}
    return turns(order, [[stage] for stage in own], waits), order, waits


def makers(key, keys, parts):
    """The tasks of adjacent parts on other stages whose results a task reads."""
    beside = key.number - 1 if key.phase is Phase.FORWARD else key.number + 1
    if key.phase is Phase.BACKWARD_WEIGHT or not 0 <= beside < parts:
        return []
    same = [k for k in keys if k.phase is key.phase and k.number == beside]
    return [k for k in same if k.stage != key.stage]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_every_task_is_issued_once_after_what_it_reads(schedule):
    by_stage, order, waits = ordered(schedule, 3, 6)
    lock, done = threading.Lock(), []

    def run(issue):
        with lock:
            seen = {(d.key, d.microbatch) for d in done}
            assert {(m, issue.microbatch) for m in waits[issue.key]} <= seen
            done.append(issue)

    run_in_threads(Threads(3, "test"), by_stage, run)
    assert sorted(map(str, done)) == sorted(map(str, order))
    for stage in range(3):
        own = [issue for issue in done if issue.key.stage == stage]
        assert own == [issue for issue in order if issue.key.stage == stage]


def test_some_stages_alone_wait_for_each_other_only():
    by_stage, _, _ = ordered(SCHEDULES[1], 4, 4, here=[1, 2])
    done = []
    run_in_threads(Threads(2, "test"), by_stage, done.append)
    assert {issue.key.stage for issue in done} == {1, 2}
    assert len(done) == 2 * 2 * 4


def test_a_task_that_fails_ends_all_threads_with_its_error():
    by_stage, order, _ = ordered(SCHEDULES[1], 3, 6)
    done = []

    def run(issue):
        if issue.key.stage == 2 and issue.microbatch == 1:
            raise ValueError("no device")
        done.append(issue)

    with pytest.raises(ValueError, match="no device"):
        run_in_threads(Threads(3, "test"), by_stage, run)
    assert len(done) < len(order)
