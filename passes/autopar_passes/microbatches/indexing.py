"""Whether operators that index arrays stay within the rows of a microbatch.

The compiler's rules say which dimensions may be split with communication; they do not
say that an index is none of a row.
"""

from __future__ import annotations

from autopar_passes.microbatches.pairs import Pair
from autopar_passes.program.equations import Atom, Equation

SCATTERS = frozenset(
    {
        "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min",
        "scatter-max",
    }
)  # fmt: skip


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
