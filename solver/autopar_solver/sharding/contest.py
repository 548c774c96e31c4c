"""Reads and writes the files of the ASPLOS/EuroSys 2025 contest.

The format (google/iopddl) has ``problem.nodes.intervals[i] = [start, end)``,
``costs[i][s]`` and ``usages[i][s]``. Each edge ``e`` of ``problem.edges`` has
``nodes[e] = [i, j]`` and ``costs[e]``, in row-major order over the strategies of ``i``
and ``j``. The field ``usage_limit`` is the memory limit. A cost of 10**18 marks a
forbidden strategy or pair. A solution is a JSON list with one strategy per node.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from autopar_errors import InputError
from autopar_solver.sharding.problem import MemoryTerm, ShardingProblem

FORBIDDEN = 1e18
"""Cost at and above which the contest forbids a choice."""


class _Nodes(msgspec.Struct):
    intervals: list[tuple[int, int]]
    costs: list[msgspec.Raw]
    usages: list[msgspec.Raw]


class _Edges(msgspec.Struct):
    nodes: list[list[int]]
    costs: list[msgspec.Raw]


class _Problem(msgspec.Struct):
    nodes: _Nodes
    edges: _Edges
    name: str | None = None
    usage_limit: float | None = None


class _File(msgspec.Struct):
    problem: _Problem


def read_contest_instance(path: str | Path) -> ShardingProblem:
    """Reads an instance from plain JSON or gzip.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is not a valid instance; the message names the fault.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        raw = msgspec.json.decode(data, type=_File).problem
    except (msgspec.MsgspecError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: not a contest instance: {error}") from error
    return _to_problem(raw, raw.name or path.name)


def write_contest_solution(path: str | Path, choices: Sequence[int]) -> None:
    """Writes choices as the contest's JSON list."""
    Path(path).write_bytes(msgspec.json.encode([int(choice) for choice in choices]))


def read_contest_solution(path: str | Path) -> tuple[int, ...]:
    """Reads choices from a JSON list."""
    try:
        return tuple(msgspec.json.decode(Path(path).read_bytes(), type=list[int]))
    except msgspec.MsgspecError as error:
        raise InputError(f"{path}: not a contest solution: {error}") from error


def write_contest_instance(path: str | Path, problem: ShardingProblem) -> None:
    """Writes a problem with at most one memory term per node as plain JSON.

    Raises:
        InputError: the contest's format cannot hold the problem.
    """
    intervals = [(0, 0)] * len(problem.node_costs)
    usages = [[0.0] * size for size in problem.num_strategies]
    if problem.fixed_memory:
        raise InputError(f"{problem.name}: the format has no fixed memory.")
    seen: set[int] = set()
    for term in problem.memory:
        if term.node in seen:
            raise InputError(f"{problem.name}: node {term.node} has several terms.")
        seen.add(term.node)
        intervals[term.node] = (term.start, term.end)
        usages[term.node] = term.usage.tolist()
    raw = _Problem(
        name=problem.name,
        nodes=_Nodes(
            intervals=intervals,
            costs=[_raw(_from_infinite(costs)) for costs in problem.node_costs],
            usages=[_raw(usage) for usage in usages],
        ),
        edges=_Edges(
            nodes=[list(pair) for pair in problem.edges],
            costs=[_raw(_from_infinite(costs)) for costs in problem.edge_costs],
        ),
        usage_limit=problem.memory_limit,
    )
    Path(path).write_bytes(msgspec.json.encode(_File(problem=raw)))


class _ArrayCache:
    """Caches arrays by their text in the file, because instances repeat few tables."""

    def __init__(self, name: str, forbidden: float) -> None:
        self.name = name
        self.forbidden = forbidden
        self.arrays: dict[bytes, np.ndarray] = {}
        self.tables: dict[tuple[bytes, int, int], np.ndarray] = {}

    def array(self, raw: msgspec.Raw, where: str) -> np.ndarray:
        key = bytes(raw)
        found = self.arrays.get(key)
        if found is None:
            found = self._parse(key, where)
            self.arrays[key] = found
        return found

    def table(
        self, raw: msgspec.Raw, rows: int, columns: int, where: str
    ) -> np.ndarray:
        key = (bytes(raw), rows, columns)
        found = self.tables.get(key)
        if found is None:
            flat = self.array(raw, where)
            if flat.size != rows * columns:
                raise InputError(
                    f"{self.name}: {where}: {flat.size} costs for "
                    f"{rows} x {columns} pairs of strategies."
                )
            found = flat.reshape(rows, columns)
            self.tables[key] = found
        return found

    def _parse(self, text: bytes, where: str) -> np.ndarray:
        try:
            values = msgspec.json.decode(text, type=list[float])
        except msgspec.MsgspecError as error:
            raise InputError(f"{self.name}: {where}: {error}") from error
        array = np.array(values, np.float64)
        array[array >= self.forbidden] = np.inf
        return array


def _to_problem(raw: _Problem, name: str) -> ShardingProblem:
    nodes, edges = raw.nodes, raw.edges
    if not len(nodes.intervals) == len(nodes.costs) == len(nodes.usages):
        raise InputError(
            f"{name}: {len(nodes.intervals)} intervals, {len(nodes.costs)} costs and "
            f"{len(nodes.usages)} usages of nodes; they must be as many."
        )
    if len(edges.nodes) != len(edges.costs):
        raise InputError(
            f"{name}: {len(edges.nodes)} edges but {len(edges.costs)} edge costs."
        )
    costs, usages = _ArrayCache(name, FORBIDDEN), _ArrayCache(name, math.inf)
    node_costs = tuple(
        costs.array(text, f"costs of node {i}") for i, text in enumerate(nodes.costs)
    )
    sizes = [len(own) for own in node_costs]
    pairs = [_pair(e, ends, sizes, name) for e, ends in enumerate(edges.nodes)]
    return ShardingProblem(
        name=name,
        node_costs=node_costs,
        edges=tuple(pairs),
        edge_costs=tuple(
            costs.table(text, sizes[i], sizes[j], f"edge {e} ({i}, {j})")
            for e, ((i, j), text) in enumerate(zip(pairs, edges.costs, strict=True))
        ),
        memory=tuple(
            MemoryTerm(
                node=i,
                start=start,
                end=end,
                usage=usages.array(text, f"usages of node {i}"),
            )
            for i, ((start, end), text) in enumerate(
                zip(nodes.intervals, nodes.usages, strict=True)
            )
        ),
        memory_limit=raw.usage_limit,
    )


def _pair(e: int, ends: list[int], sizes: list[int], name: str) -> tuple[int, int]:
    if len(ends) != 2:
        raise InputError(f"{name}: edge {e} joins {len(ends)} nodes, not 2.")
    i, j = ends
    if not (0 <= i < len(sizes) and 0 <= j < len(sizes)):
        raise InputError(f"{name}: edge {e} {ends}: there are only {len(sizes)} nodes.")
    return i, j


def _raw(values: list[float]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(values))


def _from_infinite(costs: np.ndarray) -> list[float]:
    return np.where(np.isinf(costs), FORBIDDEN, costs).reshape(-1).tolist()
