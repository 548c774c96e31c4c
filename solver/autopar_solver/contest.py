"""Problems and solutions in the files of the ASPLOS/EuroSys 2025 contest.

Format (google/iopddl): ``problem.nodes.intervals[i] = [start, end)``, ``costs[i][s]``,
``usages[i][s]``; ``problem.edges.nodes[e] = [i, j]``, ``costs[e]`` row-major over the
strategies of ``i`` and ``j``; ``usage_limit``. A cost of 10**18 is forbidden. A
solution is a JSON list with one strategy per node.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from autopar_solver.problem import MemoryTerm, ShardingProblem

FORBIDDEN = 1e18
"""A cost from which the contest calls a choice forbidden."""


class _Nodes(msgspec.Struct):
    intervals: list[tuple[int, int]]
    costs: list[list[float]]
    usages: list[list[float]]


class _Edges(msgspec.Struct):
    nodes: list[list[int]]
    costs: list[list[float]]


class _Problem(msgspec.Struct):
    nodes: _Nodes
    edges: _Edges
    name: str | None = None
    usage_limit: float | None = None


class _File(msgspec.Struct):
    problem: _Problem


def read(path: str | Path) -> ShardingProblem:
    """Reads an instance, plain JSON or gzip.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a valid instance; the message says what and where.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        raw = msgspec.json.decode(data, type=_File).problem
    except (msgspec.MsgspecError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a contest instance: {error}") from error
    return _to_problem(raw, raw.name or path.name)


def write_solution(path: str | Path, choices: Sequence[int]) -> None:
    """Writes choices as the contest's JSON list."""
    Path(path).write_bytes(msgspec.json.encode([int(choice) for choice in choices]))


def read_solution(path: str | Path) -> tuple[int, ...]:
    """Reads choices from a JSON list."""
    try:
        return tuple(msgspec.json.decode(Path(path).read_bytes(), type=list[int]))
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: not a contest solution: {error}") from error


def write(path: str | Path, problem: ShardingProblem) -> None:
    """Writes a problem with at most one memory term per node as plain JSON.

    Raises:
        ValueError: the contest's format cannot hold the problem.
    """
    intervals = [(0, 0)] * len(problem.node_costs)
    usages = [[0.0] * size for size in problem.num_strategies]
    if problem.fixed_memory:
        raise ValueError(f"{problem.name}: the format has no fixed memory.")
    seen: set[int] = set()
    for term in problem.memory:
        if term.node in seen:
            raise ValueError(f"{problem.name}: node {term.node} has several terms.")
        seen.add(term.node)
        intervals[term.node] = (term.start, term.end)
        usages[term.node] = term.usage.tolist()
    raw = _Problem(
        name=problem.name,
        nodes=_Nodes(
            intervals=intervals,
            costs=[_from_infinite(costs) for costs in problem.node_costs],
            usages=usages,
        ),
        edges=_Edges(
            nodes=[list(pair) for pair in problem.edges],
            costs=[_from_infinite(costs) for costs in problem.edge_costs],
        ),
        usage_limit=problem.memory_limit,
    )
    Path(path).write_bytes(msgspec.json.encode(_File(problem=raw)))


def _to_problem(raw: _Problem, name: str) -> ShardingProblem:
    nodes, edges = raw.nodes, raw.edges
    if not len(nodes.intervals) == len(nodes.costs) == len(nodes.usages):
        raise ValueError(
            f"{name}: {len(nodes.intervals)} intervals, {len(nodes.costs)} costs and "
            f"{len(nodes.usages)} usages of nodes; they must be as many."
        )
    if len(edges.nodes) != len(edges.costs):
        raise ValueError(
            f"{name}: {len(edges.nodes)} edges but {len(edges.costs)} edge costs."
        )
    pool: dict[bytes, np.ndarray] = {}
    sizes = [len(costs) for costs in nodes.costs]
    return ShardingProblem(
        name=name,
        node_costs=tuple(_to_infinite(costs, pool) for costs in nodes.costs),
        edges=tuple(_pair(e, ends, name) for e, ends in enumerate(edges.nodes)),
        edge_costs=tuple(
            _matrix(e, ends, costs, sizes, name, pool)
            for e, (ends, costs) in enumerate(
                zip(edges.nodes, edges.costs, strict=True)
            )
        ),
        memory=tuple(
            MemoryTerm(node=i, start=start, end=end, usage=_shared(usage, pool))
            for i, ((start, end), usage) in enumerate(
                zip(nodes.intervals, nodes.usages, strict=True)
            )
        ),
        memory_limit=raw.usage_limit,
    )


def _pair(e: int, ends: list[int], name: str) -> tuple[int, int]:
    if len(ends) != 2:
        raise ValueError(f"{name}: edge {e} joins {len(ends)} nodes, not 2.")
    return ends[0], ends[1]


def _matrix(
    e: int,
    ends: list[int],
    costs: list[float],
    sizes: list[int],
    name: str,
    pool: dict[bytes, np.ndarray],
) -> np.ndarray:
    if not all(0 <= i < len(sizes) for i in ends):
        raise ValueError(f"{name}: edge {e} {ends}: there are only {len(sizes)} nodes.")
    rows, columns = (sizes[i] for i in ends)
    if len(costs) != rows * columns:
        raise ValueError(
            f"{name}: edge {e} {ends}: {len(costs)} costs for "
            f"{rows} x {columns} pairs of strategies."
        )
    # A view of the shared row: equal tables stay one array.
    return _to_infinite(costs, pool, (rows, columns))


def _shared(
    values: list[float],
    pool: dict[bytes, np.ndarray],
    shape: tuple[int, ...] | None = None,
    forbidden: float = math.inf,
) -> np.ndarray:
    array = np.array(values, np.float64).reshape(shape or (len(values),))
    array[array >= forbidden] = np.inf
    key = repr(array.shape).encode() + array.tobytes()
    return pool.setdefault(key, array)


def _to_infinite(
    costs: list[float],
    pool: dict[bytes, np.ndarray],
    shape: tuple[int, ...] | None = None,
) -> np.ndarray:
    return _shared(costs, pool, shape, FORBIDDEN)


def _from_infinite(costs: np.ndarray) -> list[float]:
    return np.where(np.isinf(costs), FORBIDDEN, costs).reshape(-1).tolist()
