"""FLOPs of one equation, from a registry with one function per primitive.

A multiplication and an addition count as two FLOPs, as in every published FLOP count of
matrix products. Equations without an entry count one FLOP per element of the largest
array that they read or write, which is exact for element-wise arithmetic.

The FLOPs of a Pallas kernel are the FLOPs of its body, summed over the points of its
grid. Loops and branches of a kernel often depend only on the point, for example if a
causal mask skips blocks. The scalars of the body are therefore evaluated at points of
the grid, and the FLOPs that each point runs are counted. Branches that depend on data
are counted as if they ran.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from autopar_passes import jax_compat
from autopar_passes.program.equations import Value
from autopar_passes.rules import pallas_grid

# FLOPs of element-wise functions that need more than one instruction. Each number is
# the measured time per element on one CPU core under XLA (benchmarks/elementwise.py),
# multiplied by the 11 GFLOP/s of vector work that `autopar profile` measured on the
# same core, and roughly rounded. For a function that was not measured, the number
# follows from the functions that compute it.
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

# Primitives that only move data, so they count no FLOPs.
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
    """Returns the FLOPs of one primitive on whole, unsharded arrays."""
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
@register_flops("ragged_dot_in_blocks")
def _ragged_product(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    """Counts one matrix per row, that of the row's group, as a grouped kernel does."""
    del results
    numbers = params.get("numbers") or params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    inner = {*contracting, *batch, *numbers.rhs_group_dimensions}
    columns = (n for d, n in enumerate(operands[1].shape) if d not in inner)
    return 2.0 * operands[0].size * math.prod(columns)


@register_flops("sort")
def _sort(
    operands: Sequence[Value], results: Sequence[Value], params: dict[str, Any]
) -> float:
    """Counts n log2(n) comparisons, as a comparison sort of n elements makes."""
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
    """Counts one FLOP for each element of the updates, whatever the operand's size.

    The source is ``HloCostAnalysis::HandleScatter`` in openxla/xla.
    """
    del results, params
    return float(operands[2].size)


# Number of points of one grid dimension at which the body is counted. In a longer
# dimension, this many points are spread evenly.
POINTS = 16
# Assumed number of iterations of a loop whose end depends on data.
UNKNOWN_TRIPS = 1.0

