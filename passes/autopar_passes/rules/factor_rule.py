"""Sharding rules of equations: which dimensions are the same factor.

A `FactorRule` says of each equation which dimensions of its operands and
results are one and the same *factor*, as an einsum does. The rules are read
from the compiler (see `autopar_passes.rules.book`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence


class FactorKind(enum.Enum):
    """What happens when a mesh axis is assigned to a factor."""

    PASS = "parallel: each shard is computed alone"
    REDUCE = "reduced: shards hold partial results"
    BLOCKED = "must be replicated"


# `FactorRule.reduction` of an equation that reduces and then goes on, such as a
# gather that fills in what is out of bounds: it must reduce to every device.
INNER = "inner"

# Per dimension, the factors that make it up, major to minor. () is a
# dimension of size one.
Dims = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FactorRule:
    """The factors of one equation.

    Attributes:
      sizes: size of each factor.
      kinds: what sharding each factor means.
      operands: for each operand, the factors of each dimension.
      results: the same for each result.
      reduction: how partial results combine: ``sum``, ``max``, ``min``, ``or``,
        ``and``, or `INNER`; '' where there is no reduction factor.
      sums: for each result, the parallel factors over whose shards the operator
        itself adds it up before it hands it on; () where there are none.
      whole: factors that one mesh axis of their size must split; no other way of
        running the operator means the same.
    """

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: str = ""
    sums: tuple[tuple[int, ...], ...] = ()
    whole: tuple[int, ...] = ()

    def factors_of(self, dims: Dims) -> frozenset[int]:
        """Returns the factors that appear in one operand or result."""
        return frozenset(f for dim in dims for f in dim)

    @property
    def free(self) -> frozenset[int]:
        """Factors of more than one element that may be sharded."""
        return frozenset(
            f
            for f, (size, kind) in enumerate(zip(self.sizes, self.kinds, strict=True))
            if size > 1 and kind is not FactorKind.BLOCKED
        )

    @property
    def reduced_factors(self) -> frozenset[int]:
        """Factors whose sharding leaves partial results."""
        if FactorKind.REDUCE not in self.kinds:
            return frozenset()
        return frozenset(f for f, k in enumerate(self.kinds) if k is FactorKind.REDUCE)

    reduced = reduced_factors  # the old name, for one release


def replicated_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> FactorRule:
    """Returns the rule of an equation that must see whole arrays.

    Args:
      operands: shape of each operand.
      results: shape of each result.
    """
    return separate_rule(operands, results, FactorKind.BLOCKED)


def separate_rule(
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    kind: FactorKind,
) -> FactorRule:
    """Returns the rule in which no two dimensions are the same factor.

    Args:
      operands: shape of each operand.
      results: shape of each result.
      kind: of all factors.
    """
    numbers = itertools.count()
    dims = [
        tuple((next(numbers),) if size > 1 else () for size in shape)
        for shape in (*operands, *results)
    ]
    sizes = tuple(s for shape in (*operands, *results) for s in shape if s > 1)
    kinds = (kind,) * len(sizes)
    count = len(operands)
    return FactorRule(sizes, kinds, tuple(dims[:count]), tuple(dims[count:]))


def elementwise_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> FactorRule:
    """Returns the rule of an equation that works on each element alone.

    Every operand must be a scalar or have the shape of the results.
    """
    shape = results[0]
    factors = [d for d, size in enumerate(shape) if size > 1]
    number = {d: f for f, d in enumerate(factors)}
    dims: Dims = tuple((number[d],) if d in number else () for d in range(len(shape)))
    return FactorRule(
        tuple(shape[d] for d in factors),
        (FactorKind.PASS,) * len(factors),
        tuple(dims if s == shape else ((),) * len(s) for s in operands),
        tuple(dims for _ in results),
    )
