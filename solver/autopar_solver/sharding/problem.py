"""The intra-operator problem: one strategy for each node.

Let ``x[i]`` be the strategy of node ``i``::

    minimise    sum_i node_costs[i][x[i]] + sum_(i,j) edge_costs[i,j][x[i], x[j]]
    subject to  sum_(terms live at t) usage[x[node]] + fixed(t) <= memory_limit,  all t

The contest of ASPLOS/EuroSys 2025 on intra-operator parallelism (google/iopddl) has
problems of this form, but here a node may have any number of memory terms. All costs
have the same unit: in this project seconds, in the contest integers similar to
microseconds. All usages of memory have the same unit too, such as bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.status import Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTerm:
    """The memory that one node's strategy occupies at the times ``[start, end)``.

    ``usage`` has one entry for each strategy.

    Many terms may share one ``usage`` array. Sharing makes the solver faster.
    """

    node: int
    start: int
    end: int
    usage: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingProblem:
    """Nodes with strategies, edges with cost matrices, and a memory limit.

    Args:
        name: the name of the problem in messages.
        node_costs: for node ``i``: float64 ``[S_i]``; ``inf`` forbids a strategy.
        edges: pairs of nodes; parallel edges and loops ``(i, i)`` are allowed.
        edge_costs: for edge ``e = (i, j)``: float64 ``[S_i, S_j]``; ``inf`` forbids a
            pair.
        memory: any number of memory terms per node.
        memory_limit: the limit, in the unit of the usages; None for no limit.
        fixed_memory: ``(start, end, amount)`` of memory that no choice changes.

    Raises:
        InputError: an array has the wrong shape or values, or a node or an edge has
            only forbidden choices; the message names it.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionReport:
    """The nodes, edges and strategies that one exact reduction removed.

    ``strategies`` counts the removed strategies, including all those of removed nodes.
    """

    name: str
    nodes: int
    edges: int
    strategies: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One strategy per node, its cost, and a proven lower bound of every cost.

    ``choices`` is empty when the status is ``INFEASIBLE`` or ``UNKNOWN``. In that case
    the cost is infinite.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float
    status: Status
    seconds: float
    reductions: tuple[ReductionReport, ...] = ()

    @property
    def gap(self) -> float:
        """The cost minus the bound, divided by the cost."""
        if self.bound >= self.cost:
            return 0.0
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvaluation:
    """Cost, peak memory and the first time of the peak of some choices."""

    cost: float
    peak: float
    peak_time: int


def evaluate_choices(
    problem: ShardingProblem, choices: Sequence[int]
) -> ChoiceEvaluation:
    """Sums costs and memory; the cost is infinite if a choice is forbidden.

    Raises:
        InputError: the choices do not name one existing strategy per node.
    """
    _check_choices(problem, choices)
    costs = [float(row[k]) for row, k in zip(problem.node_costs, choices, strict=True)]
    costs += [
        float(matrix[choices[i], choices[j]])
        for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True)
    ]
    times, usage = memory_profile(problem, choices)
    at = int(np.argmax(usage)) if len(usage) else 0
    return ChoiceEvaluation(
        cost=math.fsum(costs),
        peak=float(usage[at]) if len(usage) else 0.0,
        peak_time=int(times[at]) if len(times) else 0,
    )


def memory_profile(
    problem: ShardingProblem, choices: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The times at which memory changes, and the usage from each time to the next."""
    live = [term for term in problem.memory if term.start < term.end]
    fixed = [item for item in problem.fixed_memory if item[0] < item[1]]
    amounts = [term.usage[choices[term.node]] for term in live]
    starts = [term.start for term in live] + [item[0] for item in fixed]
    ends = [term.end for term in live] + [item[1] for item in fixed]
    return usage_over_time(
        np.array(starts, np.int64),
        np.array(ends, np.int64),
        np.array(amounts + [item[2] for item in fixed], np.float64),
    )


def usage_over_time(
    starts: np.ndarray, ends: np.ndarray, amounts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums amounts over half-open intervals.

    The sums are computed as long doubles, so that sums of whole bytes are exact.

    >>> times, usage = usage_over_time(
    ...     starts=np.array([0, 1]), ends=np.array([2, 3]), amounts=np.array([5.0, 7.0])
    ... )
    >>> times.tolist(), usage.tolist()
    ([0, 1, 2, 3], [5.0, 12.0, 7.0, 0.0])
    """
    times, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.zeros(len(times), np.longdouble)
    wide = amounts.astype(np.longdouble)
    np.add.at(change, place, np.concatenate([wide, -wide]))
    return times, np.cumsum(change).astype(np.float64)


def check_solution(problem: ShardingProblem, solution: Solution) -> None:
    """Raises `InputError` unless the solution is consistent with the problem."""
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        if solution.choices:
            raise InputError(f"{problem.name}: {solution.status} but has choices.")
        return
    found = evaluate_choices(problem, solution.choices)
    if not math.isfinite(found.cost):
        raise InputError(f"{problem.name}: the solution makes a forbidden choice.")
    if not math.isclose(found.cost, solution.cost, rel_tol=1e-9, abs_tol=1e-300):
        raise InputError(
            f"{problem.name}: the choices cost {found.cost}, not {solution.cost}."
        )
    if problem.memory_limit is not None and found.peak > problem.memory_limit:
        raise InputError(
            f"{problem.name}: memory {found.peak} at time {found.peak_time} is over "
            f"the limit {problem.memory_limit}."
        )
    if solution.bound > solution.cost + 1e-9 * abs(solution.cost):
        raise InputError(
            f"{problem.name}: bound {solution.bound} above cost {solution.cost}."
        )


def _check_choices(problem: ShardingProblem, choices: Sequence[int]) -> None:
    sizes = problem.num_strategies
    if len(choices) != len(sizes):
        raise InputError(
            f"{problem.name}: {len(choices)} choices for {len(sizes)} nodes."
        )
    for i, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
        if not 0 <= choice < size:
            raise InputError(f"{problem.name}: node {i} has no strategy {choice}.")
