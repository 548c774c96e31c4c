"""Sharding rules that are registered, for what the compiler knows nothing about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from autopar_passes.rules.factor_rule import FactorKind, FactorRule, separate_rule

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
    rule = separate_rule([o.shape for o in operands], [], FactorKind.PASS)
    return dataclasses.replace(rule, results=rule.operands)
