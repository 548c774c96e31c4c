"""The sharding rule of every equation of a program.

Equations that differ only in their values have one rule, so each *distinct*
equation is lowered once, all of them in one module, and the compiler's own
rules are read from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.program.equations import Equation, Program, Scalar, Value
from autopar_passes.rules.factor_rule import FactorRule
from autopar_passes.rules.registry import registered_rule
from autopar_passes.rules.shardy import LoweredEquation, read_rules


@dataclasses.dataclass(frozen=True, slots=True)
class RuleBook:
    """The rule of every equation of a program.

    Attributes:
      rules: by equation index; control flow has none.
      unsupported: primitives without any rule, planned replicated.
    """

    rules: dict[int, FactorRule]
    unsupported: tuple[str, ...]


def signature(eqn: Equation, values: Sequence[Value]) -> tuple[Any, ...]:
    """Returns what two equations must share to have the same rule and cost."""
    operands = tuple(
        ("literal", str(a.aval.dtype), str(a.value))
        if isinstance(a, Scalar)
        else (values[a].shape, str(values[a].dtype))
        for a in eqn.inputs
    )
    return (eqn.primitive, _params_key(eqn.params), operands)


def _params_key(params: dict[str, Any]) -> Any:
    items = tuple(sorted(params.items()))
    try:
        hash(items)
    except TypeError:
        return repr(items)
    return items


def rule_book(
    program: Program, equations: Sequence[Equation], signatures: Sequence[Any]
) -> RuleBook:
    """Returns the rules of ``equations``, lowering each distinct one once."""
    first: dict[Any, Equation] = {}
    for eqn, sig in zip(equations, signatures, strict=True):
        if not eqn.regions:
            first.setdefault(sig, eqn)
    rules: dict[Any, FactorRule] = {}
    lowered: list[tuple[Any, Equation]] = []
    for sig, eqn in first.items():
        own = registered_rule(eqn.primitive, *_avals(program, eqn), eqn.params)
        if own is not None:
            rules[sig] = own
        else:
            lowered.append((sig, eqn))
    found, unsupported = _lowered_rules(program, [e for _, e in lowered])
    rules.update((sig, r) for (sig, _), r in zip(lowered, found, strict=True))
    by_index = {
        e.index: rules[s]
        for e, s in zip(equations, signatures, strict=True)
        if not e.regions
    }
    return RuleBook(by_index, unsupported)


def _avals(program: Program, eqn: Equation) -> tuple[list[Any], list[Any]]:
    operands = [
        Value((), a.aval.dtype) if isinstance(a, Scalar) else program.values[a]
        for a in eqn.inputs
    ]
    return operands, [program.values[v] for v in eqn.outputs]


def _lowered_rules(
    program: Program, equations: Sequence[Equation]
) -> tuple[list[FactorRule], tuple[str, ...]]:
    """Lowers the equations side by side in one module and reads their rules."""
    if not equations:
        return [], ()
    structs = [
        [
            jax.ShapeDtypeStruct(program.values[a].shape, program.values[a].dtype)
            for a in eqn.inputs
            if isinstance(a, int)
        ]
        for eqn in equations
    ]

    def all_of_them(groups: list[list[Any]]) -> list[list[Any]]:
        out: list[list[Any]] = []
        for eqn, group in zip(equations, groups, strict=True):
            arrays = iter(group)
            args = [
                a.value if isinstance(a, Scalar) else next(arrays) for a in eqn.inputs
            ]
            out.append(jax_compat.bind(eqn.source, *args))
        return out

    lowered = jax.jit(all_of_them, keep_unused=True).trace(structs).lower()
    module: Any = lowered.compiler_ir("stablehlo")
    return read_rules(module, [_lowered(program, eqn) for eqn in equations])


def _lowered(program: Program, eqn: Equation) -> LoweredEquation:
    operands, results = _avals(program, eqn)
    return LoweredEquation(
        eqn.primitive,
        eqn.params,
        tuple(isinstance(a, Scalar) for a in eqn.inputs),
        tuple(v.shape for v in operands),
        tuple(v.shape for v in results),
    )
