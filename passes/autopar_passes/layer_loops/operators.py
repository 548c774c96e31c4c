"""What operators do with a dimension that is in pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar_passes.layer_loops.paths import ranges
from autopar_passes.program.building import renumber_equation
from autopar_passes.program.equations import Equation, Program, Region

# Operators that treat each element by itself.
POINTWISE = frozenset(
    {
        "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp",
        "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
        "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
        "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real",
        "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
        "square", "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip
# Operators over dimensions -> what puts the results of two pieces together.
REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


def in_order(program: Program) -> Program:
    """The program with equations numbered in their order, bodies first."""
    numbers: dict[int, int] = {}

    def count(region: Region) -> None:
        for eqn in region.equations:
            for inner in eqn.regions:
                count(inner)
            numbers[eqn.index] = len(numbers)

    count(program.body)
    equations = tuple(
        renumber_equation(e, lambda v: v, numbers.__getitem__)
        for e in program.body.equations
    )
    return dataclasses.replace(
        program, body=dataclasses.replace(program.body, equations=equations)
    )


_Changed = tuple[int, Callable[[int], dict[str, Any]]]


def move_dim(
    eqn: Equation, dim: int, shapes: Sequence[tuple[int, ...]]
) -> _Changed | None:
    """Where an operator that moves dimensions puts one; None: not known, or nowhere.

    Also returns its parameters on a piece, as a function of the piece's size.
    """
    params, shape = eqn.params, shapes[0]
    match eqn.primitive:
        case "broadcast_in_dim":
            to = params["broadcast_dimensions"][dim]
            if params["shape"][to] != shape[dim]:
                return None
            return to, lambda n: {"shape": _with(params["shape"], to, n)}
        case "reshape":
            before, out = math.prod(shape[:dim]), params["new_sizes"]
            for to, size in enumerate(out):
                if math.prod(out[:to]) == before and size == shape[dim]:
                    return to, lambda n, to=to: {"new_sizes": _with(out, to, n)}
            return None
        case "transpose":
            return params["permutation"].index(dim), lambda _: {}
        case "squeeze":
            dims = params["dimensions"]
            return dim - sum(d < dim for d in dims), lambda _: {}
        case "concatenate" if params["dimension"] != dim:
            return dim, lambda _: {}
        case _:
            return None


def resize_dim(
    eqn: Equation, dim: int, sizes: Sequence[int]
) -> list[dict[str, Any]] | None:
    """Parameters of a slice or of padding on each piece of a dimension.

    None: it is no such operator, or a piece would be empty.
    """
    params = eqn.params
    if eqn.primitive == "slice":
        start, limit = params["start_indices"], params["limit_indices"]
        strides = params["strides"]
        ends = [(max(start[dim], a), min(limit[dim], b)) for a, b in ranges(sizes)]
        if any(a >= b for a, b in ends) or (strides and strides[dim] != 1):
            return None
        return [
            {
                "start_indices": _with(start, dim, a - begin),
                "limit_indices": _with(limit, dim, b - begin),
            }
            for (a, b), (begin, _) in zip(ends, ranges(sizes), strict=True)
        ]
    if eqn.primitive == "pad":
        config = params["padding_config"]
        low, high, inner = config[dim]
        if min(low, high) < 0 or inner:
            return None
        return [
            {
                "padding_config": (
                    *config[:dim],
                    (low * (k == 0), high * (k == len(sizes) - 1), 0),
                    *config[dim + 1 :],
                )
            }
            for k in range(len(sizes))
        ]
    return None


def _with(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])
