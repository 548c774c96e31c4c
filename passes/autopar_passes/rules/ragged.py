"""Products of rows with the matrix of their group, for blocks of rows.

`jax.lax.ragged_dot` needs all rows of a group next to each other, so that its rows
cannot be sharded. `ragged_dot_in_blocks` reads rows that are grouped within each of
several blocks. Each device can therefore multiply the rows of its own blocks
(`autopar_passes.graph.row_blocks` writes such products).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar_passes.rules.factor_rule import (
    Dims,
    FactorKind,
    FactorRule,
    register_rule,
)

RAGGED_DOT = "ragged_dot_general"
IN_BLOCKS = "ragged_dot_in_blocks"


def ragged_dot_in_blocks(
    lhs: Any, rhs: Any, sizes: Any, *, numbers: Any, precision: Any, dtype: Any
) -> Any:
    """Multiplies each block of rows as `jax.lax.ragged_dot_general` does.

    If the ragged dimension is contracted, the products of the blocks are added up.

    Args:
      lhs: the operand with the ragged dimension, which has the rows of all blocks.
      rhs: the other operand. If the ragged dimension is contracted, it has the rows of
        all blocks, too.
      sizes: the rows of each group in each block, int32 ``(blocks, groups)``.
      numbers: the dimension numbers of `jax.lax.ragged_dot_general`, without batch
        dimensions.
      precision: as for `jax.lax.ragged_dot_general`.
      dtype: ``preferred_element_type`` of `jax.lax.ragged_dot_general`.
    """
    return _in_blocks.bind(
        lhs, rhs, sizes, numbers=numbers, precision=precision, dtype=dtype
    )


def ragged_dims(numbers: Any) -> tuple[int, int | None]:
    """The dimensions of the rows in both operands; None if only the first has rows."""
    (contracted, other), _ = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    if rows not in contracted:
        return rows, None
    return rows, other[tuple(contracted).index(rows)]


def _one_block(params: dict[str, Any], lhs: Any, rhs: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot_general(
        lhs,
        rhs,
        sizes,
        ragged_dot_dimension_numbers=params["numbers"],
        precision=params["precision"],
        preferred_element_type=params["dtype"],
    )


def _run(lhs: Any, rhs: Any, sizes: Any, **params: Any) -> Any:
    """The products of the blocks, one after another."""
    blocks = sizes.shape[0]
    if blocks == 1:
        return _one_block(params, lhs, rhs, sizes[0])
    dim, other = ragged_dims(params["numbers"])

    def block(x: Any, dim: int, number: Any) -> Any:
        size = x.shape[dim] // blocks
        return jax.lax.dynamic_slice_in_dim(x, number * size, size, dim)

    if other is None:
        made = jax.lax.map(
            lambda k: _one_block(params, block(lhs, dim, k), rhs, sizes[k]),
            jnp.arange(blocks),
        )
        return _join(made, _result_rows(params["numbers"], lhs.ndim))
    like = jax.eval_shape(lambda *x: _one_block(params, *x), lhs, rhs, sizes[0])
    wide = jnp.promote_types(like.dtype, jnp.float32)

    def add(total: Any, number: Any) -> tuple[Any, None]:
        parts = block(lhs, dim, number), block(rhs, other, number)
        made = _one_block(params | {"dtype": wide}, *parts, sizes[number])
        return total + made, None

    total, _ = jax.lax.scan(add, jnp.zeros(like.shape, wide), jnp.arange(blocks))
    return total.astype(like.dtype)


def _join(blocks: Any, dim: int) -> Any:
    """Joins blocks, stacked along the first dimension, along another dimension."""
    moved = jnp.moveaxis(blocks, 0, dim)
    shape = moved.shape
    size = shape[dim] * shape[dim + 1]
    return moved.reshape(*shape[:dim], size, *shape[dim + 2 :])


def _result_rows(numbers: Any, rank: int) -> int:
    """The dimension of the result that has the rows."""
    (contracted, _), _ = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    return [d for d in range(rank) if d not in contracted].index(rows)


_in_blocks = Primitive(IN_BLOCKS)
_in_blocks.def_impl(jax.jit(_run, static_argnames=("numbers", "precision", "dtype")))
mlir.register_lowering(_in_blocks, mlir.lower_fun(_run, multiple_results=False))


@_in_blocks.def_abstract_eval
def _abstract(lhs: Any, rhs: Any, sizes: Any, **params: Any) -> Any:
    one = jax.ShapeDtypeStruct(sizes.shape[1:], sizes.dtype)
    given = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs))
    made = jax.eval_shape(lambda *x: _one_block(params, *x), *given, one)
    return ShapedArray(made.shape, made.dtype)


@register_rule(IN_BLOCKS)
def _rule(
    operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]
) -> FactorRule:
    """Blocks may be sharded, and all dimensions but the rows of a block and groups."""
    del results
    lhs, rhs, sizes = operands
    numbers = params["numbers"]
    (contracted, other_contracted), _ = numbers.dot_dimension_numbers
    rows, other_rows = ragged_dims(numbers)
    blocks, groups = sizes.shape
    factors: list[tuple[int, FactorKind]] = []

    def new(size: int, kind: FactorKind) -> tuple[int, ...]:
        if size < 2:
            return ()
        factors.append((size, kind))
        return (len(factors) - 1,)

    summed = other_rows is not None
    block = new(blocks, FactorKind.REDUCE if summed else FactorKind.PASS)
    within = new(lhs.shape[rows] // blocks, FactorKind.BLOCKED)
    group = new(groups, FactorKind.BLOCKED)
    first: dict[int, tuple[int, ...]] = {rows: block + within}
    second: dict[int, tuple[int, ...]] = {}
    if other_rows is not None:
        second[other_rows] = first[rows]
    for dim in numbers.rhs_group_dimensions:
        second[dim] = group
    for a, b in zip(contracted, other_contracted, strict=True):
        if a != rows:
            first[a] = second[b] = new(lhs.shape[a], FactorKind.REDUCE)
    for dims, array in ((first, lhs), (second, rhs)):
        for dim, size in enumerate(array.shape):
            if dim not in dims:
                dims[dim] = new(size, FactorKind.PASS)
    made: list[tuple[int, ...]] = [group] if summed else []
    made += [first[d] for d in range(len(lhs.shape)) if d not in contracted]
    gone = {*other_contracted, *numbers.rhs_group_dimensions}
    made += [second[d] for d in range(len(rhs.shape)) if d not in gone]
    kinds = tuple(kind for _, kind in factors)
    return FactorRule(
        tuple(size for size, _ in factors),
        kinds,
        (_in_order(first), _in_order(second), (block, group)),
        (tuple(made),),
        reduction="sum" if FactorKind.REDUCE in kinds else "",
    )


def _in_order(dims: dict[int, tuple[int, ...]]) -> Dims:
    return tuple(dims[d] for d in range(len(dims)))
