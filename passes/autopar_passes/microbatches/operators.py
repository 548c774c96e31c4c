"""How operators treat rows of the batch, sums over the batch, and row numbers.

The module also decides whether operators that index arrays stay within the rows of a
microbatch. The compiler's sharding rules cannot decide this. The rules state which
dimensions may be sharded with communication, but not whether an index selects rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.microbatches import kernels
from autopar_passes.microbatches.facts import (
    POSITION,
    SUM,
    Kind,
    Pair,
    Rows,
    Split,
    regroup_rows,
)
from autopar_passes.program.equations import Atom, Equation, Scalar
from autopar_passes.rules.factor_rule import FactorKind, FactorRule
from autopar_passes.sums.stacked import ADDITIVE, CONTRACTIONS, UNARY

SCATTERS = frozenset(
    {
        "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min",
        "scatter-max",
    }
)  # fmt: skip

# Operators that return row numbers of a microbatch.
_RANKING = frozenset({"argmax", "argmin", "iota", "sort", "top_k"})


def indexes_rows(pair: Pair, eqn: Equation) -> bool:
    """Whether an operator selects or changes some of the rows of its operand.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      eqn: an equation; the result is False unless the equation indexes an array.
    """
    match eqn.primitive:
        case "dynamic_slice":
            return not _whole(pair, eqn.inputs[0], eqn.outputs[0])
        case "dynamic_update_slice":
            return not _whole(pair, eqn.inputs[0], eqn.inputs[1])
        case "gather":
            return not _gathers_in_rows(pair, eqn)
        case kind if kind in SCATTERS:
            return not _scatters_in_rows(pair, eqn)
        case _:
            return False


def taken_from_others(pair: Pair, eqn: Equation, value: int | None) -> Equation | None:
    """Finds an operator that takes rows of other microbatches.

    If an operator takes rows of other microbatches, the value of a microbatch cannot
    stand for the value of the batch.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      eqn: the operator that needs the whole batch.
      value: the sum over the batch that the operator needs; None if it needs rows.

    Returns:
      An operator that selects or sums rows by row numbers that the step is given; None
      if there is none.
    """
    found = [eqn] if value is None else []
    left, seen = [value], set[int | None]()
    while left:
        maker = pair.made_by.get(left[-1]) if left[-1] is not None else None
        seen.add(left.pop())
        if maker is not None:
            found.append(maker)
            plain = maker.arrays
            left.extend(v for v in plain if v not in seen and not pair.has_rows(v))
    for maker in found:
        added = value is not None and maker.primitive in SCATTERS
        picked = value is None and indexes_rows(pair, maker)
        if (added or picked) and not _indexes_within(pair, maker):
            return maker
    return None


def picked_by_order(
    pair: Pair, eqn: Equation, among: Collection[int]
) -> Equation | None:
    """Finds an operator that selects rows by a rank, such as the position after a sort.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      eqn: the operator that computes the order, such as a sort.
      among: the equations that may select rows.

    Returns:
      A later operator whose indices may name rows that a microbatch does not have; None
      if there is none.
    """
    made = set(eqn.outputs) if eqn.primitive in _RANKING else set[int]()
    for later in pair.micro.body.equations:
        read = later.arrays
        if made.isdisjoint(read):
            continue
        if later.index in among and indexes_rows(pair, later):
            if not made.isdisjoint(read[1:]) and not _indexes_within(pair, later):
                return later
        elif _is_counting(pair, later):
            made.update(later.outputs)
    return None


def _is_counting(pair: Pair, eqn: Equation) -> bool:
    """Whether all results are integers or booleans."""
    dtypes = [pair.micro.values[v].dtype for v in eqn.outputs]
    return not any(jax_compat.is_extended(d) or d.kind not in "biu" for d in dtypes)


def _indexes_within(pair: Pair, eqn: Equation) -> bool:
    """Whether an operator's indices are computed from a microbatch's own rows.

    The order of the microbatch's rows, or the place of the largest row, is an index
    within the microbatch. A given index, such as the number of a graph node's
    neighbour, refers to the rows of the whole batch.
    """
    first = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}
    at = first.get(eqn.primitive, 1)
    end = len(eqn.inputs) if eqn.primitive.startswith("dynamic") else at + 1
    whole = pair.sources[eqn.index].inputs
    left = [(eqn.inputs[k], whole[k]) for k in range(at, end)]
    while left:
        own, other = left.pop()
        if isinstance(own, Scalar):
            if not isinstance(other, Scalar) or own.value != other.value:
                return False
            continue
        maker = pair.made_by.get(own)
        if maker is None or maker.regions:
            return False
        if maker.primitive not in _RANKING:
            left.extend(
                zip(maker.inputs, pair.sources[maker.index].inputs, strict=True)
            )
    return True


def _dim(pair: Pair, atom: Atom) -> int:
    return pair.dims[atom] if isinstance(atom, int) else -1


def _whole(pair: Pair, array: Atom, part: Atom) -> bool:
    """Whether a part of an array has all rows of the array, in the same dimension."""
    dim = _dim(pair, array)
    if dim < 0 or not isinstance(array, int) or not isinstance(part, int):
        return _dim(pair, part) < 0
    values = pair.micro.values
    same = values[array].shape[dim] == values[part].shape[dim]
    return _dim(pair, part) == dim and same


def _gathers_in_rows(pair: Pair, eqn: Equation) -> bool:
    operand, indices = eqn.inputs
    dim = _dim(pair, operand)
    if dim < 0:
        return True
    numbers = eqn.params["dimension_numbers"]
    if dim in numbers.operand_batching_dims:
        at = numbers.operand_batching_dims.index(dim)
        return numbers.start_indices_batching_dims[at] == _dim(pair, indices)
    assert isinstance(operand, int)
    rows = pair.micro.values[operand].shape[dim]
    return dim not in numbers.collapsed_slice_dims and (
        eqn.params["slice_sizes"][dim] == rows
    )


def _scatters_in_rows(pair: Pair, eqn: Equation) -> bool:
    operand, indices, updates = eqn.inputs
    dim = _dim(pair, operand)
    if dim < 0 or not isinstance(operand, int):
        return True
    numbers = eqn.params["dimension_numbers"]
    if dim in numbers.operand_batching_dims:
        at = numbers.operand_batching_dims.index(dim)
        return numbers.scatter_indices_batching_dims[at] == _dim(pair, indices)
    if dim in numbers.inserted_window_dims or _dim(pair, updates) < 0:
        return False
    # The window of each update must cover this whole dimension.
    kept = [
        d
        for d in range(len(pair.micro.values[operand].shape))
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    return numbers.update_window_dims[kept.index(dim)] == _dim(pair, updates)


class Grouped(Exception):  # not an error: it restarts the division into rows
    """The division must start over: this many neighbouring rows must stay together."""


Look = Callable[[Equation], list[Split]]

# Operators on keys: they make keys, bits or numbers for each key. The dimensions of the
# keys are the first dimensions of the results.
KEYED = frozenset(
    {
        "random_bits", "random_clone", "random_fold_in", "random_gamma", "random_seed",
        "random_split", "random_unwrap", "random_wrap",
    }
)  # fmt: skip

# Operators whose first operand is a key, which `jax.random.fold_in` can change.
FOLDED = frozenset({"random_bits", "random_split", "random_gamma"})
# Operators that compute equal rows from values without rows.
SPREADING = frozenset({"broadcast_in_dim", "empty"})

_ADDING = ADDITIVE | {"pad", "scatter-add", "dynamic_update_slice"}
_PASSING = UNARY | {
    "broadcast_in_dim", "cumsum", "dynamic_slice", "gather", "reduce_precision",
    "reduce_window_sum", "real", "imag", "copy_p",
}  # fmt: skip
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a floating-point dtype."""
    return not jax_compat.is_extended(dtype) and jnp.issubdtype(dtype, jnp.inexact)


