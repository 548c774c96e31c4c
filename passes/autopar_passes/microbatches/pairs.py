"""Compares the program of a microbatch with that of the whole batch.

Both are traced from one step, so a value has the same number in both. They may differ
in the sizes of dimensions, and in scalars that are made of such sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import FunctionType
from typing import Any

import numpy as np

from autopar_passes import jax_compat
from autopar_passes.microbatches.microbatched import MicrobatchError
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    walk,
)

# Parameters of primitives that say sizes, or that follow from their operands.
_SIZES = frozenset(
    {
        "shape", "new_sizes", "sizes", "slice_sizes", "limit_indices", "start_indices",
        "sharding", "out_sharding", "jaxpr", "cond_jaxpr", "body_jaxpr", "branches",
        "operand_shape", "updates_shape", "padding_config", "length", "result_avals",
    }
)  # fmt: skip
# Those of kernels, which are traced for a microbatch
# (`autopar_passes.microbatches.kernels`).
_KERNEL_SIZES = {
    "pallas_call": frozenset({"out_avals", "grid_mapping", "cost_estimate", "jaxpr"}),
    "custom_partitioning": frozenset({"call"}),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The program of a whole batch and of one microbatch.

    Attributes:
      whole: of the whole batch.
      micro: of one microbatch.
      count: number of microbatches.
      dims: of each value, the dimension with the rows of the batch; -1: none; less:
        a microbatch has no part of it.
      sources: the equations of the whole batch, also those of regions, by index.
      made_by: the equation of a microbatch that makes each value.
    """

    whole: Program
    micro: Program
    count: int
    dims: tuple[int, ...]
    sources: dict[int, Equation]
    made_by: dict[int, Equation]

    def has_rows(self, value: int) -> bool:
        """Whether a value has a dimension with the rows of the batch."""
        return self.dims[value] >= 0

    def rows_of(self, value: int) -> int:
        """How many rows a value has in the whole batch."""
        return self.whole.values[value].shape[self.dims[value]]


def pair_programs(whole: Program, micro: Program, count: int) -> Pair:
    """Compares two programs.

    Raises:
      MicrobatchError: they differ in more than the number of rows.
    """
    _compare(whole.body, micro.body)
    if len(whole.values) != len(micro.values):
        raise _depends("it has other arrays for as few as a microbatch has")
    dims = tuple(
        _dim(a.shape, b.shape, count)
        for a, b in zip(whole.values, micro.values, strict=True)
    )
    made_by = {v: e for e in walk(micro.body) for v in e.outputs}
    return Pair(whole, micro, count, dims, whole.by_index(), made_by)


# What `_dim` gives for shapes that no single dimension of rows tells apart.
_SEVERAL, _OTHER = -2, -3


def _dim(whole: tuple[int, ...], micro: tuple[int, ...], count: int) -> int:
    if len(whole) != len(micro):
        return _OTHER
    differ = [d for d, (a, b) in enumerate(zip(whole, micro, strict=True)) if a != b]
    if any(whole[d] != count * micro[d] for d in differ):
        return _OTHER
    return _SEVERAL if len(differ) > 1 else differ[0] if differ else -1


def check_dims(pair: Pair, eqn: Equation) -> None:
    """Checks that a microbatch has a part of each result of an equation.

    Raises:
      MicrobatchError: it has not.
    """
    for value in eqn.outputs:
        if pair.dims[value] < -1:
            raise MicrobatchError(_wrong_dims(pair, eqn, value))


def _wrong_dims(pair: Pair, eqn: Equation, value: int) -> str:
    shape = "x".join(map(str, pair.whole.values[value].shape))
    if pair.dims[value] == _SEVERAL:
        why = (
            f"makes an array of {shape} with two dimensions of the batch: it compares "
            "each row with the others, as a contrastive loss does"
        )
    else:
        small = "x".join(map(str, pair.micro.values[value].shape))
        why = (
            f"makes an array of {shape} for the whole batch and of {small} for a "
            "microbatch, which is no part of it"
        )
    return f"{place(eqn)} {why}."


def place(eqn: Equation) -> str:
    """Where an equation stands, for people: ``'reduce_max' (train.py:12)``."""
    source = jax_compat.source_line(eqn.source)
    return f"'{eqn.primitive}'" + (f" ({source})" if source else "")


def _depends(why: str) -> MicrobatchError:
    return MicrobatchError(f"the program depends on the number of rows: {why}.")


def _compare(whole: Region, micro: Region) -> None:
    if whole.inputs != micro.inputs:
        raise _depends("it has other arrays for as few as a microbatch has")
    for a, b in zip(whole.equations, micro.equations, strict=False):
        same = a.primitive == b.primitive and _alike(a.inputs, b.inputs)
        if not same or a.outputs != b.outputs:
            raise _depends(_difference(a, b))
        sizes = _KERNEL_SIZES.get(a.primitive, _SIZES)
        for key, value in a.params.items():
            if key not in sizes and not _equal(value, b.params.get(key)):
                raise _depends(f"{place(a)} has another '{key}'")
        for inner in zip(a.regions, b.regions, strict=True):
            _compare(*inner)
    more = len(whole.equations) != len(micro.equations)
    if more or not _alike(whole.outputs, micro.outputs):
        raise _depends("it has other operators for as few as a microbatch has")


def _alike(a: tuple[Atom, ...], b: tuple[Atom, ...]) -> bool:
    """Whether atoms are the same values, or scalars of any value."""
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(
        x == y if isinstance(x, int) else isinstance(y, Scalar) for x, y in pairs
    )


def _difference(whole: Equation, micro: Equation) -> str:
    """Says where programs go apart."""
    of = " of jax.random" if jax_compat.is_of_random(whole.source) else ""
    if whole.primitive == micro.primitive:
        return f"{place(whole)}{of} has other operands in a microbatch"
    return f"it runs {place(whole)}{of}, and {place(micro)} in a microbatch"


_Functions = tuple[FunctionType, FunctionType]


def _equal(a: Any, b: Any, within: tuple[_Functions, ...] = ()) -> bool:
    if a is b:
        return True
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return (a, b) in within or _same_function(a, b, (*within, (a, b)))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        held = ((getattr(x, f.name) for f in dataclasses.fields(a)) for x in (a, b))
        return all(_equal(x, y, within) for x, y in zip(*held, strict=True))
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False  # arrays of other shapes may be equal after broadcasting
    try:
        return bool(np.all(a == b))
    except (TypeError, ValueError):
        return False


def _same_function(
    a: FunctionType, b: FunctionType, within: tuple[_Functions, ...]
) -> bool:
    """Whether functions are of one code and hold equal values.

    Each trace makes the functions of `jax.debug.callback` anew. A function may hold
    itself: those of ``within`` are being compared already.
    """
    if a.__code__ is not b.__code__:
        return False
    one, other = _held_objects(a), _held_objects(b)
    return one.keys() == other.keys() and all(
        _equal(value, other[name], within) for name, value in one.items()
    )


def _held_objects(function: FunctionType) -> dict[str | int, Any]:
    """What a function holds: its defaults, by place and name, and its closure."""
    out: dict[str | int, Any] = dict(enumerate(function.__defaults__ or ()))
    out.update(function.__kwdefaults__ or {})
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            out[name] = cell.cell_contents
    return out
