"""Bounds the cost of each strategy by mini-bucket elimination.

Unlike messages on edges, these bounds see cycles. Nodes are eliminated one after
another; eliminating a node adds up all tables that mention it and minimises over its
strategies. Where the sum would be too large, its tables are dealt into several
*mini-buckets* that are minimised on their own: the node may then answer each of them
differently, which only lowers the result (Dechter and Rish, "Mini-buckets", JACM 50(2),
2003). Without splits it is exact.

A pass back down the tree of buckets gives every strategy's own bound.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from autopar_solver.sharding.field import Field


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MiniBucketBounds:
    """What elimination proves at given costs.

    Attributes:
        bound: no choices cost less, the field's constant excluded.
        rises: by flat strategy: choosing it costs at least ``bound + rises``.
        choices: the best if ``exact``, else good ones.
        exact: whether nothing was split.
    """

    bound: float
    rises: np.ndarray
    choices: np.ndarray
    exact: bool


class TooLargeError(Exception):
    """Elimination would take more work than allowed."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """A table over nodes, in increasing order; ``source`` is the bucket it is from."""

    scope: tuple[int, ...]
    table: np.ndarray
    source: int = -1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Factors whose sum, over ``scope``, is minimised over ``node``."""

    node: int
    scope: tuple[int, ...]
    factors: tuple[_Factor, ...]

    def total(self) -> np.ndarray:
        """The sum of the factors."""
        total = np.zeros((1,) * len(self.scope))
        for factor in self.factors:
            total = total + _spread(factor.table, factor.scope, self.scope)
        return total


def mini_bucket_bounds(
    field: Field,
    costs: np.ndarray,
    tables: Sequence[np.ndarray],
    max_entries: int,
    max_work: int,
) -> MiniBucketBounds:
    """Eliminates all nodes with tables of at most ``max_entries`` entries.

    Args:
        field: the nodes and edges; its memory counts only as ``costs`` price it.
        costs: by flat strategy.
        tables: by edge.
        max_entries: of the largest table.
        max_work: entries of all tables together.

    Raises:
        TooLargeError: more work would be needed.
    """
    buckets, results, exact = _up(_Pool(field, costs, tables), max_entries, max_work)
    bound = sum(float(r) for r in results if r.ndim == 0)
    return MiniBucketBounds(
        bound=bound,
        rises=_down(field, buckets, results),
        choices=_decode(field, buckets),
        exact=exact,
    )


class _Pool:
    """The factors not used yet, and who mentions whom."""

    def __init__(
        self, field: Field, costs: np.ndarray, tables: Sequence[np.ndarray]
    ) -> None:
        self.sizes = field.sizes.tolist()
        self.factors: dict[int, _Factor] = {}
        self.uses: list[set[int]] = [set() for _ in self.sizes]
        self.count = 0
        for k, own in enumerate(np.split(costs, field.offsets[1:-1])):
            self.add(_Factor((k,), own))
        for edge, table in zip(field.edges, tables, strict=True):
            self.add(_Factor(edge, table))

    def add(self, factor: _Factor) -> None:
        for k in factor.scope:
            self.uses[k].add(self.count)
        self.factors[self.count] = factor
        self.count += 1

    def take(self, node: int) -> list[_Factor]:
        taken = sorted(self.uses[node])
        for f in taken:
            for k in self.factors[f].scope:
                self.uses[k].discard(f)
        return [self.factors.pop(f) for f in taken]

    def size(self, scope: tuple[int, ...] | set[int]) -> int:
        return math.prod(self.sizes[k] for k in scope)

    def weight(self, node: int) -> int:
        """Entries of the node's bucket if it is not split."""
        scope: set[int] = {node}
        for f in self.uses[node]:
            scope.update(self.factors[f].scope)
        return self.size(scope)


