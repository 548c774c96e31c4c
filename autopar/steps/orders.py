"""The order of dimensions in which a compiler writes an array, and copies of arrays.

XLA's GPU compiler fixes the order of dimensions around batched products (openxla/xla,
``xla/service/gpu/transforms/layout_assignment.cc`` and
``xla/service/transforms/dot_decomposer.cc``; read with jax 0.10.2):

* the result of a batched product has the order of dimensions of the program, from major
  to minor;
* some batched products have several free or several contracted dimensions. The compiler
  brings their left operand to the order batch, free, contracted, and their right
  operand to the order batch, contracted, free. Other products read their operands in
  the order in which they are stored;
* a transposition does not move data. The order in memory stays the same, also through
  element-wise operators;
* if an operator reads two arrays of different orders, its result gets the order that
  the program fixed first;
* a product with a single batch dimension reads the free and the contracted dimensions
  of an operand in either order;
* if products need an array in several orders, the compiler makes one copy for each
  order. One kernel writes the array in the stored order and in one other order. If no
  product needs the stored order, one kernel writes two other orders, provided that
  neither transposition runs in tiles (`runs_in_tiles`). The compiler makes further
  copies when a product reads them.

As an example, take the attention weights of grouped-query attention. In bfloat16 the
backward pass recomputes the weights if a group has 2, 4 or 8 heads. In float32 the
weights are kept. The gradient of the scores is written twice, once for each product
that reads it. All sizes here are sizes of whole arrays, because the shards of a plan
are not known yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from autopar.steps.fusion import is_elementwise, side_factors
from autopar.units import runs_of
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import Dims, FactorRule

# Shared memory of a GPU: the bits of one bank, the number of banks, and the number of
# banks that a packed tile must fill.
_BANK_BITS, _BANKS, _FILLED_BANKS = 32, 32, 10
# Each of the two dimensions that a tiled transposition swaps must have at least
# `_LEAST` elements. `_LEAST_OF_LARGE` elements are enough if the product of the two
# sizes is at least `_LARGE`.
_LEAST, _LEAST_OF_LARGE, _LARGE = 16, 8, 64 * 128
_MOST_MINOR_BITS = 64

# The dimensions with more than one element, from major to minor.
Order = tuple[int, ...]


def copies_in_orders(graph: OperatorGraph) -> dict[tuple[int, int], bool]:
    """Finds values that an operator reads in another order than other operators do.

    Args:
      graph: the operator graph.

    Returns:
      Value and operator -> True if the copy in this order is written together with the
      value, False if it is written when the operator reads it.
    """
    found = _Found(graph, {}, {})
    for op in graph.operators:
        if op.kind == "dot_general":
            _note_product(op, found)
        elif op.outputs and is_elementwise(op):
            _note_elementwise(op, found)
    return {
        (value, reader): at_once
        for value, wants in found.wants.items()
        for reader, at_once in _copied_for(graph, value, wants, found.order.get(value))
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Fixed:
    """The order of a value's dimensions in memory, and the product that fixed it."""

    origin: int
    order: Order


