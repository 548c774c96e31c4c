"""Finds the values of a step whose tokens may be in the order of a ring of devices.

A causal mask gives later tokens more work. Ring attention therefore works on tokens in
another order, in which each device has an early and a late chunk of the sequence
(`autopar_passes.rules.factor_rule.worker`). An attention kernel alone would have to
bring its operands into this order and its results back, in each layer and each pass.
Most other operators of a step compute each token by itself, or add up tokens, so they
give the same results in any order. If the tokens and their positions come into the
order of the ring once, all these operators stay in this order.

An operator may stay in the order of the ring if its dimension of tokens is a factor
that passes through, or that is summed, and if the operator reads no positions. A list
of primitives says which operators read none. The values between such operators and the
attention kernels form a *region*. A value that enters the region, such as the tokens or
the positions of rotary embeddings (``iota``), is permuted once. A value that leaves the
region is permuted back. Both are worth it only for small values, so a step with large
ones keeps the exchanges in its kernels.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar_passes.graph.operators import Operator
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation, Program, Region, Value, walk
from autopar_passes.rules import kernels
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

Array = Any

# Primitives that compute each element from the same element of their operands.
_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh",
        "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil",
        "clamp", "complex", "conj", "convert_element_type", "copy", "cos",
        "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
        "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le",
        "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
        "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision",
        "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
        "sqrt", "square", "sub", "tan", "tanh", "xor", "optimization_barrier",
    }
)  # fmt: skip
# Primitives that give the same result for tokens in any order if their rule passes the
# dimension of tokens or sums it.
_ANY_ORDER = _ELEMENTWISE | frozenset(
    {
        "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims",
        "dot_general", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod",
        "reduce_and", "reduce_or", "reduce_xor",
    }
)  # fmt: skip
# Values that enter or leave the region may have this share of the bytes that the
# kernels would exchange otherwise.
_MOST = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class RingOrder:
    """The values of a program whose tokens are in the order of a ring.

    Attributes:
      dims: value -> its dimensions of tokens.
      inside: indices of the equations that read and compute values in the order of the
        ring.
      entering: the values of ``dims`` that are computed in the plain order.
      kernels: indices of the equations of causal attention kernels.
    """

    dims: Mapping[int, tuple[int, ...]]
    inside: frozenset[int]
    entering: frozenset[int]
    kernels: tuple[int, ...]

    def turn(self, value: int, reader: int) -> int:
        """How a reader needs a value permuted.

        Args:
          value: the value.
          reader: index of the equation that reads the value; -1 for results.

        Returns:
          1 for a permutation into the order of the ring, -1 for the inverse, and 0 for
          none.
        """
        if value not in self.dims:
            return 0
        return (reader in self.inside) - (value not in self.entering)

    def fits(self, values: Sequence[Value], devices: int) -> bool:
        """Whether all sequences have two chunks of equal size for each device."""
        return all(
            values[v].shape[d] % (2 * devices) == 0
            for v, dims in self.dims.items()
            for d in dims
        )


def to_ring(x: Array, dim: int, devices: int) -> Array:
    """Permutes a dimension of tokens from the plain order to that of a ring.

    >>> to_ring(jnp.arange(8), 0, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]

    Args:
      x: an array.
      dim: the dimension; its size is a multiple of twice the number of devices.
      devices: the number of devices of the ring.
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    halves = x.reshape(*before, 2, devices, -1, *after)
    early, late = (jnp.take(halves, k, dim) for k in range(2))
    return jnp.stack([early, jnp.flip(late, dim)], dim + 1).reshape(x.shape)


def from_ring(x: Array, dim: int, devices: int) -> Array:
    """Returns the inverse of `to_ring`.

    >>> from_ring(to_ring(jnp.arange(8), 0, 2), 0, 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    pairs = x.reshape(*before, devices, 2, -1, *after)
    early, late = (jnp.take(pairs, k, dim + 1) for k in range(2))
    return jnp.concatenate([early, jnp.flip(late, dim)], dim).reshape(x.shape)


def place_tokens(
    program: Program, operators: Sequence[Operator]
) -> tuple[Operator, ...]:
    """Returns the operators, with kernels that find their tokens in the ring's order.

    The operators are unchanged if the step has no `ring_order`.

    Args:
      program: the program.
      operators: its operators, with roles.
    """
    order = ring_order(program, operators)
    if not isinstance(order, RingOrder):
        return tuple(operators)
    return tuple(
        dataclasses.replace(op, rule=_placed(op.rule))
        if op.equation in order.kernels
        else op
        for op in operators
    )


def _placed(rule: FactorRule) -> FactorRule:
    """A kernel's rule without exchanges before and after the ring."""
    exchanges = tuple(
        e if e.around else dataclasses.replace(e, placed=True) for e in rule.exchanges
    )
    return dataclasses.replace(rule, exchanges=exchanges)