def _up(
    pool: _Pool, max_entries: int, max_work: int
) -> tuple[list[_Bucket], list[np.ndarray], bool]:
    """Eliminates, the smallest bucket first."""
    size = len(pool.sizes)
    waiting = [(pool.weight(k), k) for k in range(size)]
    heapq.heapify(waiting)
    buckets: list[_Bucket] = []
    results: list[np.ndarray] = []
    done = np.zeros(size, bool)
    exact = True
    while waiting:
        weight, node = heapq.heappop(waiting)
        if done[node] or weight != pool.weight(node):
            continue
        done[node] = True
        groups = _deal(node, pool.take(node), pool, max_entries)
        exact &= len(groups) == 1
        changed: set[int] = set()
        for bucket in groups:
            max_work -= pool.size(bucket.scope)
            if max_work < 0:
                raise TooLargeError
            result = bucket.total().min(axis=bucket.scope.index(node))
            rest = tuple(k for k in bucket.scope if k != node)
            if rest:
                pool.add(_Factor(rest, result, len(buckets)))
                changed.update(rest)
            buckets.append(bucket)
            results.append(result)
        for k in changed:
            heapq.heappush(waiting, (pool.weight(k), k))
    return buckets, results, exact


def _deal(
    node: int, factors: list[_Factor], pool: _Pool, max_entries: int
) -> list[_Bucket]:
    """One bucket if it is small enough, else several; large factors first."""
    order = sorted(factors, key=lambda factor: -factor.table.size)
    groups: list[tuple[set[int], list[_Factor]]] = []
    for factor in order:
        for scope, members in groups:
            if pool.size(scope | set(factor.scope)) <= max_entries:
                scope.update(factor.scope)
                members.append(factor)
                break
        else:
            groups.append(({node, *factor.scope}, [factor]))
    return [
        _Bucket(node, tuple(sorted(scope)), tuple(members)) for scope, members in groups
    ]


def _spread(
    table: np.ndarray, scope: tuple[int, ...], wider: tuple[int, ...]
) -> np.ndarray:
    """Reshapes a table over ``scope`` so that it broadcasts over ``wider``."""
    sizes = dict(zip(scope, table.shape, strict=True))
    return table.reshape([sizes.get(k, 1) for k in wider])


def _down(
    field: Field, buckets: list[_Bucket], results: list[np.ndarray]
) -> np.ndarray:
    """Each strategy's rise: the least of its node's buckets, the rest answering best.

    ``outside[b]`` is what everything beyond bucket ``b`` costs at least, above the
    bound, given the strategies that the bucket's result mentions.
    """
    rises = np.zeros(field.num_strategies)
    outside: dict[int, np.ndarray] = {}
    for b in reversed(range(len(buckets))):
        bucket = buckets[b]
        total = bucket.total()
        rest = tuple(k for k in bucket.scope if k != bucket.node)
        if rest:
            total = total + _spread(outside.pop(b), rest, bucket.scope)
        else:
            total = total - results[b]
        for axis, k in enumerate(bucket.scope):
            if k != bucket.node:
                continue
            others = tuple(a for a in range(total.ndim) if a != axis)
            own = slice(field.offsets[k], field.offsets[k + 1])
            np.maximum(rises[own], total.min(axis=others), out=rises[own])
        for factor in bucket.factors:
            if factor.source >= 0:
                outside[factor.source] = _without(total, bucket, factor)
    return rises


def _without(total: np.ndarray, bucket: _Bucket, factor: _Factor) -> np.ndarray:
    """The bucket's total less one factor, minimised to that factor's scope."""
    others = tuple(axis for axis, k in enumerate(bucket.scope) if k not in factor.scope)
    return total.min(axis=others) - factor.table


def _decode(field: Field, buckets: list[_Bucket]) -> np.ndarray:
    """Chooses in the opposite order, each best for what its buckets know."""
    choices = np.zeros(field.num_nodes, np.int64)
    costs: dict[int, np.ndarray] = {}
    for b, bucket in reversed(list(enumerate(buckets))):
        node = bucket.node
        total = costs.get(node, np.zeros(int(field.sizes[node])))
        for factor in bucket.factors:
            key = tuple(slice(None) if k == node else choices[k] for k in factor.scope)
            total = total + factor.table[key]
        costs[node] = total
        if b == 0 or buckets[b - 1].node != node:
            choices[node] = total.argmin()
    return choices
