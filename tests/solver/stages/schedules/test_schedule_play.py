"""Tests the schedule simulator: published bubbles, groups, links and order."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_solver.stages.schedules.play import (
    Schedule,
    ScheduleKind,
    TaskKind,
    TaskSeconds,
    equal_parts,
    make_table,
    makespan_s,
    play,
)

GPIPE = Schedule(ScheduleKind.GPIPE)
ONE_F_ONE_B = Schedule(ScheduleKind.ONE_F_ONE_B)
ZERO_BUBBLE = Schedule(ScheduleKind.ZERO_BUBBLE)


def random_seconds(
    table, seed: int, links: bool = True, blocking: bool = False
) -> TaskSeconds:
    """Small integers as seconds, so that times are exact."""
    random = np.random.default_rng(seed)
    parts = table.parts
    task = random.integers(1, 9, (parts, len(TaskKind))).astype(float)
    task[:, TaskKind.BACKWARD] = task[:, 2:].sum(axis=1)
    link = random.integers(0, 6, (3, parts - 1)).astype(float) * links
    return TaskSeconds(
        task_s=task,
        forward_link_s=link[0],
        backward_link_s=link[1],
        latency_s=link[2],
        step_s=random.integers(0, 5, table.stages).astype(float) * links,
        held_bytes=random.integers(1, 9, parts).astype(float),
        pending_bytes=random.integers(1, 9, parts).astype(float),
        blocking=blocking,
    )


def shapes():
    return st.tuples(
        st.sampled_from([*map(Schedule, ScheduleKind), Schedule(INTERLEAVED, 2)]),
        st.integers(1, 5),
        st.integers(1, 9),
        st.integers(0, 10**6),
    )


INTERLEAVED = ScheduleKind.INTERLEAVED


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [
        (GPIPE, 3 / 19),
        (ONE_F_ONE_B, 3 / 19),
        (Schedule(INTERLEAVED, 2), 1.5 / 17.5),
        (ZERO_BUBBLE, 3 / 51),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_bubbles(schedule, bubble):
    """Four stages, sixteen microbatches, a backward of two forwards."""
    table = make_table(schedule, 4, 16)
    forward = 1 / schedule.chunks
    timeline = play(table, equal_parts(table, forward, 2 * forward, forward))

    assert timeline.bubble == pytest.approx(np.full(4, bubble))


@settings(max_examples=examples(150), deadline=None)
@given(shapes(), st.booleans())
def test_play_keeps_every_rule(shape, blocking):
    """No group does two tasks at once, and every input is there in time."""
    schedule, stages, microbatches, seed = shape
    table = make_table(schedule, stages, microbatches)
    seconds = random_seconds(table, seed, blocking=blocking)
    timeline = play(table, seconds)
    begin, end = {}, {}
    for stage in range(stages):
        tasks = table.tasks(stage)
        starts, ends = timeline.starts_s[stage], timeline.ends_s[stage]
        assert (starts[1:] >= ends[:-1]).all()
        for task, first, last in zip(tasks, starts, ends, strict=True):
            part = table.part(stage, task.chunk)
            assert last - first == seconds.task_s[part, task.kind]
            kind = 1 if task.kind == TaskKind.BACKWARD_INPUT else int(task.kind)
            begin[kind, task.microbatch, part] = first
            end[kind, task.microbatch, part] = last
    for (kind, number, part), first in begin.items():
        if kind == TaskKind.FORWARD and part:
            before, link = (0, number, part - 1), seconds.forward_link_s[part - 1]
            latency = seconds.latency_s[part - 1]
        elif kind == TaskKind.BACKWARD and part + 1 < table.parts:
            before, link = (1, number, part + 1), seconds.backward_link_s[part]
            latency = seconds.latency_s[part]
        elif kind == TaskKind.FORWARD:
            continue
        else:
            before, link, latency = (kind - 1 if kind == 1 else 1, number, part), 0, 0
        if stages == 1:
            link = latency = 0
        assert first >= end[before] + link + latency


@settings(max_examples=examples(150), deadline=None)
@given(shapes())
def test_play_waits_for_nothing_else(shape):
    """The longest chain of tasks explains the makespan: earlier is not possible."""
    schedule, stages, microbatches, seed = shape
    table = make_table(schedule, stages, microbatches)
    seconds = random_seconds(table, seed, links=False)
    timeline = play(table, seconds)
    ends = {float(end) for ends in timeline.ends_s for end in ends}
    starts = {float(start) for starts in timeline.starts_s for start in starts}
    # Every task begins at zero, or when another one ends.
    assert starts <= ends | {0.0}


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 10**6))
def test_gpipe_is_two_flow_shops(stages, microbatches, seed):
    """Links and groups are machines of a flow shop: its makespan is known."""
    table = make_table(GPIPE, stages, microbatches)
    seconds = random_seconds(table, seed)
    seconds = dataclasses.replace(seconds, step_s=np.zeros(stages))
    expected = float(2 * seconds.latency_s.sum())
    for kind, link in enumerate((seconds.forward_link_s, seconds.backward_link_s)):
        machines = np.concatenate([seconds.task_s[:, kind], link])
        expected += machines.sum() + (microbatches - 1) * machines.max()

    assert makespan_s(table, seconds) == expected


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 10**6))
def test_1f1b_without_links_is_within_fill_and_slowest_passes(
    stages, microbatches, seed
):
    """Alpa's formula, with the slowest forward and the slowest backward pass.

    These may be of two stages: a microbatch may wait for both.
    """
    table = make_table(ONE_F_ONE_B, stages, microbatches)
    seconds = random_seconds(table, seed, links=False)
    passes = seconds.task_s[:, :2]
    most = passes.sum() + (microbatches - 1) * passes.max(axis=0).sum()

    assert makespan_s(table, seconds) <= most


def test_equal_stages_match_the_formula_exactly():
    table = make_table(ONE_F_ONE_B, 4, 16)
    assert makespan_s(table, equal_parts(table, 1.0, 2.0)) == 4 * 3.0 + 15 * 3.0


def test_blocking_messages_take_the_group_s_time():
    table = make_table(GPIPE, 2, 4)
    seconds = dataclasses.replace(
        equal_parts(table, 1.0, 1.0), forward_link_s=np.array([1.0])
    )
    beside = play(table, seconds)
    instead = play(table, dataclasses.replace(seconds, blocking=True))

    assert beside.makespan_s == 4 + 1 + 1 + 4 + 1
    assert instead.makespan_s == 8 + 1 + 4 + 1
    assert instead.busy_s.tolist() == [12.0, 8.0]


def test_latency_does_not_occupy_the_link():
    table = make_table(GPIPE, 2, 4)
    seconds = dataclasses.replace(
        equal_parts(table, 1.0, 1.0), latency_s=np.array([5.0])
    )

    assert makespan_s(table, seconds) == 5 + 5 + 5 + 5


def test_step_seconds_follow_each_group_s_last_task():
    table = make_table(ONE_F_ONE_B, 2, 1)
    seconds = dataclasses.replace(
        equal_parts(table, 1.0, 2.0), step_s=np.array([1.0, 10.0])
    )

    assert makespan_s(table, seconds) == 1 + 1 + 2 + 10


@settings(max_examples=examples(100), deadline=None)
@given(shapes())
def test_peak_bytes_are_counted_over_time(shape):
    """The same peak as sampling the bytes alive at every start."""
    schedule, stages, microbatches, seed = shape
    table = make_table(schedule, stages, microbatches)
    seconds = random_seconds(table, seed)
    timeline = play(table, seconds)
    for stage in range(stages):
        times = zip(
            table.tasks(stage),
            timeline.starts_s[stage],
            timeline.ends_s[stage],
            strict=True,
        )
        spans = {task: (float(first), float(last)) for task, first, last in times}
        peak = max(
            sum(
                kept(spans, table, seconds, stage, m, chunk, now)
                for m in range(microbatches)
                for chunk in range(table.chunks)
            )
            for now in timeline.starts_s[stage]
        )
        assert timeline.peak_bytes[stage] == peak


def kept(spans, table, seconds, stage, microbatch, chunk, now):
    part = table.part(stage, chunk)
    first = spans[TaskKind.FORWARD, microbatch, chunk][0]
    whole = spans.get((TaskKind.BACKWARD, microbatch, chunk))
    if whole is not None:
        return seconds.held_bytes[part] if first <= now < whole[1] else 0.0
    inputs = spans[TaskKind.BACKWARD_INPUT, microbatch, chunk][1]
    weights = spans[TaskKind.BACKWARD_WEIGHT, microbatch, chunk][1]
    if first <= now < inputs:
        return seconds.held_bytes[part]
    return seconds.pending_bytes[part] if inputs <= now < weights else 0.0


def test_a_table_that_stops_is_an_error():
    table = make_table(ONE_F_ONE_B, 2, 2)
    rows = (table.orders[0][[0, 2, 1, 3]], table.orders[1][[0, 2, 1, 3]])
    with pytest.raises(ValueError, match="waits forever"):
        play(dataclasses.replace(table, orders=rows), equal_parts(table, 1.0, 1.0))


def test_wrong_shapes_and_values_are_errors():
    table = make_table(ONE_F_ONE_B, 2, 2)
    seconds = equal_parts(table, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"latency_s must have shape \(1,\)"):
        play(table, dataclasses.replace(seconds, latency_s=np.zeros(2)))
    with pytest.raises(ValueError, match="step_s must be finite"):
        play(table, dataclasses.replace(seconds, step_s=np.array([0.0, math.inf])))
