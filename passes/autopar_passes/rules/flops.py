"""FLOPs of one equation, a registry with one function a primitive.

A multiply and an add count as two FLOPs, as in every published FLOP count of
matrix products. Equations without an entry count one FLOP an element of the
largest array they touch, which is exact for element-wise arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar_passes.program.equations import Value

# Element-wise functions that are more than one instruction, in FLOPs: the time of
# an element on a CPU core under XLA (benchmarks/elementwise.py) at the 11 GFLOP/s
# of vector work that `autopar profile` measured beside it, roughly rounded.
# Functions not measured are guessed from those that they are computed with.
_ELEMENT_FLOPS = {
    "acos": 15.0, "acosh": 10.0, "asin": 15.0, "asinh": 10.0, "atan2": 15.0,
    "cbrt": 40.0, "cos": 15.0, "cosh": 10.0, "digamma": 15.0, "div": 2.0,
    "erf": 5.0, "erf_inv": 15.0, "erfc": 10.0, "exp": 6.0, "exp2": 6.0,
    "expm1": 8.0, "lgamma": 15.0, "log": 6.0, "log1p": 8.0, "logistic": 6.0,
    "pow": 40.0, "rem": 4.0, "rsqrt": 3.0, "sin": 15.0, "sinh": 10.0,
    "sqrt": 4.0, "tan": 15.0, "tanh": 5.0,
}  # fmt: skip

FlopsFunction = Callable[[Sequence[Value], Sequence[Value], dict[str, Any]], float]
_REGISTRY: dict[str, FlopsFunction] = {}

# Moves data and computes nothing.
_FREE = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "iota",
        "optimization_barrier",
        "pad",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)


def register_flops(primitive: str) -> Callable[[FlopsFunction], FlopsFunction]:
    """Registers the FLOP count of a primitive."""

    def add(function: FlopsFunction) -> FlopsFunction:
        _REGISTRY[primitive] = function
        return function

    return add


def equation_flops(
    primitive: str,
    operands: Sequence[Value],
    results: Sequence[Value],
    params: dict[str, Any],
) -> float:
    """Returns the FLOPs of one application on whole, unsharded arrays."""
    if primitive in _FREE:
        return 0.0
    function = _REGISTRY.get(primitive)
    if function is not None:
        return function(operands, results, params)
    elements = float(max((v.size for v in (*operands, *results)), default=0))
    return elements * _ELEMENT_FLOPS.get(primitive, 1.0)


@register_flops("dot_general")
def _dot_general(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    (contracting, _), _ = params["dimension_numbers"]
    depth = math.prod(operands[0].shape[d] for d in contracting)
    return 2.0 * results[0].size * depth


@register_flops("conv_general_dilated")
def _convolution(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    kernel = operands[1]
    out_features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    taps = kernel.size / out_features  # input features of a group times window
    return 2.0 * results[0].size * taps


@register_flops("ragged_dot_general")
def _ragged_product(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    """Each row meets the columns of its own group alone, as in a grouped kernel."""
    del results
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    inner = {*contracting, *batch, *numbers.rhs_group_dimensions}
    columns = (n for d, n in enumerate(operands[1].shape) if d not in inner)
    return 2.0 * operands[0].size * math.prod(columns)


@register_flops("sort")
def _sort(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    """A comparison sort makes about n log2(n) comparisons."""
    del results
    length = operands[0].shape[params["dimension"]]
    return float(operands[0].size) * max(1.0, math.log2(max(2, length)))


@register_flops("scatter-add")
@register_flops("scatter-mul")
@register_flops("scatter-min")
@register_flops("scatter-max")
def _scatter(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    """One for each element of the updates, however large the array that they go into
    (openxla/xla, ``HloCostAnalysis::HandleScatter``)."""
    del results, params
    return float(operands[2].size)
