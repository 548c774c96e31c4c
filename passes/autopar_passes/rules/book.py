"""The sharding rule of every equation of a program.

Equations with the same shapes and parameters have the same rule, whatever arrays they
read and write. So each *distinct* equation is lowered only once. All distinct equations
are lowered in one module, from which the compiler's own rules are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from autopar_passes import jax_compat
from autopar_passes.program.equations import Equation, Program, Scalar, Value
from autopar_passes.rules.factor_rule import (
    FactorRule,
    KernelWork,
    registered_rule,
    replicated_rule,
)
from autopar_passes.rules.kernels import (
    is_kernel,
    kernel_name,
    kernel_rule,
    kernel_work,
)
from autopar_passes.rules.shardy import LoweredEquation, read_rules

# Platforms whose lowerings are tried in this order, on any host.
PLATFORMS = ("cpu", "cuda", "tpu")
# The errors that JAX raises if a platform has no lowering of a primitive. The first is
# a base class, which includes the most frequent error.
_NO_LOWERING = (RuntimeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True)
class RuleBook:
    """The rule of every equation of a program.

    Attributes:
      rules: the rule by equation index; control flow has no rule.
      unsupported: primitives and kernels without a rule, which are replicated.
      kernels: the work by equation index, for equations that are hand-written kernels.
    """

    rules: dict[int, FactorRule]
    unsupported: tuple[str, ...]
    kernels: dict[int, KernelWork]


def signature(eqn: Equation, values: Sequence[Value]) -> tuple[Any, ...]:
    """Returns a key that is equal for equations with the same rule and cost."""
    operands = tuple(
        ("literal", str(a.aval.dtype), str(a.value))
        if isinstance(a, Scalar)
        else (values[a].shape, values[a].dtype)
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
    """Returns the rules of ``equations``; lowers each distinct equation once."""
    found = _Kernels(program, equations)
    signatures = [found.key(e, s) for e, s in zip(equations, signatures, strict=True)]
    first: dict[Any, Equation] = {}
    for eqn, sig in zip(equations, signatures, strict=True):
        if not eqn.regions:
            first.setdefault(sig, eqn)
    rules: dict[Any, FactorRule] = {}
    lowered: list[tuple[Any, Equation]] = []
    for sig, eqn in first.items():
        own = registered_rule(eqn.primitive, *_avals(program, eqn), eqn.params)
        if is_kernel(eqn.primitive):
            rules[sig] = found.rule(sig, eqn)
        elif own is not None:
            rules[sig] = own
        else:
            lowered.append((sig, eqn))
    read, unsupported = _lowered_rules(program, [e for _, e in lowered])
    rules.update((sig, r) for (sig, _), r in zip(lowered, read, strict=True))
    pairs = list(zip(equations, signatures, strict=True))
    return RuleBook(
        {e.index: rules[s] for e, s in pairs if not e.regions},
        tuple(sorted({*unsupported, *found.unsupported})),
        {e.index: found.works[s] for e, s in pairs if s in found.works},
    )


class _Kernels:
    """The rules and the work of the kernels of a program."""

    def __init__(self, program: Program, equations: Sequence[Equation]) -> None:
        self.program = program
        self.read = {a for e in equations for a in e.arrays}
        for region in (program.body, *(r for e in equations for r in e.regions)):
            self.read.update(a for a in region.outputs if isinstance(a, int))
        self.arrays = program.constant_arrays
        self.unsupported: set[str] = set()
        self.works: dict[Any, KernelWork] = {}

    def key(self, eqn: Equation, sig: Any) -> Any:
        """Returns a key that is equal for equations with the same rule and kernel work.

        For a kernel, the key also has the constant operands and which results are read.
        """
        if not is_kernel(eqn.primitive):
            return sig
        held = tuple(a for a in eqn.inputs if a in self.arrays)
        return (sig, held, tuple(v in self.read for v in eqn.outputs))

    def rule(self, sig: Any, eqn: Equation) -> FactorRule:
        """Returns the rule of a kernel, and stores its `KernelWork`."""
        operands, results = _avals(self.program, eqn)
        arrays = [
            self.arrays.get(a) if isinstance(a, int) else a.value for a in eqn.inputs
        ]
        self.works[sig] = kernel_work(eqn, operands, results, arrays)
        read = [v in self.read for v in eqn.outputs]
        rule = kernel_rule(eqn, operands, results, read)
        if rule is None:
            self.unsupported.add(f"kernel '{kernel_name(eqn)}'")
            return replicated_rule(
                [o.shape for o in operands], [r.shape for r in results]
            )
        return rule


def _avals(program: Program, eqn: Equation) -> tuple[list[Any], list[Any]]:
    operands = [
        Value((), a.aval.dtype) if isinstance(a, Scalar) else program.values[a]
        for a in eqn.inputs
    ]
    return operands, [program.values[v] for v in eqn.outputs]


def _lowered_rules(
    program: Program, equations: Sequence[Equation]
) -> tuple[list[FactorRule], tuple[str, ...]]:
    """Lowers independent equations in one module and reads their rules.

    If one platform cannot lower an equation, the next platform is tried. So the rules
    do not depend on the host. An equation that no platform can lower is replicated, and
    its primitive is reported.
    """
    if not equations:
        return [], ()
    with contextlib.suppress(*_NO_LOWERING):
        return _read(program, equations, PLATFORMS[0])
    groups: dict[str, list[int]] = {}
    for k, eqn in enumerate(equations):
        groups.setdefault(_platform(program, eqn), []).append(k)
    rules: dict[int, FactorRule] = {}
    unsupported: set[str] = set()
    for platform, members in groups.items():
        chosen = [equations[k] for k in members]
        if platform:
            found, names = _read(program, chosen, platform)
        else:
            found = [
                _lowered_equation(program, eqn).replicated_rule() for eqn in chosen
            ]
            names = tuple(eqn.primitive for eqn in chosen)
        rules.update(zip(members, found, strict=True))
        unsupported.update(names)
    return [rules[k] for k in range(len(equations))], tuple(sorted(unsupported))


def _platform(program: Program, eqn: Equation) -> str:
    """Returns the first platform that can lower an equation; '' if no platform can."""
    for platform in PLATFORMS:
        with contextlib.suppress(*_NO_LOWERING):
            _module(program, [eqn], platform)
            return platform
    return ""


def _read(
    program: Program, equations: Sequence[Equation], platform: str
) -> tuple[list[FactorRule], tuple[str, ...]]:
    """Returns the rules of equations that a platform can lower."""
    module = _module(program, equations, platform)
    return read_rules(module, [_lowered_equation(program, eqn) for eqn in equations])


def _module(program: Program, equations: Sequence[Equation], platform: str) -> Any:
    """Returns a StableHLO module that runs the equations, each on its own arguments."""
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
            out.append(jax_compat.bind_unordered(eqn.source, *args))
        return out

    traced = jax.jit(all_of_them, keep_unused=True).trace(structs)
    return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


def _lowered_equation(program: Program, eqn: Equation) -> LoweredEquation:
    operands, results = _avals(program, eqn)
    return LoweredEquation(
        eqn.primitive,
        eqn.params,
        tuple(isinstance(a, Scalar) for a in eqn.inputs),
        tuple(v.shape for v in operands),
        tuple(v.shape for v in results),
    )
