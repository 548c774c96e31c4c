"""Tests the solver by brute force, and against pipelines with equal stages."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from property_tests import examples
from stage_problems import all_pipelines, brute_force, problems, random_problem

import autopar_solver.stages.solve as stage_exhaust
from autopar_solver.stages.completion import (
    check_stages,
    complete_pipeline,
    evaluate_pipeline,
)
from autopar_solver.stages.problem import (
    DeviceGroup,
    LayerCosts,
    Pipeline,
    SharedParameter,
    StageProblem,
    StageSolution,
    SubmeshOption,
)
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind
from autopar_solver.stages.solve import solve_stages
from autopar_solver.status import Status

ONE_F_ONE_B = Schedule(ScheduleKind.ONE_F_ONE_B)
ALL = (*map(Schedule, ScheduleKind), Schedule(ScheduleKind.INTERLEAVED, 2))


@settings(max_examples=examples(80), deadline=None)
@given(problems)
def test_matches_brute_force(problem):
    """Mixed groups, tight memory, links, shared parameters, all at times."""
    solution = solve_stages(problem, gap=1e-9)
    best = brute_force(problem)

    check_stages(problem, solution)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.status is Status.OPTIMAL
        assert math.isclose(solution.step_s, best, rel_tol=1e-8)
        assert solution.bound_s <= best * (1 + 1e-9)


@settings(max_examples=examples(50), deadline=None)
@given(problems)
def test_bounds_hold_without_enumeration(problem):
    """What the dynamic programme proves alone is below the best pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_exhaust.Allowance, "spend", lambda *_: False)
        solution = solve_stages(problem, gap=1e-9)
    best = brute_force(problem)

    check_stages(problem, solution)
    assert solution.bound_s <= best * (1 + 1e-9)
    if solution.status is Status.INFEASIBLE:
        assert math.isinf(best)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.5))
def test_gap_is_kept(seed, gap):
    problem = random_problem(seed)
    solution = solve_stages(problem, gap=gap)
    best = brute_force(problem)

    if math.isfinite(best):
        assert solution.step_s * (1 - gap) <= best * (1 + 1e-9)


@settings(max_examples=examples(30), deadline=None)
@given(problems, st.floats(0.9, 1.1))
def test_only_steps_below_a_limit_are_looked_for(problem, part):
    best = brute_force(problem)
    assume(math.isfinite(best) and abs(part - 1) > 1e-6)
    solution = solve_stages(problem, gap=1e-9, below_s=part * best)

    assert solution.bound_s <= max(best, part * best) * (1 + 1e-9)
    if part > 1:
        assert math.isclose(solution.step_s, best, rel_tol=1e-8)
    else:
        assert solution.pipeline is None
        assert solution.status is Status.UNKNOWN
        assert solution.bound_s >= part * best * (1 - 1e-8)


def chain(
    layers: int,
    devices: int,
    counts: tuple[int, ...],
    memory: float = math.inf,
    schedules: tuple[Schedule, ...] = ALL,
    seed: int | None = None,
    shared: tuple[SharedParameter, ...] = (),
) -> StageProblem:
    """Layers that take a second each on one device; two devices are 1.8 times as fast.

    With a seed, the layers take different times.
    """
    sizes = [2**k for k in range(devices.bit_length()) if 2**k <= devices]
    speed = np.array([1.8**k for k in range(len(sizes))])
    scale = np.ones(layers)
    if seed is not None:
        scale = np.random.default_rng(seed).uniform(0.5, 1.5, layers)
    table = scale[:, None] / speed

    def costs(count: int) -> LayerCosts:
        return LayerCosts(
            microbatches=count,
            forward_s=table / count / 3,
            backward_input_s=table / count / 3,
            backward_weight_s=table / count / 3,
            step_s=0.01 * table,
            resident_bytes=np.ones_like(table) / np.array(sizes),
            activation_bytes=8 * np.ones_like(table) / count / np.array(sizes),
            boundary_bytes=np.ones_like(table) / count / np.array(sizes),
            recompute_s=table / count / 3,
            transient_bytes=np.zeros_like(table),
            forward_link_s=np.full((layers - 1, 1, 1), 0.01 / count),
            backward_link_s=np.full((layers - 1, 1, 1), 0.01 / count),
            latency_s=np.full((1, 1), 1e-4),
        )

    return StageProblem(
        groups=(DeviceGroup(devices, memory),),
        options=tuple(SubmeshOption(0, size) for size in sizes),
        costs=tuple(costs(count) for count in counts),
        schedules=schedules,
        shared=shared,
    )


