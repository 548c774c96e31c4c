"""Tests schedules: all tasks, no deadlock, and the published memory."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_solver.stages.schedules.play import (
    Schedule,
    ScheduleKind,
    ScheduleTable,
    TaskKind,
    check_table,
    count_alive,
    make_table,
)

schedules = st.one_of(
    st.sampled_from(list(ScheduleKind)).map(Schedule),
    st.builds(Schedule, st.just(ScheduleKind.INTERLEAVED), st.integers(1, 4)),
)
ONE_F_ONE_B = Schedule(ScheduleKind.ONE_F_ONE_B)


@settings(max_examples=examples(300), deadline=None)
@given(schedules, st.integers(1, 6), st.integers(1, 15))
def test_every_table_is_complete_and_runs(schedule, stages, microbatches):
    table = make_table(schedule, stages, microbatches)

    check_table(table)
    kinds = {task.kind for stage in range(stages) for task in table.tasks(stage)}
    assert (TaskKind.BACKWARD_WEIGHT in kinds) == schedule.splits_backward


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_activations_alive(stages, microbatches):
    """GPipe keeps all, 1F1B at most S - i on stage i, ZB-H1 at most S."""
    for stage in range(stages):
        most = {
            kind: count_alive(
                make_table(Schedule(kind), stages, microbatches), stage
            ).most
            for kind in ScheduleKind
        }
        assert most[ScheduleKind.GPIPE] == microbatches
        assert most[ScheduleKind.ONE_F_ONE_B] == min(stages - stage, microbatches)
        assert most[ScheduleKind.ZERO_BUBBLE] == min(stages, microbatches)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_zero_bubble_holds_whole_activations_as_1f1b_does(stages, microbatches):
    table = make_table(Schedule(ScheduleKind.ZERO_BUBBLE), stages, microbatches)
    for stage in range(stages):
        held = count_alive(table, stage).held.max()
        assert held == min(stages - stage, microbatches)


def test_interleaved_order_is_megatron_s():
    """Two groups, two chunks, four microbatches: as in the paper's figure 4."""
    table = make_table(Schedule(ScheduleKind.INTERLEAVED, 2), 2, 4)
    forwards = [t[1:] for t in table.tasks(1) if t.kind is TaskKind.FORWARD]
    backwards = [t[1:] for t in table.tasks(1) if t.kind is TaskKind.BACKWARD]
    first, second = [(0, 0), (1, 0), (0, 1), (1, 1)], [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert forwards == first + second
    assert backwards == [(m, 1 - chunk) for m, chunk in first + second]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_interleaved_keeps_what_its_warm_up_and_one_more_need(stages, chunks, rounds):
    microbatches = rounds * stages
    table = make_table(Schedule(ScheduleKind.INTERLEAVED, chunks), stages, microbatches)
    for stage in range(stages):
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
        expected = min(warm_up + 1, microbatches * chunks)
        assert count_alive(table, stage).most == expected


def with_order(table: ScheduleTable, stage: int, rows: np.ndarray) -> ScheduleTable:
    orders = [*table.orders]
    orders[stage] = rows
    return dataclasses.replace(table, orders=tuple(orders))


def test_a_missing_task_is_named():
    table = make_table(ONE_F_ONE_B, 2, 2)
    broken = with_order(table, 0, table.orders[0][:-1])
    with pytest.raises(ValueError, match="stage 0 runs FORWARD of microbatch 1"):
        check_table(broken)


def test_a_doubled_task_is_named():
    table = make_table(ONE_F_ONE_B, 2, 2)
    broken = with_order(table, 1, table.orders[1][[0, 1, 2, 3, 3]])
    with pytest.raises(ValueError, match=r"stage 1 runs .* twice"):
        check_table(broken)


def test_a_task_that_does_not_exist_is_named():
    table = make_table(ONE_F_ONE_B, 1, 2)
    broken = with_order(table, 0, table.orders[0] + np.array([0, 1, 0]))
    with pytest.raises(ValueError, match=r"stage 0 has no task .*microbatch=2"):
        check_table(broken)


def test_weights_before_inputs_wait_forever():
    table = make_table(Schedule(ScheduleKind.ZERO_BUBBLE), 1, 1)
    broken = with_order(table, 0, table.orders[0][[0, 2, 1]])
    with pytest.raises(ValueError, match=r"waits forever .*BACKWARD_WEIGHT"):
        check_table(broken)


def test_a_circle_between_groups_is_found():
    """Stage 0 wants a cotangent before it sends what stage 1 begins with."""
    table = make_table(ONE_F_ONE_B, 2, 2)
    broken = with_order(table, 0, table.orders[0][[0, 2, 1, 3]])
    broken = with_order(broken, 1, table.orders[1][[0, 2, 1, 3]])
    with pytest.raises(ValueError, match="waits forever"):
        check_table(broken)


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(0, 1), (1, 0)], ids=["no stage", "no microbatch"]
)
def test_nothing_to_run_is_an_error(stages, microbatches):
    with pytest.raises(ValueError, match="at least 1"):
        make_table(ONE_F_ONE_B, stages, microbatches)


@pytest.mark.parametrize("chunks", [0, 2])
def test_only_interleaving_has_chunks(chunks):
    with pytest.raises(ValueError, match="chunk"):
        Schedule(ScheduleKind.GPIPE, chunks)
