"""The effect of operators on a layer dimension that is split into pieces.

A *piece* holds some consecutive layers of a stacked array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar_passes.program.equations import Equation, Program, Region
from autopar_passes.program.flatten import renumber_equation


def layer_ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """For each piece, its first layer and the layer after its last.

    >>> layer_ranges([2, 3])
    [(0, 2), (2, 5)]
    """
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def piece_paths(path: str, sizes: Sequence[int]) -> list[str]:
    """The paths of the pieces of an array.

    >>> piece_paths("params/kernel", [2, 3])
    ['params/kernel@0:2', 'params/kernel@2:5']
    """
    return [f"{path}@{a}:{b}" for a, b in layer_ranges(sizes)]


def piece_arguments(
    count: int, sizes: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Flat argument -> the flat arguments that are its pieces.

    Args:
      count: the number of arguments of the step before the split.
      sizes: flat argument -> the number of layers of each of its pieces.
    """
    out: dict[int, list[int]] = {}
    for k in sorted(sizes):
        more = len(sizes[k]) - 1
        out[k] = [k, *range(count, count + more)]
        count += more
    return out


def piece_holders(
    sizes: Sequence[int], stages: Sequence[int], count: int
) -> tuple[int, ...]:
    """For each piece of an array, the pipeline stage that holds it between steps.

    If the pieces have equal sizes and each stage runs the same number of them, the
    array is sharded over the stages: the first stage holds the first pieces, and so on.
    Otherwise the stage of the first piece holds the whole array.

    Args:
      sizes: the sizes of the pieces.
      stages: the stage that runs each piece.
      count: the number of stages.

    >>> piece_holders([2, 2, 2, 2], [0, 1, 0, 1], 2)
    (0, 0, 1, 1)
    >>> piece_holders([2, 1], [0, 1], 2)
    (0, 0)
    """
    each = len(sizes) // count
    even = all(list(stages).count(stage) == each for stage in range(count))
    if len(set(sizes)) > 1 or not even:
        return (stages[0],) * len(sizes)
    return tuple(k // each for k in range(len(sizes)))


def whole_path(path: str) -> str:
    """The path of the array that a piece belongs to; empty if the path is no piece's.

    >>> whole_path("params/kernel@0:2")
    'params/kernel'
    >>> whole_path("params/kernel")
    ''
    """
    whole, _, layers = path.rpartition("@")
    return whole if layers.replace(":", "").isdecimal() else ""


# Elementwise operators.
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
# Operators that reduce dimensions -> the function that combines the results of two
# pieces.
REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


def in_order(program: Program) -> Program:
    """Returns the program with equations renumbered, each body before its loop."""
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
    """The position of a dimension after an operator; None if it is lost or unknown.

    Also returns a function from a piece's size to the operator's parameters on it.
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
    """The parameters of a slice or padding on each piece of a dimension.

    The result is None for any other operator, and if a piece would be empty.
    """
    params = eqn.params
    if eqn.primitive == "slice":
        start, limit = params["start_indices"], params["limit_indices"]
        strides = params["strides"]
        ends = [
            (max(start[dim], a), min(limit[dim], b)) for a, b in layer_ranges(sizes)
        ]
        if any(a >= b for a, b in ends) or (strides and strides[dim] != 1):
            return None
        return [
            {
                "start_indices": _with(start, dim, a - begin),
                "limit_indices": _with(limit, dim, b - begin),
            }
            for (a, b), (begin, _) in zip(ends, layer_ranges(sizes), strict=True)
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