# A product, and the orders in which it can read an operand; () means the stored order.
_Want = tuple[int, tuple[Order, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """The state of the search, which visits the operators in program order.

    Attributes:
      graph: the operator graph.
      order: value whose order of dimensions is fixed -> the order, and the product that
        fixed it.
      wants: value that batched products read -> for each product, the orders in which
        it can read the value. If there are no orders, the product reads the value in
        the stored order.
    """

    graph: OperatorGraph
    order: dict[int, _Fixed]
    wants: dict[int, list[_Want]]


def _note_product(op: Operator, found: _Found) -> None:
    rule = op.rule
    left, right = (rule.factors_of(dims) for dims in rule.operands[:2])
    batch = _large(rule, left & right & rule.factors_of(rule.results[0]))
    if not batch:
        return
    for slot, value in enumerate(op.inputs):
        if value is not None:
            wanted = (op.index, _wanted_orders(rule, slot, batch))
            found.wants.setdefault(value, []).append(wanted)
    for value in op.outputs:
        found.order[value] = _Fixed(op.index, _plain(found.graph, value))


def _wanted_orders(
    rule: FactorRule, slot: int, batch: frozenset[int]
) -> tuple[Order, ...]:
    """The orders in which a batched product can read an operand; () means any order."""
    *free, contracted = (_large(rule, side) for side in side_factors(rule))
    if all(len(side) < 2 for side in (*free, contracted)):
        return ()
    own = free[slot]
    groups = (batch, own, contracted) if slot == 0 else (batch, contracted, own)
    dims = rule.operands[slot]
    present = [d for d in range(len(dims)) if _large(rule, dims[d])]
    first = tuple(d for group in groups for d in present if dims[d][0] in group)
    if len(batch) > 1:
        return (first,)
    groups = (groups[0], groups[2], groups[1])
    return first, tuple(d for group in groups for d in present if dims[d][0] in group)


def _note_elementwise(op: Operator, found: _Found) -> None:
    """Gives an element-wise result the operand order that was fixed first."""
    rule = op.rule
    full = _large(rule, rule.factors_of(rule.results[0]))
    operands = [
        (found.order[value], dims)
        for value, dims in zip(op.inputs, rule.operands, strict=True)
        if value in found.order and _large(rule, rule.factors_of(dims)) == full
    ]
    if not operands:
        return
    first, dims = min(operands, key=lambda x: x[0].origin)
    sequence = _sequence(rule, dims, first.order)
    for value, dims in zip(op.outputs, rule.results, strict=True):
        order = _in_dims(rule, dims, sequence)
        if order is not None:
            found.order[value] = _Fixed(first.origin, order)


def _copied_for(
    graph: OperatorGraph, value: int, wants: Sequence[_Want], fixed: _Fixed | None
) -> list[tuple[int, bool]]:
    """Returns the products that read a copy of a value in another order.

    With each product, returns True if its copy is written together with the value.
    """
    lies = _plain(graph, value) if fixed is None else fixed.order
    orders: list[tuple[int, Order]] = []
    for reader, suiting in wants:
        known = [lies, *(order for _, order in orders)]
        suiting = suiting or (lies,)
        orders.append((reader, next((o for o in known if o in suiting), suiting[0])))
    first = lies if any(o == lies for _, o in orders) else orders[0][1]
    known = graph.values[value]
    bits = 8 * known.nbytes // max(1, known.size)
    tiled = {o: runs_in_tiles(known.shape, lies, o, bits) for _, o in orders}
    seen = {first}
    out: list[tuple[int, bool]] = []
    for reader, order in orders:
        if order not in seen:
            at_once = first == lies or not (tiled[first] or tiled[order])
            out.append((reader, at_once and not out))
            seen.add(order)
    return out


def _large(rule: FactorRule, factors: Iterable[int]) -> frozenset[int]:
    """Returns the factors of more than one element."""
    return frozenset(f for f in factors if rule.sizes[f] > 1)


def _plain(graph: OperatorGraph, value: int) -> Order:
    """Returns the dimensions in the order of the program."""
    return tuple(d for d, n in enumerate(graph.values[value].shape) if n > 1)


def _sequence(rule: FactorRule, dims: Dims, order: Order) -> tuple[int, ...]:
    """The factors of an array with an order of dimensions, from major to minor."""
    return tuple(f for d in order for f in dims[d] if rule.sizes[f] > 1)


def _in_dims(rule: FactorRule, dims: Dims, sequence: tuple[int, ...]) -> Order | None:
    """Returns the order of dimensions with given factors in sequence; or None."""
    start = {f: i for i, f in enumerate(sequence)}
    large = [tuple(f for f in dim if rule.sizes[f] > 1) for dim in dims]
    present = [d for d, factors in enumerate(large) if factors]
    if any(f not in start for d in present for f in large[d]):
        return None
    order = tuple(sorted(present, key=lambda d: start[large[d][0]]))
    return order if tuple(f for d in order for f in large[d]) == sequence else None


def runs_in_tiles(
    sizes: Sequence[int], source: Sequence[int], target: Sequence[int], bits: int
) -> bool:
    """Whether the GPU compiler transposes an array from one order to another in tiles.

    The conditions are those of ``GetDescriptionForTiledTransposeEmitter`` and
    ``GetPackedTransposeTileSizes`` in openxla/xla,
    ``xla/service/gpu/ir_emission_utils.cc`` (read with jax 0.10.2). Compiled programs
    of grouped-query attention for H100 agree with them. A tiled transposition goes
    through shared memory. Any other transposition is a plain loop, and plain loops over
    the same elements are merged into one kernel.

    Args:
      sizes: the sizes of the dimensions.
      source: the dimensions in the present order, from major to minor.
      target: the same dimensions in the new order.
      bits: the number of bits of one element.

    >>> runs_in_tiles((512, 1024), (0, 1), (1, 0), 32)
    True
    >>> runs_in_tiles((512, 2), (0, 1), (1, 0), 32)
    False
    """
    shape, permutation = _normalise(sizes, source, target)
    if len(shape) < 2:
        return False
    if _is_packed(shape, permutation, bits):
        return True
    operand = _operand(shape, permutation)
    minor = shape[-1]
    if permutation[-1] == len(shape) - 1:
        swapped = min(operand[-2], shape[-2])
        narrow = bits * minor <= _MOST_MINOR_BITS
        return narrow and bits * minor * swapped >= 8 * _LEAST
    least = min(operand[-1], minor)
    large = operand[-1] * minor >= _LARGE
    return least >= _LEAST or (least >= _LEAST_OF_LARGE and large)


def _normalise(
    sizes: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Returns the shape of the target, and its permutation of the source's dims.

    Dimensions that stay adjacent are merged into one. Dimension ``i`` of the target is
    dimension ``permutation[i]`` of the source.
    """
    place = {dim: i for i, dim in enumerate(source)}
    runs = runs_of(place[dim] for dim in target)
    shape = [math.prod(sizes[source[i]] for i in run) for run in runs]
    rank = {first: i for i, first in enumerate(sorted(run[0] for run in runs))}
    return shape, [rank[run[0]] for run in runs]


def _operand(shape: Sequence[int], permutation: Sequence[int]) -> list[int]:
    """Returns the shape of the source from the shape of the target."""
    out = [0] * len(shape)
    for place, dim in enumerate(permutation):
        out[dim] = shape[place]
    return out


def _is_packed(shape: Sequence[int], permutation: Sequence[int], bits: int) -> bool:
    """Whether a transposition packs elements that are narrower than a bank into tiles.

    The source has the dimensions [.., T2, A, T1, B] and the target has [.., T1, A, T2,
    B]. A and B may be missing.
    """
    if bits >= _BANK_BITS or permutation[-1] == len(shape) - 1:
        return False  # B is not one element
    packed = _BANK_BITS // bits
    across = _BANKS * packed
    t1, t2 = _operand(shape, permutation)[-1], shape[-1]
    middle = len(shape) - 2
    a = shape[middle] if permutation[middle] == middle else 1
    rows, t1_tile = min(t2, across), min(t1, across)
    columns = t1_tile * min(a, across // t1_tile)
    full = min(rows, columns) >= _FILLED_BANKS * packed
    return full and not any(n % packed for n in (rows, columns, t2 % rows))
