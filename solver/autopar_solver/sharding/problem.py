"""The intra-operator problem: one strategy for each node.

In symbols, with ``x[i]`` the strategy of node ``i``::

    minimise    sum_i node_costs[i][x[i]] + sum_(i,j) edge_costs[i,j][x[i], x[j]]
    subject to  sum_(terms live at t) usage[x[node]] + fixed(t) <= memory_limit,  all t

This is the form of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism
(google/iopddl), with any number of memory terms per node. Costs are in any one unit
(seconds here, microseconds-like integers in the contest), usages in any other.
"""

import dataclasses
import math

import numpy as np

from autopar_errors import InputError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTerm:
    """What one node's choice occupies over ``[start, end)``.

    Many terms may share one ``usage`` array; sharing makes the solver faster.
    """

    node: int
    start: int
    end: int
    usage: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingProblem:
    """Nodes with strategies, edges with cost matrices, and a memory limit.

    Args:
        name: how messages call this problem.
        node_costs: node ``i``: float64 ``[S_i]``; ``inf`` forbids a strategy.
        edges: pairs of nodes; parallel edges and loops ``(i, i)`` are allowed.
        edge_costs: edge ``e = (i, j)``: float64 ``[S_i, S_j]``; ``inf`` forbids a pair.
        memory: any number of terms per node.
        memory_limit: in the unit of the usages; None for no limit.
        fixed_memory: ``(start, end, amount)`` that no choice changes.

    Raises:
        InputError: an array has the wrong shape or values, or a node or an edge
            leaves nothing to choose; the message names it.

    >>> ShardingProblem(
    ...     name="pair",
    ...     node_costs=(np.array([1.0, 2.0]), np.array([0.0])),
    ...     edges=((0, 1),),
    ...     edge_costs=(np.array([[5.0], [1.0]]),),
    ... ).num_strategies
    (2, 1)
    """

    name: str
    node_costs: tuple[np.ndarray, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_costs: tuple[np.ndarray, ...] = ()
    memory: tuple[MemoryTerm, ...] = ()
    memory_limit: float | None = None
    fixed_memory: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        """Checks shapes and values."""
        _check_nodes(self)
        _check_edges(self)
        _check_memory(self)

    @property
    def num_strategies(self) -> tuple[int, ...]:
        """The number of strategies of each node."""
        return tuple(len(costs) for costs in self.node_costs)


def _check_nodes(problem: ShardingProblem) -> None:
    checked: set[int] = set()
    for i, costs in enumerate(problem.node_costs):
        if id(costs) in checked:
            continue
        checked.add(id(costs))
        where = f"{problem.name}: node {i}"
        if costs.ndim != 1 or not costs.size:
            raise InputError(
                f"{where}: costs must be one non-empty row, got shape {costs.shape}."
            )
        _check_costs(costs, where)


def _check_costs(costs: np.ndarray, where: str) -> None:
    least = costs.min()
    if math.isnan(least) or least == -math.inf:
        raise InputError(f"{where}: costs must be numbers or +inf, got {least}.")
    if least == math.inf:
        raise InputError(f"{where}: no feasible choice: every cost is infinite.")


def _check_edges(problem: ShardingProblem) -> None:
    sizes = problem.num_strategies
    if len(problem.edges) != len(problem.edge_costs):
        raise InputError(
            f"{problem.name}: {len(problem.edges)} edges but "
            f"{len(problem.edge_costs)} edge cost matrices."
        )
    checked: set[int] = set()
    for e, ((i, j), costs) in enumerate(
        zip(problem.edges, problem.edge_costs, strict=True)
    ):
        if not (0 <= i < len(sizes) and 0 <= j < len(sizes)):
            where = f"{problem.name}: edge {e} ({i}, {j})"
            raise InputError(f"{where}: there are only {len(sizes)} nodes.")
        if costs.shape != (sizes[i], sizes[j]):
            raise InputError(
                f"{problem.name}: edge {e} ({i}, {j}): costs must have shape "
                f"{(sizes[i], sizes[j])}, got {costs.shape}."
            )
        if id(costs) not in checked:
            _check_costs(costs, f"{problem.name}: edge {e} ({i}, {j})")
            checked.add(id(costs))


def _check_memory(problem: ShardingProblem) -> None:
    sizes = problem.num_strategies
    checked: set[int] = set()
    for m, term in enumerate(problem.memory):
        if not 0 <= term.node < len(sizes):
            where = f"{problem.name}: memory term {m} of node {term.node}"
            raise InputError(f"{where}: there are only {len(sizes)} nodes.")
        if term.usage.shape != (sizes[term.node],):
            raise InputError(
                f"{problem.name}: memory term {m} of node {term.node}: usage must have "
                f"shape {(sizes[term.node],)}, got {term.usage.shape}."
            )
        if id(term.usage) not in checked:
            checked.add(id(term.usage))
            where = f"{problem.name}: memory term {m} of node {term.node}"
            _check_usage(term.usage, where)
    for start, end, amount in problem.fixed_memory:
        _check_usage(np.array([amount]), f"{problem.name}: fixed [{start}, {end})")
    if problem.memory_limit is not None and math.isnan(problem.memory_limit):
        raise InputError(f"{problem.name}: the memory limit is not a number.")


def _check_usage(usage: np.ndarray, where: str) -> None:
    if not (np.isfinite(usage).all() and usage.min() >= 0):
        raise InputError(
            f"{where}: usage must be finite and not negative, got {usage.min()}."
        )