def is_integer(dtype: Any) -> bool:
    """Whether a dtype is an integer dtype."""
    return not jax_compat.is_extended(dtype) and jnp.issubdtype(dtype, jnp.integer)


def is_zero(made_by: Mapping[int, Equation], atom: Atom) -> bool:
    """Whether all elements of a value are zero."""
    if isinstance(atom, Scalar):
        return bool(atom.value == 0)
    eqn = made_by.get(atom)
    kinds = ("broadcast_in_dim", "convert_element_type", "copy")
    if eqn is None or eqn.primitive not in kinds:
        return False
    return is_zero(made_by, eqn.inputs[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Linearity:
    """In which operands an operator is linear.

    Attributes:
      sums: the operands that may be sums over the microbatches.
      parts: the operands that the operator adds. Those that all microbatches share must
        count only once in their sum.
    """

    sums: tuple[int, ...]
    parts: tuple[int, ...] = ()


def linear_in(pair: Pair, eqn: Equation, sums: Sequence[int]) -> Linearity | None:
    """In which operands an operator is linear; None if it is not linear in the sums.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      eqn: an equation whose values have no rows.
      sums: the operands that are sums over the microbatches.
    """
    kind, count = eqn.primitive, len(eqn.inputs)
    if not all(is_float(pair.micro.values[v].dtype) for v in eqn.outputs):
        whole = all(is_integer(pair.micro.values[v].dtype) for v in eqn.outputs)
        read = eqn.arrays
        exact = all(is_integer(pair.micro.values[v].dtype) for v in read)
        if not whole or not exact or kind == "div":
            return None
    if kind == "select_n":
        return Linearity(tuple(range(1, count)), tuple(range(1, count)))
    if kind == "scatter-add":
        return Linearity((0, 2), (0, 2))
    if kind == "dynamic_update_slice":
        return Linearity((0, 1), (0, 1))
    if kind == "pad":
        return Linearity((0, 1), (0, 1))
    if kind in _ADDING:
        return Linearity(tuple(range(count)), tuple(range(count)))
    if kind in _PASSING:
        return Linearity((0,)) if 0 in sums else None
    if kind in _PRODUCTS and len(sums) == 1:
        return Linearity((sums[0],))
    return None


def rows(
    pair: Pair,
    eqn: Equation,
    given: Sequence[Split],
    rule: FactorRule,
    follow: kernels.Follow,
) -> list[Split] | str:
    """Returns the classes of the results of an operator that reads rows.

    Args:
      pair: the programs of the whole batch and of one microbatch.
      eqn: the equation.
      given: the classes of the operands, none of which is a sum.
      rule: the equation's sharding rule, on the whole batch.
      follow: follows the body of a kernel.

    Returns:
      The classes, or a text that describes how the operator couples rows.
    """
    inners = {c.inner for c in given if c.kind is Kind.ROWS} - {0}
    if len(inners) > 1:
        return "reads rows in two orders"
    inner = inners.pop() if inners else 0
    if kernels.is_followed(pair, eqn):
        return kernels.classes(pair, eqn, given, inner, follow)
    own = _in_their_way(pair, eqn, given, inner)
    return _by_rule(pair, eqn, rule, inner) if own is None else own


def _in_their_way(
    pair: Pair, eqn: Equation, given: Sequence[Split], inner: int
) -> list[Split] | str | None:
    """Returns the classes of results of operators that sharding rules do not describe.

    The result is None for an operator that its sharding rule describes.
    """
    dim = max(pair.dims[a] for a in eqn.arrays)
    match eqn.primitive:
        case "ffi_call":
            return "is a kernel that cannot be followed"
        case kind if kind in KEYED:
            return _follow_keys(pair, eqn, inner)
        case "reshape":
            return _follow_reshape(pair, eqn, inner)
        case "slice" if _rows_cut(pair, eqn):
            return _follow_slice(pair, eqn, inner)
        case "pad":
            return _follow_pad(pair, eqn, inner)
        case "concatenate" if eqn.params["dimension"] == dim:
            return _follow_concatenate(pair, eqn, given, inner)
        case "split" if eqn.params["axis"] == dim:
            return _split(pair, eqn, inner)
        case "triangular_solve" if _solves_apart(pair, eqn):
            return [Split(Kind.ROWS, inner)]
        case _:
            return "picks rows by an index" if indexes_rows(pair, eqn) else None


def _solves_apart(pair: Pair, eqn: Equation) -> bool:
    """Whether the rows are right-hand sides of one linear system, solved one by one."""
    system, sides = eqn.inputs
    if not isinstance(sides, int) or _has_rows(pair, system):
        return False
    free = len(pair.micro.values[sides].shape) - (1 if eqn.params["left_side"] else 2)
    return pair.dims[sides] == free == pair.dims[eqn.outputs[0]]


def _has_rows(pair: Pair, atom: Atom) -> bool:
    return isinstance(atom, int) and pair.has_rows(atom)


def _follow_keys(pair: Pair, eqn: Equation, inner: int) -> list[Split] | str:
    """The classes of results made from a key for each row, or from one key for rows."""
    arrays = (a for a in eqn.arrays if pair.has_rows(a))
    dims = {pair.dims[v] for v in (*arrays, *eqn.outputs)}
    if len(dims) != 1:
        return "brings rows together"
    return [Split(Kind.ROWS, inner)]


def _by_rule(
    pair: Pair, eqn: Equation, rule: FactorRule, inner: int
) -> list[Split] | str:
    """The classes that follow from the rule's factor for the rows of the batch."""
    factors: set[int] = set()
    for atom, dims in zip(eqn.inputs, rule.operands, strict=True):
        if isinstance(atom, int) and pair.has_rows(atom):
            factors.update(dims[pair.dims[atom]])
    if len(factors) > 1 and eqn.primitive == "pallas_call":
        return _by_blocks(pair, eqn, rule, inner)
    if len(factors) != 1:
        return "brings rows together"
    (factor,) = factors
    out: list[Split] = []
    for value, dims in zip(eqn.outputs, rule.results, strict=True):
        if pair.has_rows(value):
            own = dims[pair.dims[value]]
            if own != (factor,) or rule.kinds[factor] is not FactorKind.PASS:
                return "brings rows together"
            out.append(Split(Kind.ROWS, inner))
        elif _adds_up(eqn, rule, factor):
            out.append(SUM)
        else:
            return "brings rows together"
    return out


def _by_blocks(
    pair: Pair, eqn: Equation, rule: FactorRule, inner: int
) -> list[Split] | str:
    """The classes of results of a kernel that computes each block separately."""
    found = {
        (of[0], math.prod(rule.sizes[f] for f in of[1:]))
        for atom, dims in zip(
            (*eqn.inputs, *eqn.outputs), (*rule.operands, *rule.results), strict=True
        )
        if isinstance(atom, int) and pair.has_rows(atom)
        for of in (dims[pair.dims[atom]],)
    }
    rows = all(pair.has_rows(v) for v in eqn.outputs)
    if not inner or not rows or len(found) != 1:
        return "brings rows together"
    ((major, block),) = found
    if rule.kinds[major] is not FactorKind.PASS:
        return "brings rows together"
    if inner % block:
        raise Grouped(block // math.gcd(inner, block))
    return [Split(Kind.ROWS, inner)] * len(eqn.outputs)


def _adds_up(eqn: Equation, rule: FactorRule, factor: int) -> bool:
    """Whether an operator sums, over the factor of the rows, all that it reads."""
    return (
        eqn.primitive in CONTRACTIONS
        and rule.kinds[factor] is FactorKind.REDUCE
        and rule.reduction == "sum"
    )


def _follow_reshape(pair: Pair, eqn: Equation, inner: int) -> list[Split] | str:
    (value,) = eqn.arrays
    (made,) = eqn.outputs
    if not pair.has_rows(made):
        return "makes rows a part of each other"
    before, after = (pair.micro.values[v].shape for v in (value, made))
    if not inner:
        return [Split(Kind.ROWS, 0)]
    rows = Rows(pair.dims[value], inner)
    found = regroup_rows(before, rows, after, pair.dims[made])
    if found is not None:
        return [Split(Kind.ROWS, found)]
    more = math.prod(after[pair.dims[made] + 1 :])
    held = inner * math.prod(before[rows.dim + 1 :])
    if more % held == 0:
        raise Grouped(more // held)
    return "groups rows"


def _rows_cut(pair: Pair, eqn: Equation) -> bool:
    (value,) = eqn.arrays
    dim = pair.dims[value]
    shape = pair.micro.values[value].shape
    return pair.micro.values[eqn.outputs[0]].shape[dim] != shape[dim]


def _follow_slice(pair: Pair, eqn: Equation, inner: int) -> list[Split] | str:
    """The class of a slice that takes the same part of each microbatch's rows."""
    (value,) = eqn.arrays
    (made,) = eqn.outputs
    dim, params = pair.dims[value], eqn.params
    start = params["start_indices"][dim]
    whole = pair.sources[eqn.index].params["start_indices"][dim]
    strides = params["strides"]
    step = 1 if strides is None else strides[dim]
    starts = zip(
        pair.sources[eqn.index].params["start_indices"],
        params["start_indices"],
        strict=True,
    )
    if any(a != b for k, (a, b) in enumerate(starts) if k != dim):
        return "takes some of the rows"
    if pair.dims[made] != dim or step != 1 or whole != start * pair.count:
        return "takes some of the rows"
    size = pair.micro.values[made].shape[dim]
    if inner and (start % inner or size % inner):
        return "takes some of the rows"
    return [Split(Kind.ROWS, inner)]


def is_moved(pair: Pair, eqn: Equation) -> bool:
    """Whether a slice or padding is not the same on each microbatch as on the batch."""
    whole = pair.sources[eqn.index].params
    if eqn.primitive == "slice":
        return whole["start_indices"] != eqn.params["start_indices"]
    key = "padding_config"
    return eqn.primitive == "pad" and whole[key] != eqn.params[key]


def _split(pair: Pair, eqn: Equation, inner: int) -> list[Split] | str:
    """The classes of a split along the rows, with equal parts in each microbatch."""
    dim = eqn.params["axis"]
    sizes = [pair.micro.values[v].shape[dim] for v in eqn.outputs]
    if any(pair.dims[v] != dim for v in eqn.outputs) or (
        inner and any(size % inner for size in sizes)
    ):
        return "takes some of the rows"
    return [Split(Kind.ROWS, inner)] * len(eqn.outputs)


def _follow_pad(pair: Pair, eqn: Equation, inner: int) -> list[Split] | str:
    """The class of padded rows, where each microbatch gets its part of the padding."""
    (made,) = eqn.outputs
    whole = pair.sources[eqn.index].params["padding_config"]
    pairs = zip(whole, eqn.params["padding_config"], strict=True)
    for dim, ((low, high, apart), own) in enumerate(pairs):
        if dim != pair.dims[made]:
            if (low, high, apart) != own:
                return "moves rows"
        elif (
            apart
            or (low, high) != (own[0] * pair.count, own[1] * pair.count)
            or (inner and (own[0] % inner or own[1] % inner))
        ):
            return "moves rows"
    return [Split(Kind.ROWS, inner)]


def _follow_concatenate(
    pair: Pair, eqn: Equation, given: Sequence[Split], inner: int
) -> list[Split] | str:
    """The class of concatenated rows, where each microbatch joins its own rows."""
    for atom, split in zip(eqn.inputs, given, strict=True):
        if split.kind is not Kind.ROWS or not isinstance(atom, int):
            return "puts something beside the rows"
        size = pair.micro.values[atom].shape[pair.dims[atom]]
        if inner and size % inner:
            return "puts something beside the rows"
    return [Split(Kind.ROWS, inner)]


def positions(pair: Pair, eqn: Equation, given: Sequence[Split]) -> Split | None:
    """The class of a result computed from row numbers; None if it couples the rows.

    The function recognises the operators of ``x[arange(rows), column]``. They number
    the rows, wrap negative indices, join index columns, and gather or scatter row by
    row.
    """
    kind = eqn.primitive
    if kind == "iota":
        at = pair.dims[eqn.outputs[0]]
        if at < 0:
            return Split(Kind.SAME)
        return POSITION if eqn.params["dimension"] == at else Split(Kind.ROWS, 0)
    if kind in ("gather", "scatter-add", "scatter"):
        return _by_position(pair, eqn, given)
    if kind == "concatenate":
        return _columns(pair, eqn, given)
    found = next(c for c in given if c.kind is Kind.POSITION)
    if found.columns:
        return found if kind in ("convert_element_type", "copy") else None
    others = [a for a, c in zip(eqn.inputs, given, strict=True) if c != found]
    if kind in ("convert_element_type", "copy"):
        return found
    if kind in ("broadcast_in_dim", "reshape", "expand_dims"):
        same = pair.micro.values[eqn.outputs[0]].size == _size(pair, eqn.inputs[0])
        return found if same else None
    if kind == "select_n":
        return found if not others else None
    if kind == "lt":
        return found if [_number(a) for a in others] == [0] else None
    if kind == "add":
        rows = pair.micro.values[eqn.outputs[0]].shape[pair.dims[eqn.outputs[0]]]
        return found if [_number(a) for a in others] == [rows] else None
    return None


def _number(atom: Atom) -> Any:
    return int(atom.value) if isinstance(atom, Scalar) else None


def _size(pair: Pair, atom: Atom) -> int:
    return 1 if isinstance(atom, Scalar) else pair.micro.values[atom].size


def _columns(pair: Pair, eqn: Equation, given: Sequence[Split]) -> Split | None:
    """The class of index columns for several dimensions, some being row numbers."""
    shape = pair.micro.values[eqn.outputs[0]].shape
    if eqn.params["dimension"] != len(shape) - 1:
        return None
    found: set[int] = set()
    at = 0
    for atom, split in zip(eqn.inputs, given, strict=True):
        width = pair.micro.values[atom].shape[-1] if isinstance(atom, int) else 1
        if split.kind is Kind.POSITION:
            found.update(range(at, at + width))
        elif split.inner > 1:
            return None
        at += width
    return Split(Kind.POSITION, 0, frozenset(found))


def _by_position(pair: Pair, eqn: Equation, given: Sequence[Split]) -> Split | None:
    """The class of a gather or scatter whose row index is the number of its own row."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices = eqn.inputs[0], given[1]
    if not isinstance(operand, int) or indices.kind is not Kind.POSITION:
        return None
    if given[0].kind is not Kind.ROWS or given[0].inner > 1:
        return None
    gathers = eqn.primitive == "gather"
    map_ = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    columns = indices.columns or frozenset({0})
    dims = {map_[c] for c in columns}
    inserted = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    if dims != {pair.dims[operand]} or pair.dims[operand] not in inserted:
        return None
    return Split(Kind.ROWS, 1)