def ring_order(program: Program, operators: Sequence[Operator]) -> RingOrder | str:
    """Finds the values of a program whose tokens may be in the order of a ring.

    Args:
      program: the program.
      operators: its operators, with roles.

    Returns:
      The order for all causal attention kernels of the program; or the reason why they
      bring tokens into their order and back themselves.
    """
    if not any(op.rule.halved_factors for op in operators):
        return "the step has no causal attention kernel that a ring can compute"
    by_equation: dict[int, list[Operator]] = collections.defaultdict(list)
    for op in operators:
        by_equation[op.equation].append(op)
    found: list[RingOrder] = []
    exchanged = moved = 0.0
    for region in _regions(program):
        seeds = [
            op
            for eqn in region.equations
            for op in by_equation[eqn.index]
            if op.rule.halved_factors
        ]
        if not seeds:
            continue
        search = _Search(program, region, by_equation)
        order = search.run(seeds)
        if isinstance(order, str):
            return order
        found.append(order)
        exchanged += sum(map(_exchanged_bytes, seeds, [program.values] * len(seeds)))
        moved += search.moved_bytes(order)
    if moved > _MOST * exchanged:
        return (
            "values that read positions, or that a loop carries, would have to be "
            f"permuted: {moved / 1e9:.3g} GB of {exchanged / 1e9:.3g} GB that the "
            "kernels exchange"
        )
    values = [v for order in found for v in order.dims]
    if len(values) > len(set(values)):
        return "two loops read the same tokens"
    return RingOrder(
        {v: dims for order in found for v, dims in order.dims.items()},
        frozenset().union(*(order.inside for order in found)),
        frozenset().union(*(order.entering for order in found)),
        tuple(k for order in found for k in order.kernels),
    )


def _regions(program: Program) -> list[Region]:
    """The body of a program, and the bodies of its loops and branches."""
    inner = [r for eqn in walk(program.body) for r in eqn.regions]
    return [program.body, *inner]


def _exchanged_bytes(op: Operator, values: Sequence[Value]) -> float:
    """Bytes that a kernel's devices exchange before and after the ring."""
    return sum(
        0.5 * values[(op.outputs if e.result else op.inputs)[e.slot] or 0].nbytes
        for e in op.rule.exchanges
        if not e.around
    )


