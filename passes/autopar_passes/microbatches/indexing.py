"""Whether operators that index arrays stay within the rows of a microbatch.

The compiler's rules say which dimensions may be split with communication; they do not
say that an index is none of a row.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar_passes import jax_compat
from autopar_passes.microbatches.pairs import Pair
from autopar_passes.program.equations import Atom, Equation, Scalar

SCATTERS = frozenset(
    {
        "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min",
        "scatter-max",
    }
)  # fmt: skip

# They make numbers of rows of what a microbatch has.
_RANKING = frozenset({"argmax", "argmin", "iota", "sort", "top_k"})


def indexes_rows(pair: Pair, eqn: Equation) -> bool:
    """Whether an operator picks some rows of what it reads, or changes some.

    Args:
      pair: the programs.
      eqn: an equation; of other kinds than indexing, it does not.
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
    """What takes rows that other microbatches have, so that none stands for the batch.

    Args:
      pair: the programs.
      eqn: the operator that needs the batch.
      value: the sum over the batch that it needs; None: it needs rows.

    Returns:
      An operator that picks or adds up rows by numbers that are given.
    """
    found = [eqn] if value is None else []
    left, seen = [value], set[int | None]()
    while left:
        maker = pair.made_by.get(left[-1]) if left[-1] is not None else None
        seen.add(left.pop())
        if maker is not None:
            found.append(maker)
            plain = [a for a in maker.inputs if isinstance(a, int)]
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
    """What picks rows by an order that an operator makes of the rows of the batch.

    Args:
      pair: the programs.
      eqn: the operator, such as a sort.
      among: the equations that may pick.

    Returns:
      A later operator for whose numbers a microbatch does not have all rows.
    """
    made = set(eqn.outputs) if eqn.primitive in _RANKING else set[int]()
    for later in pair.micro.body.equations:
        read = [a for a in later.inputs if isinstance(a, int)]
        if made.isdisjoint(read):
            continue
        if later.index in among and indexes_rows(pair, later):
            if not made.isdisjoint(read[1:]) and not _indexes_within(pair, later):
                return later
        elif _is_counting(pair, later):
            made.update(later.outputs)
    return None


def _is_counting(pair: Pair, eqn: Equation) -> bool:
    """Whether all results are whole numbers or flags."""
    dtypes = [pair.micro.values[v].dtype for v in eqn.outputs]
    return not any(jax_compat.is_extended(d) or d.kind not in "biu" for d in dtypes)


def _indexes_within(pair: Pair, eqn: Equation) -> bool:
    """Whether what an operator indexes rows by is made of a microbatch's own rows.

    Their order, or the place of the largest, is one within the microbatch. A number
    that is given, such as a node's neighbour, counts the rows of the whole batch.
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
    """Whether a part of an array has all of its rows, in the same dimension."""
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
    # The window of the updates along this dimension must be all of it.
    kept = [
        d
        for d in range(len(pair.micro.values[operand].shape))
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    return numbers.update_window_dims[kept.index(dim)] == _dim(pair, updates)
