"""Bounds the cost from below by messages on edges and prices of memory rows.

A price ``p[r] >= 0`` for each memory row replaces the memory limit by a cost::

    bound(p) = min_x (cost(x) + sum_r p[r] (used(x)[r] - room[r]))  <=  best cost

Messages give a lower bound of the inner minimum; elimination after the messages raises
this bound. Each step of the search for prices changes them along a smoothed
subgradient, and then updates the messages with one sweep. If a step lowers the bound
too much, it is undone, and later steps are shorter.

*Mini-bucket elimination* bounds the cost of each strategy. Unlike the bounds of
messages, its bounds take cycles of edges into account. Nodes are eliminated one after
another. To eliminate a node, all tables that depend on the node are summed, and the sum
is minimised over the node's strategies. If the sum would be too large, its tables are
divided into several *mini-buckets*, each minimised separately. The node may then choose
a different strategy in each mini-bucket, which can only lower the result (Dechter and
Rish, "Mini-buckets", JACM 50(2), 2003). If no sum is divided, elimination is exact.

A second pass visits the buckets in reverse order, and gives a lower bound for every
strategy.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from autopar_solver.sharding.bounds.message_passing import MessagePassing
from autopar_solver.sharding.field import Field


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MiniBucketBounds:
    """The bounds that elimination proves at given costs.

    Attributes:
        bound: a lower bound of the cost of all choices, without the field's constant.
        rises: for each flat strategy, a number such that every choice with the strategy
            costs at least ``bound + rises``.
        choices: the best choices if ``exact``, else good choices.
        exact: whether elimination was exact, because no bucket was split.
    """

    bound: float
    rises: np.ndarray
    choices: np.ndarray
    exact: bool


class TooLargeError(Exception):
    """Elimination would need more work than allowed."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """A table over several nodes, in ascending order.

    ``source`` is the bucket whose result the table is; -1 for a table of the field.
    """

    scope: tuple[int, ...]
    table: np.ndarray
    source: int = -1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Factors of which elimination minimises the sum over one node, ``node``."""

    node: int
    scope: tuple[int, ...]
    factors: tuple[_Factor, ...]

    def total(self) -> np.ndarray:
        """Returns the sum of the factors."""
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
        field: the nodes and edges. Its memory counts only through ``costs``.
        costs: the cost of each flat strategy.
        tables: the cost table of each edge.
        max_entries: the largest number of entries of a table.
        max_work: the largest number of entries of all tables together.

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
    """The unused factors, and for each node the factors that depend on it."""

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
        """The number of entries of the node's bucket if the bucket is not split."""
        scope: set[int] = {node}
        for f in self.uses[node]:
            scope.update(self.factors[f].scope)
        return self.size(scope)


def _up(
    pool: _Pool, max_entries: int, max_work: int
) -> tuple[list[_Bucket], list[np.ndarray], bool]:
    """Eliminates the nodes, smallest bucket first."""
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
    """Builds one bucket if it is small enough, else several, largest factors first."""
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
    """The rise of each strategy: the largest that one of its node's buckets proves.

    ``outside[b]`` is a lower bound of the cost outside bucket ``b``, minus the bound of
    the whole field, for each combination of strategies in the bucket's result.
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
    """Returns the bucket's total minus one factor, minimised over all other nodes."""
    others = tuple(axis for axis, k in enumerate(bucket.scope) if k not in factor.scope)
    return total.min(axis=others) - factor.table


def _decode(field: Field, buckets: list[_Bucket]) -> np.ndarray:
    """Chooses strategies in reverse order; each is best given the later nodes."""
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


SMOOTHING = 0.3
"""Strategies with rises up to this share of the gap per node count as likely."""

MEMORY_OF_DIRECTION = 0.8
"""Weight of earlier subgradients in the direction of a step."""

TOLERATED_LOSS = 0.02
"""Share of the gap that a step may lose; subgradient steps need not improve."""

GROWTH, SHRINKAGE = 1.3, 0.5
"""Factors of the step length after a step that improved, and after an undone step."""

FIRST_STEP = 1e-2

SWEEP_SECONDS, VISIT_SECONDS, ENTRY_SECONDS = 1e-8, 2e-5, 3e-8
"""Approximate seconds of a step per pair, per node and per entry of elimination."""