class _Search:
    """The search for values in the order of a ring, in one region of a program."""

    def __init__(
        self,
        program: Program,
        region: Region,
        operators: Mapping[int, Sequence[Operator]],
    ) -> None:
        self.values, self.region, self.operators = program.values, region, operators
        self.equations = {eqn.index: eqn for eqn in region.equations}
        self.maker: dict[int, Equation] = {}
        self.readers: dict[int, list[Equation]] = collections.defaultdict(list)
        for eqn in region.equations:
            self.maker.update(dict.fromkeys(eqn.outputs, eqn))
            for value in eqn.arrays:
                self.readers[value].append(eqn)

    def run(self, seeds: Iterable[Operator]) -> RingOrder | str:
        """Returns the values that are connected with attention kernels."""
        ordered: set[tuple[int, int]] = set()
        inside: set[int] = set()
        waiting = [pair for op in seeds for pair in self.pairs(op, _sequence(op))]
        while waiting:
            pair = waiting.pop()
            if pair in ordered:
                continue
            ordered.add(pair)
            for eqn in self.around(pair[0]):
                for op in self.operators[eqn.index]:
                    for factor in self.factors(op, pair):
                        if factor is not None and self.passes(eqn, op, factor):
                            inside.add(eqn.index)
                            waiting += self.pairs(op, factor)
        dims: dict[int, list[int]] = collections.defaultdict(list)
        for value, dim in sorted(ordered):
            dims[value].append(dim)
        for index in inside:
            eqn = self.equations[index]
            for op in self.operators[index]:
                for value in {v for v in (*op.inputs, *op.outputs) if v in dims}:
                    for dim in dims[value]:
                        for factor in self.factors(op, (value, dim)):
                            if factor is None or not self.passes(eqn, op, factor):
                                return f"'{eqn.primitive}' reads tokens in two ways"
        entering = {
            v for v in dims if v not in self.maker or self.maker[v].index not in inside
        }
        for value in dims.keys() - entering:
            for eqn in self.readers[value]:
                roles = {op.role for op in self.operators[eqn.index]}
                if eqn.index not in inside and Role.UPDATE in roles:
                    return "a parameter has an entry for each position"
        causal = [
            index
            for index in self.equations
            if any(op.rule.halved_factors for op in self.operators[index])
        ]
        return RingOrder(
            {v: tuple(d) for v, d in dims.items()},
            frozenset(inside),
            frozenset(entering),
            tuple(causal),
        )

    def around(self, value: int) -> list[Equation]:
        """The equations of the region that compute or read a value."""
        maker = self.maker.get(value)
        return [*([] if maker is None else [maker]), *self.readers[value]]

    def pairs(self, op: Operator, factor: int) -> list[tuple[int, int]]:
        """The dimensions of values that are a factor of an operator."""
        return [
            (value, dim)
            for value, dims in _slots(op)
            for dim, factors in enumerate(dims)
            if factors == (factor,) and self.values[value].shape[dim] > 1
        ]

    def factors(self, op: Operator, pair: tuple[int, int]) -> set[int | None]:
        """The factors that a dimension is for an operator; None for several at once."""
        value, dim = pair
        return {
            dims[dim][0] if len(dims[dim]) == 1 else None
            for other, dims in _slots(op)
            if other == value
        }

    def passes(self, eqn: Equation, op: Operator, factor: int) -> bool:
        """Whether an operator gives the same results for tokens in any order.

        The results may be in the same order as the operands.
        """
        rule = op.rule
        if op.role is Role.UPDATE or rule.whole or eqn.regions:
            return False
        if rule.kinds[factor] is FactorKind.EXCHANGED:
            return eqn.primitive in kernels.RINGS
        if rule.kinds[factor] not in (FactorKind.PASS, FactorKind.REDUCE):
            return False
        alone = all(
            factors == (factor,)
            for _, dims in _slots(op)
            for factors in dims
            if factor in factors
        )
        return alone and reads_no_positions(eqn, rule, factor)

    def moved_bytes(self, order: RingOrder) -> float:
        """Bytes of values that are permuted where they enter or leave the region."""
        left = {v for v in self.region.outputs if isinstance(v, int)}
        for eqn in self.region.equations:
            if eqn.index not in order.inside:
                left.update(eqn.arrays)
        leaving = (order.dims.keys() - order.entering) & left
        return float(sum(self.values[v].nbytes for v in (*order.entering, *leaving)))


def _sequence(op: Operator) -> int:
    """The factor of an attention kernel that is the sequence."""
    (factor,) = op.rule.halved_factors
    return factor


def _slots(op: Operator) -> list[tuple[int, Any]]:
    """The operands and results of an operator that are values, with their dims."""
    pairs = [
        *zip(op.inputs, op.rule.operands, strict=True),
        *zip(op.outputs, op.rule.results, strict=True),
    ]
    return [(value, dims) for value, dims in pairs if value is not None]


def reads_no_positions(eqn: Equation, rule: FactorRule, factor: int) -> bool:
    """Whether an equation gives the same results for a factor in any order.

    Args:
      eqn: the equation.
      rule: its rule.
      factor: a factor that passes through the equation, or that it sums.
    """
    if eqn.primitive in _ANY_ORDER:
        return True
    if not rule.operands:
        return False
    first = [dim for dim, factors in enumerate(rule.operands[0]) if factor in factors]
    in_result = any(factor in rule.factors_of(dims) for dims in rule.results)
    params = eqn.params
    match eqn.primitive:
        case "argmax" | "argmin":
            return in_result
        case "slice":
            shape = eqn.source.invars[0].aval.shape
            steps = params["strides"] or (1,) * len(shape)
            return all(
                (params["start_indices"][d], params["limit_indices"][d], steps[d])
                == (0, shape[d], 1)
                for d in first
            )
        case "pad":
            return all(tuple(params["padding_config"][d]) == (0, 0, 0) for d in first)
        case "concatenate":
            dim = params["dimension"]
            return all(factor not in dims[dim] for dims in rule.operands)
        case "split":
            return params["axis"] not in first
        case "gather":
            read = params["dimension_numbers"].start_index_map
            return in_result and not set(read).intersection(first)
        case "scatter-add":
            written = params["dimension_numbers"].scatter_dims_to_operand_dims
            return not set(written).intersection(first)
        case _:
            return False
