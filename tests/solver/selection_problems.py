"""Codec selections small enough for brute force, and their optimum."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from autopar_solver import (
    CodecSelection,
    Status,
    recompute,
)
from autopar_solver.selection.problem import check_selection, fits_budgets


def random_problem(seed: int) -> CodecSelection:
    """A problem of small integers, with ties and with all features in some seeds.

    There are at most five gradients with at most four options each. Some gradients have
    equal options.
    """
    random = np.random.default_rng(seed)
    widths = random.integers(1, 5, random.integers(1, 6))
    if random.random() < 0.3:
        widths[:] = widths[0]
    sampled = [_columns(random, widths) for _ in range(4)]
    if random.random() < 0.3:
        for columns in sampled:
            for index in np.flatnonzero(widths == widths[0]):
                columns[index] = columns[0]
    wire, local, error, memory = (tuple(columns) for columns in sampled)
    limited = random.random() < 0.5
    return CodecSelection(
        name=f"random-{seed}",
        wire_s=wire,
        local_s=local,
        error=error,
        ready_s=tuple(random.integers(0, 12, len(widths)).astype(float)),
        backward_s=float(random.integers(5, 20)),
        error_budget=float(random.choice([math.inf, *range(14)])),
        memory_bytes=memory if limited else None,
        memory_budget_bytes=float(random.integers(0, 14)) if limited else None,
    )


def _columns(random, widths):
    columns = [random.integers(0, 7, width).astype(float) for width in widths]
    for row in columns:
        row[1:][random.random(len(row) - 1) < 0.05] = math.inf
    return columns


def realistic(seed: int, gradients: int, **options) -> CodecSelection:
    """Codecs of 32, 8, 4 and 1 bits, with times of a link of 25 MB/s."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(np.log(1e4), np.log(4e6), gradients)).round()
    bits, lost = np.array([32.0, 8, 4, 1]), np.array([0.0, 1e-4, 0.02, 0.4])
    encode = np.array([0.0, 0.4e-9, 0.6e-9, 0.3e-9])
    energy = random.lognormal(size=gradients)
    backward = sizes.sum() * 2e-8
    fields = {
        "wire_s": tuple(bits * size / 8 / 25e6 for size in sizes),
        "local_s": tuple(encode * size for size in sizes),
        "error": tuple(lost * part for part in energy),
        "ready_s": tuple(np.cumsum(sizes[::-1])[::-1] / sizes.sum() * backward),
        "backward_s": backward,
        "error_budget": 0.05 * energy.sum(),
    }
    return CodecSelection(**{**fields, **options})


problems = st.integers(0, 10**6).map(random_problem)


def all_costs(problem):
    """Yields every feasible choice of codecs within the budgets, with its cost."""
    for choices in itertools.product(*map(range, problem.num_options)):
        cost = recompute(problem, choices)
        total = cost.cost_s + cost.error + cost.memory_bytes
        if math.isfinite(total) and fits_budgets(problem, cost):
            yield choices, cost.cost_s


def best(problem):
    return min((cost for _, cost in all_costs(problem)), default=math.inf)


def exposed_by_definition(problem, choices):
    """The largest of ``ready_l`` plus the time to send all gradients from ``l`` on."""
    order = sorted(range(len(choices)), key=lambda i: (problem.ready_s[i], i))
    wire = [float(problem.wire_s[i][choices[i]]) for i in order]
    ends = [problem.ready_s[i] + sum(wire[at:]) for at, i in enumerate(order)]
    return max(0.0, max(ends) - problem.backward_s)


def assert_best(problem, result):
    check_selection(problem, result)
    least = best(problem)
    if math.isinf(least):
        assert result.status is Status.INFEASIBLE
        assert result.bound_s == math.inf
    else:
        assert result.status is Status.OPTIMAL
        assert math.isclose(result.cost_s, least, rel_tol=1e-9, abs_tol=1e-9)
        assert result.bound_s <= least + 1e-9
