"""Random sharding problems, and brute force that gives their optimum."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from autopar_solver import MemoryTerm, ShardingProblem
from autopar_solver.sharding.problem import evaluate_choices


def random_problem(
    seed: int,
    *,
    max_nodes: int = 6,
    max_strategies: int = 4,
    max_edges: int = 9,
    memory: bool = True,
    forbidden: float = 0.2,
    scale: float = 1.0,
) -> ShardingProblem:
    """A problem of integer costs times ``scale``, with loops and parallel edges."""
    random = np.random.default_rng(seed)
    nodes = int(random.integers(1, max_nodes + 1))
    sizes = random.integers(1, max_strategies + 1, nodes)
    edges = [
        (int(i), int(j))
        for i, j in random.integers(0, nodes, (int(random.integers(0, max_edges)), 2))
    ]
    return ShardingProblem(
        name=f"random-{seed}",
        node_costs=tuple(_costs(random, (size,), 0.1, scale) for size in sizes),
        edges=tuple(edges),
        edge_costs=tuple(
            _costs(random, (sizes[i], sizes[j]), forbidden, scale) for i, j in edges
        ),
        memory=_terms(random, sizes) if memory else (),
        memory_limit=float(random.integers(3, 14)) if memory else None,
        fixed_memory=((2, 5, 1.0),) if memory else (),
    )


def _costs(random, shape, forbidden, scale):
    costs = random.integers(0, 10, shape) * scale
    costs[random.random(shape) < forbidden] = np.inf
    if not np.isfinite(costs).any():
        costs.flat[0] = scale
    return costs


def _terms(random, sizes):
    terms = []
    for _ in range(len(sizes) + 2):
        node = int(random.integers(0, len(sizes)))
        start, end = random.integers(0, 8, 2)
        usage = random.integers(0, 6, sizes[node]).astype(np.float64)
        terms.append(MemoryTerm(node=node, start=int(start), end=int(end), usage=usage))
    return tuple(terms)


@st.composite
def problems(draw, **options) -> ShardingProblem:
    """A hypothesis strategy of seeds: they shrink badly but reach all features."""
    seed = draw(st.integers(0, 10**6))
    forbidden = draw(st.sampled_from([0.0, 0.2, 0.6]))
    return random_problem(seed, forbidden=forbidden, **options)


def brute_force(problem: ShardingProblem) -> float:
    """The least cost of all feasible choices; infinite if there are none."""
    best = math.inf
    for choices in itertools.product(*map(range, problem.num_strategies)):
        found = evaluate_choices(problem, choices)
        limit = problem.memory_limit
        if limit is None or found.peak <= limit:
            best = min(best, found.cost)
    return best


def ladder(seed: int, *, length: int, strategies: int, tightness: float | None):
    """A ladder-shaped graph of random tables, with two memory terms per node."""
    random = np.random.default_rng(seed)
    nodes = 2 * length
    edges = [(i, i + 2) for i in range(nodes - 2)]
    edges += [(i, i + 1) for i in range(0, nodes, 2)]
    usages = [random.integers(0, 1000, strategies) * 1.0 for _ in range(nodes)]
    terms = [
        MemoryTerm(node=i, start=start, end=start + 7, usage=usage)
        for i, usage in enumerate(usages)
        for start in (i, i + 5)
    ]
    peak = sum(usage.max() for usage in usages[:7])
    return ShardingProblem(
        name=f"ladder-{seed}",
        node_costs=tuple(random.random(strategies) for _ in range(nodes)),
        edges=tuple(edges),
        edge_costs=tuple(random.random((strategies, strategies)) for _ in edges),
        memory=tuple(terms),
        memory_limit=None if tightness is None else float(int(tightness * peak)),
    )