class Dual:
    """Messages and prices of a field, which are improved in place.

    Attributes:
        prices: for each memory row, the cost per unit of memory.
        bound: the best bound so far, including the field's constant.
        bounds: for each flat strategy, the best lower bound of the cost of solutions
          that choose it.
        best_prices: the prices that gave ``bound``.
        costs: for each flat strategy, its cost at the current prices.
        rises: the rises of the last sweep; see `message_passing.Sweep`.
        bucket_choices: the choices of the last elimination; None if there was none.
    """

    def __init__(self, field: Field, prices: np.ndarray | None = None) -> None:
        """Starts without messages, at the given prices or at prices of 0."""
        self.field = field
        self.messages = MessagePassing(field)
        room = field.memory.room
        self.prices = np.zeros(len(room)) if prices is None else prices
        self.bound = -np.inf
        self.bounds = np.full(field.num_strategies, -np.inf)
        self.best_prices = self.prices
        self.rises = np.zeros(field.num_strategies)
        self.costs = self._evaluate_prices(self.prices)
        self.bucket_choices: np.ndarray | None = None
        self._elimination: tuple[int, int] | None = None
        self._level = -np.inf
        self._step = FIRST_STEP
        self._direction: np.ndarray | None = None
        self._unit = float(np.max(room, initial=0.0)) or 1.0

    @property
    def step_seconds(self) -> float:
        """The approximate seconds of a step."""
        swept = SWEEP_SECONDS * self.field.num_pairs
        swept += VISIT_SECONDS * self.field.num_nodes
        return swept + ENTRY_SECONDS * (
            self._elimination[1] / 2 if self._elimination else 0.0
        )

    def sweep(self) -> None:
        """Improves the messages at the current prices."""
        self._level = self._sweep(self.prices, self.costs)

    def deepen(self, max_entries: int, max_work: int) -> bool:
        """Lets later steps use elimination; returns False if this is too much work.

        Args:
            max_entries: the largest number of entries of a table; see
                `mini_bucket_bounds`.
            max_work: the largest number of entries of all tables together.
        """
        self._elimination = (max_entries, max_work)
        try:
            self.sweep()
        except TooLargeError:
            self._elimination = None
            return False
        return True

    def lighten(self) -> None:
        """Removes elimination from later steps, so that only messages remain."""
        self._elimination = None
        self.bucket_choices = None

    def ascend(self, upper: float) -> None:
        """Changes the prices once.

        ``upper`` is an estimate of the least cost, which sets the step's length.
        """
        gap = self._gap(upper)
        excess = self._excess(gap)
        for _ in range(4):
            prices = self._step_prices(excess, gap)
            costs = self._evaluate_prices(prices)
            saved, rises = self.messages.buffer.copy(), self.rises
            level = self._sweep(prices, costs)
            if level > self._level - TOLERATED_LOSS * gap:
                break
            self.messages.buffer[:] = saved
            self.rises = rises
            self._step *= SHRINKAGE
            self._direction = None
        else:
            return
        if level > self._level:
            self._step *= GROWTH
        self.prices, self.costs, self._level = prices, costs, level

    def expected_use(self, temperature: float) -> np.ndarray:
        """Expected memory of each row, for probabilities ~ exp(-rise / temperature)."""
        field = self.field
        # If elimination splits a node's bucket, all strategies of the node may have
        # positive rises. Only the rise above the node's least rise tells how likely a
        # strategy is to be chosen.
        least = np.minimum.reduceat(self.rises, field.offsets[:-1])
        above = self.rises - np.repeat(least, field.sizes)
        weights = np.exp(-above / temperature)
        totals = np.add.reduceat(weights, field.offsets[:-1])
        return field.memory.expected_usage(weights / np.repeat(totals, field.sizes))

    def _gap(self, upper: float) -> float:
        level = self._level + self.field.constant
        gap = upper - level if np.isfinite(upper) else 0.1 * abs(level)
        return max(gap, 1e-6 * abs(upper if np.isfinite(upper) else level), 1e-300)

    def _excess(self, gap: float) -> np.ndarray:
        temperature = SMOOTHING * gap / self.field.num_nodes
        used = self.expected_use(temperature)
        return (used - self.field.memory.room) / self._unit

    def _step_prices(self, excess: np.ndarray, gap: float) -> np.ndarray:
        """Returns the prices after one step.

        The change of a price is proportional to the price, as in exponentiated
        gradients. Prices of rows that limit the choices are high and therefore change
        fast. The many other prices stay at zero. A row with a price of zero gets a
        price only if its memory exceeds the limit by more than that of its neighbouring
        rows.
        """
        if self._direction is None:
            self._direction = excess
        keep = MEMORY_OF_DIRECTION
        self._direction = keep * self._direction + (1 - keep) * excess
        floor = 1e-3 * gap / self._unit
        support = (self.prices > 0) | peaks(self._direction)
        slope = np.where(support, self._direction, 0.0)
        move = slope * (self.prices + floor)
        gain = float(move @ slope)
        if not gain > 0:
            return self.prices
        length = self._step * gap / (gain * self._unit)
        prices = np.maximum(self.prices + length * move, 0.0)
        prices[prices < 1e-4 * floor] = 0.0
        return prices

    def _evaluate_prices(self, prices: np.ndarray) -> np.ndarray:
        field = self.field
        if not prices.any():
            return field.costs
        return field.costs + field.memory.cost_at(prices, field.num_strategies)

    def _sweep(self, prices: np.ndarray, costs: np.ndarray) -> float:
        swept = self.messages.sweep(costs)
        level = self._learn(prices, swept.base, swept.bound, swept.rises)
        if self._elimination is not None:
            found = self._eliminate(costs)
            self.bucket_choices = found.choices
            level = self._learn(prices, found.bound, found.bound, found.rises)
        return level

    def _eliminate(self, costs: np.ndarray) -> MiniBucketBounds:
        assert self._elimination is not None
        own, tables = self.messages.shift(costs)
        return mini_bucket_bounds(self.field, own, tables, *self._elimination)

    def _learn(
        self, prices: np.ndarray, base: float, bound: float, rises: np.ndarray
    ) -> float:
        """Stores proved bounds; returns the bound without the field's constant."""
        offset = -float(prices @ self.field.memory.room)
        self.rises = rises
        proved = base + offset + self.field.constant + rises
        # After an overflow a value may be NaN, which proves nothing.
        np.fmax(self.bounds, proved, out=self.bounds)
        if bound + offset + self.field.constant > self.bound:
            self.bound = bound + offset + self.field.constant
            self.best_prices = prices
        return bound + offset


def peaks(values: np.ndarray) -> np.ndarray:
    """Marks the largest value of each run of neighbouring positive values.

    >>> peaks(np.array([-1.0, 2.0, 3.0, 0.0, 1.0])).tolist()
    [False, False, True, False, True]
    """
    marked = np.zeros(len(values), bool)
    at = np.flatnonzero(values > 0)
    for stretch in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
        if len(stretch):
            marked[stretch[np.argmax(values[stretch])]] = True
    return marked
