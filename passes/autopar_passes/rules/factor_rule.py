"""Sharding rules of equations: which dimensions are the same factor.

A `FactorRule` says of each equation which dimensions of its operands and
results are one and the same *factor*, as an einsum does. The rules are read
from the compiler (see `autopar_passes.rules.shardy`); `register_rule` adds one for a
primitive that the compiler knows nothing about.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any


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
    """

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: str = ""

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
    def reduced(self) -> frozenset[int]:
        """Factors whose sharding leaves partial results."""
        return frozenset(f for f, k in enumerate(self.kinds) if k is FactorKind.REDUCE)


def replicated_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> FactorRule:
    """Returns the rule of an equation that must see whole arrays.

    Args:
      operands: shape of each operand.
      results: shape of each result.
    """
    sizes: list[int] = []

    def dims(shape: tuple[int, ...]) -> Dims:
        out: list[tuple[int, ...]] = []
        for size in shape:
            out.append((len(sizes),) if size > 1 else ())
            if size > 1:
                sizes.append(size)
        return tuple(out)

    operand_dims = tuple(dims(s) for s in operands)
    result_dims = tuple(dims(s) for s in results)
    kinds = (FactorKind.BLOCKED,) * len(sizes)
    return FactorRule(tuple(sizes), kinds, operand_dims, result_dims)


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


RuleFunction = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], FactorRule]
_REGISTRY: dict[str, RuleFunction] = {}


def register_rule(primitive: str) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the sharding rule of a primitive, such as a custom call.

    The decorated function takes the abstract operands, the abstract results
    (each with ``shape`` and ``dtype``) and the parameters of the equation, and
    returns a `FactorRule`. It wins over the compiler's own rule.

    >>> @register_rule("my_custom_call")
    ... def _(operands, results, params):
    ...     return elementwise_rule(
    ...         [o.shape for o in operands], [r.shape for r in results])
    """

    def add(function: RuleFunction) -> RuleFunction:
        _REGISTRY[primitive] = function
        return function

    return add


def registered_rule(
    primitive: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    params: dict[str, Any],
) -> FactorRule | None:
    """Returns the user's rule for an equation, or None if none is registered."""
    function = _REGISTRY.get(primitive)
    return None if function is None else function(operands, results, params)


@register_rule("optimization_barrier")
def _barrier(
    operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]
) -> FactorRule:
    """Each result is its operand: the barrier is an identity of many values."""
    del results, params
    sizes: list[int] = []
    dims: list[Dims] = []
    for operand in operands:
        one: list[tuple[int, ...]] = []
        for size in operand.shape:
            one.append((len(sizes),) if size > 1 else ())
            if size > 1:
                sizes.append(size)
        dims.append(tuple(one))
    kinds = (FactorKind.PASS,) * len(sizes)
    return FactorRule(tuple(sizes), kinds, tuple(dims), tuple(dims))
