"""Tests the costs and lower bounds of pipelines, and that invalid ones are refused."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from stage_problems import all_pipelines, problems, random_problem

from autopar_solver.stages.completion import (
    _busiest_link,
    evaluate_pipeline,
    lower_bound_s,
    task_seconds,
)
from autopar_solver.stages.entries import kept_microbatches
from autopar_solver.stages.problem import DeviceGroup, Pipeline, SharedParameter
from autopar_solver.stages.schedules.play import (
    Schedule,
    ScheduleKind,
    TaskSeconds,
    count_alive,
    equal_parts,
    make_table,
    makespan_s,
)

ONE_F_ONE_B = Schedule(ScheduleKind.ONE_F_ONE_B)


def pipeline_of(schedule: Schedule, stages: int, microbatches: int) -> Pipeline:
    return Pipeline(
        microbatches=microbatches,
        schedule=schedule,
        options=(0,) * stages,
        cuts=tuple(range(stages * schedule.chunks + 1)),
    )


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from(
        [*map(Schedule, ScheduleKind), Schedule(ScheduleKind.INTERLEAVED, 2)]
    ),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_no_play_is_below_the_bound(schedule, stages, microbatches, seed, blocking):
    random = np.random.default_rng(seed)
    table = make_table(schedule, stages, microbatches)
    task = random.integers(0, 9, (table.parts, 4)).astype(float)
    task[:, 1] = task[:, 2] + task[:, 3]
    link = random.integers(0, 9, (3, table.parts - 1)).astype(float)
    seconds = TaskSeconds(
        task_s=task,
        forward_link_s=link[0],
        backward_link_s=link[1],
        latency_s=link[2],
        step_s=random.integers(0, 30, stages).astype(float),
        held_bytes=np.zeros(table.parts),
        pending_bytes=np.zeros(table.parts),
        blocking=blocking,
    )
    bound = lower_bound_s(pipeline_of(schedule, stages, microbatches), seconds)

    assert bound <= makespan_s(table, seconds)


@pytest.mark.parametrize("kind", ScheduleKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 16), (3, 3), (1, 5), (4, 8)])
def test_the_bound_is_exact_for_equal_stages(kind, stages, microbatches):
    schedule = Schedule(kind, 2 if kind is ScheduleKind.INTERLEAVED else 1)
    table = make_table(schedule, stages, microbatches)
    seconds = equal_parts(table, 1.0, 2.0, 1.0)
    if kind is ScheduleKind.INTERLEAVED and microbatches % stages:
        return
    bound = lower_bound_s(pipeline_of(schedule, stages, microbatches), seconds)

    assert bound == makespan_s(table, seconds)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from([k for k in ScheduleKind if k is not ScheduleKind.INTERLEAVED]),
    st.integers(1, 6),
    st.integers(1, 10),
)
def test_kept_microbatches_are_those_of_the_table(kind, stages, microbatches):
    """The most held and pending together, at any price of the two."""
    table = make_table(Schedule(kind), stages, microbatches)
    for stage in range(stages):
        counts = count_alive(table, stage)
        kept = kept_microbatches(Schedule(kind), microbatches, stages - stage, stages)
        for held_bytes, pending_bytes in [(1, 0), (1, 1), (3, 1), (1, 3)]:
            peak = (held_bytes * counts.held + pending_bytes * counts.pending).max()
            most = max(held_bytes * h + pending_bytes * p for h, p in kept)
            assert peak == most


@settings(max_examples=examples(100), deadline=None)
@given(problems)
def test_memory_is_as_defined(problem):
    """Resident, activations of the microbatches kept, and the neediest layer."""
    for pipeline in itertools.islice(all_pipelines(problem), 0, 60, 7):
        costs = problem.costs_of(pipeline.microbatches)
        found = evaluate_pipeline(problem, pipeline)
        for stage, option in enumerate(pipeline.options):
            layers = pipeline.layers(stage)
            later = pipeline.stages - stage
            held = pending = running = 0.0
            resident = sum(costs.resident_bytes[n, option] for n in layers)
            for shared in problem.shared:
                if shared.target in layers and shared.source not in layers:
                    resident += shared.copy_bytes[option]
            for layer in layers:
                again = layer in pipeline.recomputed
                own = costs.activation_bytes[layer, option]
                held += costs.boundary_bytes[layer, option] if again else own
                pending += costs.pending[layer, option]
                needs = costs.transient_bytes[layer, option] + again * own
                running = max(running, needs)
            kept = kept_microbatches(
                pipeline.schedule, pipeline.microbatches, later, pipeline.stages
            )
            alive_bytes = max(h * held + p * pending for h, p in kept)
            expected = resident + alive_bytes + running
            assert found.memory_bytes[stage] == pytest.approx(expected)


def test_ends_of_stages_and_recomputation_take_time():
    """By hand: one microbatch, two layers, one stage, everything named once."""
    problem = next(
        candidate
        for candidate in map(random_problem, range(1000))
        if candidate.num_layers == 2
        and not candidate.shared
        and candidate.costs[0].enter_s is not None
        and candidate.costs[0].leave_s is not None
        and np.isfinite(candidate.costs[0].forward_s[:, 0]).all()
        and np.isfinite(candidate.costs[0].recompute_s[1, 0])
        and candidate.schedules[0] in (ONE_F_ONE_B, Schedule(ScheduleKind.GPIPE))
    )
    costs = problem.costs[0]
    pipeline = Pipeline(
        microbatches=costs.microbatches,
        schedule=problem.schedules[0],
        options=(0,),
        cuts=(0, 2),
        recomputed=(1,),
    )
    work = costs.forward_s + costs.backward_input_s + costs.backward_weight_s
    one = work[:, 0].sum() + costs.recompute_s[1, 0]
    one += 2 * (costs.enter[0, 0] + costs.leave[1, 0])
    expected = costs.microbatches * one + costs.step_s[:, 0].sum()

    assert evaluate_pipeline(problem, pipeline).step_s == pytest.approx(expected)


def test_shared_parameters_cost_the_stages_that_are_cut():
    problem = next(
        candidate
        for candidate in map(random_problem, range(1000))
        if candidate.num_layers == 3
        and not candidate.shared
        and max(g.devices for g in candidate.groups) >= 2
        and any(len(set(p.options)) == 1 and p.stages == 2 for p in options(candidate))
    )
    pipeline = next(
        p for p in options(problem) if len(set(p.options)) == 1 and p.stages == 2
    )
    count = len(problem.options)
    shared = SharedParameter(
        source=0, target=2, step_s=np.full(count, 7.0), copy_bytes=np.full(count, 5.0)
    )
    tied = dataclasses.replace(problem, shared=(shared,))

    before, after = (task_seconds(p, pipeline) for p in (problem, tied))
    assert (after.step_s - before.step_s).tolist() == [7.0, 7.0]
    memory = [evaluate_pipeline(p, pipeline).memory_bytes for p in (problem, tied)]
    assert memory[1][0] == memory[0][0]
    assert memory[1][1] == pytest.approx(memory[0][1] + 5.0)


def options(problem):
    return itertools.islice(all_pipelines(problem), 3000)


BAD = {
    "cuts must be": {"cuts": (0, 1)},
    "every part needs": {"cuts": (0, 0, 2), "options": (0, 0)},
    "schedule is not allowed": {"schedule": Schedule(ScheduleKind.INTERLEAVED, 3)},
    "unknown ones": {"options": (99,)},
    "layer that does not exist": {"recomputed": (5,)},
    "99 microbatches are not": {"microbatches": 99},
    "devices of group 0": {"cuts": (0, 1, 2), "options": (0, 0)},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_pipelines_are_refused(message):
    problem = next(
        dataclasses.replace(
            p,
            groups=(DeviceGroup(p.options[0].devices), *p.groups[1:]),
            max_stages=None,
        )
        for p in map(random_problem, range(1000))
        if p.num_layers == 2
        and all(o.group == 0 and o.devices == p.options[0].devices for o in p.options)
        and math.isfinite(p.costs[0].forward_s.max())
    )
    good = Pipeline(
        microbatches=problem.costs[0].microbatches,
        schedule=problem.schedules[0],
        options=(0,),
        cuts=(0, 2),
    )
    evaluate_pipeline(problem, good)
    with pytest.raises(ValueError, match=message):
        evaluate_pipeline(problem, dataclasses.replace(good, **BAD[message]))


def test_the_busiest_link_carries_both_directions_one_after_the_other() -> None:
    """With all forward passes first, they do not overlap the backward passes."""
    seconds = TaskSeconds(
        task_s=np.zeros((3, 4)),
        forward_link_s=np.array([1.0, 3.0]),
        backward_link_s=np.array([2.0, 0.5]),
        latency_s=np.zeros(2),
        step_s=np.zeros(3),
        held_bytes=np.zeros(3),
        pending_bytes=np.zeros(3),
    )
    assert _busiest_link(ScheduleKind.GPIPE, seconds) == 5.0
    assert _busiest_link(ScheduleKind.ONE_F_ONE_B, seconds) == 3.0