def even_pipelines(problem: StageProblem):
    """All pipelines with one option and the same number of layers in every part."""
    layers = problem.num_layers
    for costs, schedule, option, stages in itertools.product(
        problem.costs,
        problem.schedules,
        range(len(problem.options)),
        range(1, layers + 1),
    ):
        parts = stages * schedule.chunks
        devices = problem.options[option].devices * stages
        if layers % parts or devices > problem.groups[0].devices:
            continue
        for again in ((), tuple(range(layers))):
            yield Pipeline(
                microbatches=costs.microbatches,
                schedule=schedule,
                options=(option,) * stages,
                cuts=tuple(range(0, layers + 1, layers // parts)),
                recomputed=again,
            )


@pytest.mark.parametrize("memory", [math.inf, 20.0, 6.0])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_never_worse_than_even_pipelines(memory, seed):
    problem = chain(8, 8, (1, 4, 16), memory, seed=seed)
    solution = solve_stages(problem)
    check_stages(problem, solution)

    found = [evaluate_pipeline(problem, p) for p in even_pipelines(problem)]
    best = min((cost.step_s for cost in found if cost.fits), default=math.inf)
    assert solution.step_s <= best * (1 + 1e-9)


def test_pipelines_beat_one_stage():
    """Eight devices are 5.8 times as fast as one; eight stages nearly eight times."""
    problem = chain(8, 8, (1, 8, 64))
    solution = solve_stages(problem)
    alone = solve_stages(dataclasses.replace(problem, max_stages=1))

    assert solution.pipeline is not None
    assert solution.pipeline.stages > 1
    assert solution.step_s < alone.step_s / 1.2


def test_memory_forces_recomputation():
    """Two bytes of state a device and as many of activations, where 3.5 fit."""
    problem = chain(16, 8, (8,), memory=3.5, schedules=(ONE_F_ONE_B,))
    solution = solve_stages(problem)

    assert solution.pipeline is not None
    assert solution.pipeline.recomputed
    assert solution.cost is not None
    assert max(solution.cost.memory_bytes) <= 3.5 * (1 + 1e-9)


def test_unequal_devices_get_unequal_layers():
    """Half the devices are twice as fast: even cuts are 1.25 times as slow, or more."""
    problem = chain(12, 2, (64,), schedules=(ONE_F_ONE_B,))
    slow = problem.costs[0]
    columns = {
        field.name: np.tile(getattr(slow, field.name)[:, :1], 2)
        for field in dataclasses.fields(slow)
        if field.name.endswith("_bytes") and getattr(slow, field.name) is not None
    }
    factor = np.array([1.0, 0.5])
    times = {
        name: getattr(slow, name)[:, :1] * factor
        for name in (
            "forward_s",
            "backward_input_s",
            "backward_weight_s",
            "step_s",
            "recompute_s",
        )
    }
    mixed = dataclasses.replace(
        problem,
        groups=(DeviceGroup(2), DeviceGroup(2)),
        options=(SubmeshOption(0, 1), SubmeshOption(1, 1)),
        costs=(dataclasses.replace(slow, **columns, **times),),
    )
    solution = solve_stages(mixed)
    even = [
        evaluate_pipeline(
            mixed,
            Pipeline(
                microbatches=64,
                schedule=ONE_F_ONE_B,
                options=options,
                cuts=(0, 3, 6, 9, 12),
            ),
        ).step_s
        for options in set(itertools.permutations((0, 0, 1, 1)))
    ]

    assert solution.pipeline is not None
    sizes = dict(
        zip(solution.pipeline.options, np.diff(solution.pipeline.cuts), strict=True)
    )
    assert sizes == {0: 2, 1: 4}
    assert min(even) > 1.25 * solution.step_s


def test_a_parameter_shared_by_the_ends_can_keep_them_together():
    none = np.zeros(4)
    shared = SharedParameter(source=0, target=7, step_s=none + 50, copy_bytes=none)
    problem = chain(8, 8, (8,))
    tied = dataclasses.replace(problem, shared=(shared,))

    assert solve_stages(problem).pipeline != solve_stages(tied).pipeline
    assert solve_stages(tied).pipeline.stages == 1


def test_a_layer_that_fits_nowhere_is_named():
    problem = chain(4, 4, (1, 2), memory=2.0)
    costs = [
        dataclasses.replace(
            each, resident_bytes=each.resident_bytes + 9.0 * np.eye(4)[:, [2] * 3]
        )
        for each in problem.costs
    ]
    problem = dataclasses.replace(problem, costs=tuple(costs))
    solution = solve_stages(problem)
    binding = solution.binding

    assert solution.status is Status.INFEASIBLE
    assert solution.pipeline is None
    assert binding is not None
    assert binding.first <= 2 <= binding.last
    assert binding.limit_bytes == 2.0
    assert binding.least_bytes > 9.0


@settings(max_examples=examples(30), deadline=None)
@given(problems)
def test_every_pipeline_is_over_its_memory_by_what_binds(problem):
    solution = solve_stages(problem)
    if solution.binding is None:
        return
    share = solution.binding.least_bytes / solution.binding.limit_bytes
    assert share > 1
    for pipeline in all_pipelines(problem):
        cost = evaluate_pipeline(problem, pipeline)
        pairs = zip(cost.memory_bytes, cost.limit_bytes, strict=True)
        assert max(used / limit for used, limit in pairs) >= share * (1 - 1e-9)


def test_forbidden_layers_are_infeasible_without_memory_that_binds():
    problem = chain(2, 2, (1,))
    forbidden = np.full((2, 2), math.inf)
    costs = dataclasses.replace(problem.costs[0], forward_s=forbidden)
    solution = solve_stages(dataclasses.replace(problem, costs=(costs,)))

    assert solution.status is Status.INFEASIBLE
    assert solution.binding is None
    assert solution.bound_s == math.inf


def test_more_stages_than_devices_or_layers_are_not_tried():
    problem = chain(3, 2, (4,))
    solution = solve_stages(problem)

    assert solution.pipeline is not None
    assert solution.pipeline.stages <= 2


def test_a_time_limit_keeps_a_valid_result():
    problem = chain(24, 32, (1, 4, 16, 64), seed=3)
    solution = solve_stages(problem, seconds=0.0)

    check_stages(problem, solution)
    assert solution.pipeline is not None
    assert solution.status is Status.FEASIBLE


def test_the_same_problem_has_the_same_solution():
    problem = chain(12, 8, (4, 16), memory=9.0, seed=5)
    first, second = solve_stages(problem), solve_stages(problem)

    assert first.pipeline == second.pipeline
    assert first.bound_s == second.bound_s


@settings(max_examples=examples(30), deadline=None)
@given(problems)
def test_completion_takes_the_least_seconds(problem):
    """Of all sets of layers to compute again, none that fits is shorter."""
    best = dict[Pipeline, float]()
    for pipeline in itertools.islice(all_pipelines(problem), 200):
        cost = evaluate_pipeline(problem, pipeline)
        plain = dataclasses.replace(pipeline, recomputed=())
        known = best.setdefault(plain, math.inf)
        if cost.fits:
            best[plain] = min(known, cost.step_s)
    for plain, step_s in [*best.items()][:-1]:
        found = complete_pipeline(problem, plain)
        assert (found is None) == math.isinf(step_s)
        if found is not None:
            assert evaluate_pipeline(problem, found).step_s == step_s


def test_the_check_refuses_what_is_not_true():
    problem = chain(4, 4, (4,))
    solution = solve_stages(problem)
    check_stages(problem, solution)
    wrong: list[StageSolution] = [
        dataclasses.replace(solution, bound_s=2 * solution.step_s),
        dataclasses.replace(
            solution, cost=dataclasses.replace(solution.cost, step_s=1e-3)
        ),
        dataclasses.replace(solution, pipeline=None, cost=None),
    ]
    for each in wrong:
        with pytest.raises(ValueError, match="stages"):
            check_stages(problem, each)


def test_interleaved_parts_share_devices_in_what_binds():
    """Two heavy layers first: no two stages do as well as every other layer."""
    problem = chain(4, 2, (1,), schedules=(Schedule(ScheduleKind.INTERLEAVED, 2),))
    costs, none = problem.costs[0], np.zeros((4, 2))
    heavy = dataclasses.replace(
        costs,
        resident_bytes=np.array([[9.0], [9.0], [1.0], [1.0]]) + none,
        activation_bytes=none,
        boundary_bytes=none,
    )
    problem = dataclasses.replace(
        problem,
        groups=(DeviceGroup(2, 8.0),),
        options=(SubmeshOption(0, 1), SubmeshOption(0, 1)),
        costs=(heavy,),
    )
    every_other = Pipeline(
        microbatches=1,
        schedule=problem.schedules[0],
        options=(0, 0),
        cuts=(0, 1, 2, 3, 4),
    )
    assert evaluate_pipeline(problem, every_other).memory_bytes == (10.0, 10.0)
    binding = solve_stages(problem).binding

    assert binding is not None
    assert 8.0 < binding.least_bytes <= 10.0


def test_a_pipeline_is_found_after_the_time_limit_where_the_first_do_not_fit():
    """The faster option needs more than there is while a layer runs."""
    ones = np.ones((4, 2))
    link = np.zeros((3, 1, 1))
    problem = StageProblem(
        groups=(DeviceGroup(devices=2, memory_bytes=10.0),),
        options=(SubmeshOption(group=0, devices=1), SubmeshOption(group=0, devices=1)),
        costs=(
            LayerCosts(
                microbatches=2,
                forward_s=ones * [1.0, 2.0],
                backward_input_s=ones * [1.0, 2.0],
                backward_weight_s=ones * [1.0, 2.0],
                step_s=0 * ones,
                resident_bytes=0 * ones,
                activation_bytes=0.1 * ones,
                boundary_bytes=0 * ones,
                recompute_s=ones,
                transient_bytes=ones * [99.0, 1.0],
                forward_link_s=link,
                backward_link_s=link,
                latency_s=np.zeros((1, 1)),
            ),
        ),
        schedules=(ONE_F_ONE_B,),
    )
    found = solve_stages(problem, seconds=0.0)
    assert found.pipeline is not None
    assert set(found.pipeline.options) == {1}
