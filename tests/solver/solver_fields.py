"""Fields of random problems, and their optima by brute force."""

import dataclasses

import numpy as np
from hypothesis import reject
from sharding_problems import ladder

from autopar_solver import evaluate_choices
from autopar_solver.sharding.field import flatten
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.reductions.pipeline import (
    build_graph,
    drop_infinite,
    drop_unsupported,
    settle_memory,
)

UNLIMITED = 10**9
"""Entries of tables: more than any test has."""


def graph_of_problem(problem):
    """The graph of a problem, without reductions except for infinite node costs."""
    graph = build_graph(problem)
    try:
        drop_infinite(graph)
    except ContradictionError:
        reject()
    return graph


def field_of(problem):
    return flatten(graph_of_problem(problem))


def solvable_field(problem):
    """The field without strategies and rows that can never fit; not reduced further."""
    graph = graph_of_problem(problem)
    try:
        drop_unsupported(graph)
        settle_memory(graph)
    except ContradictionError:
        reject()
    return flatten(graph)


def binding_field(seed, *, length=3, strategies=3):
    """A ladder with a memory limit that a fifth of all choices respect."""
    free = ladder(seed, length=length, strategies=strategies, tightness=1.0)
    random = np.random.default_rng(seed)
    peaks = [
        evaluate_choices(free, random.integers(0, strategies, 2 * length).tolist()).peak
        for _ in range(100)
    ]
    limit = float(np.quantile(peaks, 0.2, method="lower"))
    return solvable_field(dataclasses.replace(free, memory_limit=limit))


def random_choices(field, seed):
    random = np.random.default_rng(seed)
    return np.array([int(random.integers(size)) for size in field.sizes], np.int64)


def minima(field, costs):
    """For each strategy, the least cost of choices that contain it, by brute force."""
    best = np.full(field.num_strategies, np.inf)
    for choices in np.ndindex(*field.sizes.tolist()):
        flat = field.offsets[:-1] + np.array(choices)
        total = costs[flat].sum()
        for (k, m), table in zip(field.edges, field.tables, strict=True):
            total += table[choices[k], choices[m]]
        best[flat] = np.minimum(best[flat], total)
    return best
