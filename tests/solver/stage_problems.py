"""Stage problems small enough for brute force over all pipelines."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from autopar_solver.stages.completion import (
    devices_used,
    evaluate_pipeline,
    lower_bound_s,
    task_seconds,
)
from autopar_solver.stages.problem import (
    DeviceGroup,
    LayerCosts,
    Pipeline,
    SharedParameter,
    StageProblem,
    SubmeshOption,
)
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind

PLAIN = (
    Schedule(ScheduleKind.ONE_F_ONE_B),
    Schedule(ScheduleKind.GPIPE),
    Schedule(ScheduleKind.ZERO_BUBBLE),
)


def random_costs(
    random, microbatches: int, layers: int, options: int, links: int, base
) -> LayerCosts:
    """Random costs, scaled to about equal work for every number of microbatches."""
    table = (layers, options)

    def numbers(low: int, high: int, shape=table) -> np.ndarray:
        return random.integers(low, high, shape).astype(float)

    scale = 12 / microbatches
    forward = base * scale + numbers(0, 3)
    forward[random.random(table) < 0.05] = math.inf
    activation = numbers(1, 9)
    recompute = np.where(random.random(table) < 0.2, math.inf, numbers(1, 5))
    between = (layers - 1, links, links)
    forward_link = numbers(0, 5, between) * (random.random() < 0.7)
    forward_link[random.random(between) < 0.05] = math.inf
    return LayerCosts(
        microbatches=microbatches,
        forward_s=forward,
        backward_input_s=base * scale + numbers(0, 3),
        backward_weight_s=base * scale * (random.random() < 0.9),
        step_s=numbers(0, 9) * (random.random() < 0.7),
        resident_bytes=numbers(0, 9),
        activation_bytes=activation,
        boundary_bytes=np.minimum(activation, numbers(0, 3)),
        recompute_s=recompute,
        transient_bytes=numbers(0, 5),
        forward_link_s=forward_link,
        backward_link_s=numbers(0, 5, between) * (random.random() < 0.7),
        latency_s=numbers(0, 3, (links, links)),
        pending_bytes=numbers(0, 9) if random.random() < 0.5 else None,
        enter_s=numbers(0, 2) if random.random() < 0.3 else None,
        leave_s=numbers(0, 2) if random.random() < 0.3 else None,
    )


def random_problem(
    seed: int, *, most_layers: int = 3, schedules=PLAIN, most_counts: int = 2
) -> StageProblem:
    """A problem of small integers, with all features in some seeds and tight memory."""
    random = np.random.default_rng(seed)
    layers = int(random.integers(1, most_layers + 1))
    groups = tuple(
        DeviceGroup(
            int(random.integers(1, 5)),
            float(random.choice([math.inf, *range(10, 60, 5)])),
        )
        for _ in range(random.integers(1, 3))
    )
    options = tuple(
        SubmeshOption(
            group := int(random.integers(len(groups))),
            int(random.integers(1, groups[group].devices + 1)),
            link=int(random.integers(0, 2)),
        )
        for _ in range(random.integers(1, 4))
    )
    speed = np.array([option.devices for option in options]) ** 0.7
    base = (random.integers(1, 9, (layers, 1)) / speed).round() + 1
    links = 1 + max(option.link for option in options)
    counts = random.choice(4, int(random.integers(1, most_counts + 1)), replace=False)
    shared = ()
    if random.random() < 0.3:
        ends = random.integers(0, layers, 2)
        numbers = random.integers(0, 9, (2, len(options))).astype(float)
        shared = (
            SharedParameter(
                source=int(ends[0]),
                target=int(ends[1]),
                step_s=numbers[0],
                copy_bytes=numbers[1],
            ),
        )
    some = random.random(len(schedules)) < 0.6
    some[random.integers(len(schedules))] = True
    return StageProblem(
        name=f"random-{seed}",
        groups=groups,
        options=options,
        costs=tuple(
            random_costs(random, int(count) + 1, layers, len(options), links, base)
            for count in counts
        ),
        schedules=tuple(s for s, use in zip(schedules, some, strict=True) if use),
        shared=shared,
        blocking=bool(random.random() < 0.2),
        max_stages=int(random.integers(1, 4)) if random.random() < 0.1 else None,
    )


problems = st.integers(0, 10**6).map(random_problem)


def all_pipelines(problem: StageProblem):
    """Every pipeline that devices and links allow, for schedules of one chunk."""
    layers = problem.num_layers
    most = min(layers, problem.max_stages or layers)
    for costs, schedule in itertools.product(problem.costs, problem.schedules):
        for stages in range(1, most + 1):
            for inner in itertools.combinations(range(1, layers), stages - 1):
                cuts = (0, *inner, layers)
                for options in itertools.product(
                    range(len(problem.options)), repeat=stages
                ):
                    if not allowed(problem, costs, options, cuts):
                        continue
                    for again in subsets(costs, options, cuts):
                        yield Pipeline(
                            microbatches=costs.microbatches,
                            schedule=schedule,
                            options=options,
                            cuts=cuts,
                            recomputed=again,
                        )


def allowed(problem, costs, options, cuts) -> bool:
    used = devices_used(problem, options)
    if any(n > g.devices for n, g in zip(used, problem.groups, strict=True)):
        return False
    links = [problem.options[option].link for option in options]
    crossing = zip(cuts[1:-1], links[:-1], links[1:], strict=True)
    if any(math.isinf(costs.forward_link_s[c - 1, a, b]) for c, a, b in crossing):
        return False
    return all(
        math.isfinite(costs.forward_s[layer, option])
        for option, low, high in zip(options, cuts[:-1], cuts[1:], strict=True)
        for layer in range(low, high)
    )


def subsets(costs, options, cuts):
    option_of = np.repeat(options, np.diff(cuts))
    layers = range(len(option_of))
    can = [n for n in layers if math.isfinite(costs.recompute_s[n, option_of[n]])]
    for size in range(len(can) + 1):
        yield from itertools.combinations(can, size)


def brute_force(problem: StageProblem) -> float:
    """The shortest step time of all pipelines that fit."""
    best = math.inf
    for pipeline in all_pipelines(problem):
        seconds = task_seconds(problem, pipeline)
        if lower_bound_s(pipeline, seconds) >= best:
            continue
        cost = evaluate_pipeline(problem, pipeline)
        if cost.fits:
            best = min(best, cost.step_s)
    return best