# Primitives that read and write memory of the kernel.
_MEMORY = frozenset(
    {"get", "swap", "addupdate", "masked_load", "masked_swap", "load", "store"}
)
_DOTS = frozenset({"dot_general", "dot"})
_SCALAR: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "max": max, "min": min, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "neg": operator.neg, "convert_element_type": lambda x: x,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "not": lambda a: (not a) if isinstance(a, bool) else ~a,
    "div": lambda a, b: int(a / b) if isinstance(a, int) else a / b,
    "rem": lambda a, b: int(np.fmod(a, b)),
    "sign": lambda a: (a > 0) - (a < 0),
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, x, high: max(low, min(x, high)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """FLOPs of a kernel.

    Attributes:
      matrix: FLOPs of matrix products.
      vector: FLOPs of everything else.
      exact: whether no loop or branch depends on data.
      dtype: dtype of the operands of the first product; '' without a product.
    """

    matrix: float = 0.0
    vector: float = 0.0
    exact: bool = True
    dtype: str = ""

    def __add__(self, other: Count) -> Count:
        """Returns the sum of two counts."""
        return Count(
            self.matrix + other.matrix,
            self.vector + other.vector,
            self.exact and other.exact,
            self.dtype or other.dtype,
        )

    def __mul__(self, times: float) -> Count:
        """Returns the FLOPs of several runs."""
        return dataclasses.replace(
            self, matrix=self.matrix * times, vector=self.vector * times
        )


def count_kernel_flops(params: dict[str, Any], operands: Sequence[Any]) -> Count:
    """Counts the FLOPs of a kernel on its whole operands.

    Args:
      params: parameters of the ``pallas_call``.
      operands: for each operand, its array if the program holds the array, else None.
    """
    mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
    grid = [n if isinstance(n, int) else 1 for n in mapping.grid]
    own = [g for g in range(len(grid)) if g not in mapping.vmapped_dims]
    asked = sorted(pallas_grid.grid_axes_asked(jaxpr))
    axes = [_spread(grid[own[a]]) for a in asked]
    refs: dict[Any, Any] = {
        var: np.asarray(array)
        for var, array in zip(
            jaxpr.invars[: mapping.num_index_operands], operands, strict=False
        )
        if array is not None
    }
    sizes = dict(enumerate(grid[g] for g in own))
    points = list(itertools.product(*axes))
    total = Count()
    for point in points:
        walk = _Walk(dict(zip(asked, point, strict=True)), sizes, refs)
        total += walk.body(jaxpr, {})[0]
    return total * (float(np.prod(grid)) / len(points))


def count_body(jaxpr: Any) -> Count:
    """Counts the FLOPs of a function's body that has no grid, for the body's shapes."""
    return _Walk({}, {}, {}).body(jaxpr, {})[0]


def product_flops(eqn: Any) -> float:
    """FLOPs of an equation if it is a matrix product; 0 for any other equation.

    A product that only computes inner products of rows counts 0.
    """
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name != "dot_general" or numbers is None:
        return 0.0
    inner = eqn.outvars[0].aval.ndim == len(numbers[1][0])
    return 0.0 if inner else _flops(eqn).matrix


def _spread(size: int) -> list[int]:
    """At most `POINTS` indices of one grid dimension, spread evenly."""
    if size <= POINTS:
        return list(range(size))
    return [int((k + 0.5) * size / POINTS) for k in range(POINTS)]


class _Walk:
    """Counts the FLOPs of a body at one point of the grid. Unknown scalars are None."""

    def __init__(
        self, point: dict[int, int], sizes: dict[int, int], refs: dict[Any, Any]
    ) -> None:
        self.point = point
        self.sizes = sizes
        self.refs = refs

    def body(self, jaxpr: Any, env: dict[Any, Any]) -> tuple[Count, list[Any]]:
        """Returns the count of a jaxpr, and the scalar values of its results."""
        total = Count()
        for eqn in jaxpr.eqns:
            total += self.equation(eqn, env)
        return total, [_read(env, v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, env: dict[Any, Any]) -> Count:
        name = eqn.primitive.name
        given = [_read(env, a) for a in eqn.invars]
        if name in ("program_id", "num_programs"):
            known = self.point if name == "program_id" else self.sizes
            env[eqn.outvars[0]] = known.get(eqn.params["axis"])
            return Count()
        if name == "cond":
            return self.cond(eqn, given, env)
        if name == "while":
            return self.loop(eqn, given)
        if name == "pallas_call":
            return count_kernel_flops(eqn.params, [None] * len(eqn.invars))
        inner = list(jax_compat.subjaxprs(eqn))
        if inner:
            return self.call(eqn, inner[0], given, env)
        if name in _MEMORY:
            if name == "get" and eqn.outvars:
                env[eqn.outvars[0]] = self.element(eqn, env)
            return Count()
        if len(eqn.outvars) == 1 and not eqn.outvars[0].aval.shape:
            env[eqn.outvars[0]] = _scalar(name, given, eqn)
        return _flops(eqn)

    def call(
        self, eqn: Any, jaxpr: Any, given: list[Any], env: dict[Any, Any]
    ) -> Count:
        """Counts a scan or a call; evaluates a call's scalar results if possible."""
        inner: dict[Any, Any] = {}
        is_scan = eqn.primitive.name == "scan"
        if len(jaxpr.invars) == len(given):
            if not is_scan:
                inner.update(zip(jaxpr.invars, given, strict=True))
            self.alias(jaxpr.invars, eqn.invars)
        found, out = self.body(jaxpr, inner)
        if is_scan:
            return found * eqn.params["length"]
        if len(out) == len(eqn.outvars):
            env.update(zip(eqn.outvars, out, strict=True))
        return found

    def alias(self, inner: Sequence[Any], outer: Sequence[Any]) -> None:
        """Makes references inside a body point to the arrays that are its operands."""
        for mine, theirs in zip(inner, outer, strict=True):
            if not isinstance(theirs, jax_compat.Literal) and theirs in self.refs:
                self.refs[mine] = self.refs[theirs]

    def cond(self, eqn: Any, given: list[Any], env: dict[Any, Any]) -> Count:
        """Counts the branch that is taken; the largest if this depends on data."""
        branches = [b.jaxpr for b in eqn.params["branches"]]
        which, rest = given[0], given[1:]
        found: list[tuple[Count, list[Any]]] = []
        for k, branch in enumerate(branches):
            if which is None or int(which) == k:
                self.alias(branch.invars, eqn.invars[1:])
                inner = dict(zip(branch.invars, rest, strict=True))
                found.append(self.body(branch, inner))
        if which is not None:
            taken, out = found[0]
            env.update(zip(eqn.outvars, out, strict=True))
            return taken
        most = max((c for c, _ in found), key=lambda c: (c.matrix, c.vector))
        same = len({(c.matrix, c.vector) for c, _ in found}) == 1
        return dataclasses.replace(most, exact=most.exact and same)

    def loop(self, eqn: Any, given: list[Any]) -> Count:
        """Counts a loop.

        A loop whose end is unknown is assumed to run `UNKNOWN_TRIPS` times.
        """
        params = eqn.params
        cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        skipped = params["cond_nconsts"] + params["body_nconsts"]
        conds = given[: params["cond_nconsts"]] + given[skipped:]
        self.alias(body.invars, eqn.invars[params["cond_nconsts"] :])
        consts = given[params["cond_nconsts"] : skipped]
        inner = dict(zip(body.invars, consts, strict=False))
        once = self.body(body, inner)[0]
        trips = _trips(cond, conds)
        if trips is None:
            return dataclasses.replace(once * UNKNOWN_TRIPS, exact=False)
        return once * trips

    def element(self, eqn: Any, env: dict[Any, Any]) -> Any:
        """An element of an operand if the program holds its array, else None."""
        table = self.refs.get(eqn.invars[0])
        if table is None or eqn.outvars[0].aval.shape:
            return None
        values = [_read(env, a) for a in eqn.invars[1:]]
        tree = eqn.params.get("tree")
        try:
            transforms = jax.tree.unflatten(tree, values)
            indices = transforms[0].indices
            if any(isinstance(i, (int, np.integer)) for i in indices):
                return table[tuple(int(i) for i in indices)].item()
        except (TypeError, ValueError, AttributeError, IndexError):
            return None
        return None


def _read(env: dict[Any, Any], atom: Any) -> Any:
    if not isinstance(atom, jax_compat.Literal):
        return env.get(atom)
    if np.shape(atom.val):
        return None
    value = np.asarray(atom.val).item()
    return value if isinstance(value, (bool, int, float)) else None


def _scalar(name: str, given: list[Any], eqn: Any) -> Any:
    """Returns the result of an equation on known scalars, or None."""
    function = _SCALAR.get(name)
    if function is None or not given:
        return None
    if name == "select_n" and given[0] is not None:
        return given[1 + int(given[0])]
    if any(x is None for x in given):
        return None
    try:
        value = function(*given)
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    kind = eqn.outvars[0].aval.dtype.kind
    if kind == "b":
        return bool(value)
    return int(value) if kind in "iu" else float(value)


def _trips(cond: Any, values: list[Any]) -> float | None:
    """Iterations of a loop that counts up by one to a known end; else None."""
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    env = dict(zip(cond.invars, values, strict=False))
    start, end = (_read(env, a) for a in cond.eqns[0].invars)
    if start is None or end is None:
        return None
    return float(max(0, end - start))


def _flops(eqn: Any) -> Count:
    """Returns the FLOPs of one equation without a body."""
    operands = [_value(v.aval) for v in eqn.invars]
    results = [_value(v.aval) for v in eqn.outvars]
    known = [v for v in (*operands, *results) if v is not None]
    if len(known) < len(operands) + len(results):
        return Count()
    if not any(v.shape for v in known):
        return Count()  # Scalars that only control loops count no FLOPs.
    name = "dot_general" if eqn.primitive.name in _DOTS else eqn.primitive.name
    flops = equation_flops(
        name,
        [v for v in operands if v is not None],
        [v for v in results if v is not None],
        eqn.params,
    )
    if name == "dot_general":
        return Count(matrix=flops, dtype=str(known[0].dtype))
    return Count(vector=flops)


def _value(aval: Any) -> Value | None:
    """Returns the shape and dtype of an array; None for a reference to memory."""
    if not isinstance(aval, ShapedArray):
        return None
    return Value(tuple(aval.shape), aval.dtype)
