"""Sorts rows within blocks, so that each device groups the rows that it has.

A step that sorts its rows by their group, such as tokens by their experts, needs all
rows on each device. This pass rewrites such a step to sort blocks of rows, if
`autopar_passes.graph.row_orders` finds that no result depends on the order. Ragged
products get the group sizes of each block. Gathers and scatters move rows within their
block. All other equations stay as they are.

The number of a row stays its number among all rows, so that the rewritten step computes
the same values for each row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes.graph.row_orders import RowMove, RowOrders
from autopar_passes.program.equations import Atom, Equation, Program, Region, reads
from autopar_passes.program.flatten import Builder, next_index
from autopar_passes.rules.ragged import ragged_dot_in_blocks


def sort_in_blocks(program: Program, orders: RowOrders, blocks: int) -> Program:
    """Returns the program that sorts rows within blocks.

    Values keep their numbers, and equations that are not rewritten keep their indices.

    Args:
      program: a flat program.
      orders: its orders (`autopar_passes.graph.row_orders.find_row_orders`).
      blocks: the number of blocks.
    """
    if not orders:
        return program
    writer = _Writer(program, orders, blocks)
    body = writer.region(program.body)
    values = tuple(writer.builder.values)
    return dataclasses.replace(program, values=values, body=body)


class _Writer:
    def __init__(self, program: Program, orders: RowOrders, blocks: int) -> None:
        self.orders, self.blocks = orders, blocks
        self.builder = Builder(program.values, next_index(program))
        # Order and number of groups -> the group sizes, in the open region.
        self.sizes: dict[tuple[int, int], Atom] = {}
        # Order -> the keys of its sort in the open region.
        self.keys: dict[int, Atom] = {}

    def region(self, region: Region) -> Region:
        kept = self.builder.equations, self.sizes, self.keys
        self.builder.equations, self.sizes, self.keys = [], {}, {}
        for eqn in region.equations:
            self.equation(eqn)
        equations = self.without_counts(region)
        self.builder.equations, self.sizes, self.keys = kept
        return dataclasses.replace(region, equations=tuple(equations))

    def equation(self, eqn: Equation) -> None:
        orders = self.orders
        if eqn.index in orders.sorts:
            self.sort(eqn)
        elif eqn.index in orders.moves:
            self.move(eqn, orders.moves[eqn.index])
        elif eqn.index in orders.products:
            self.product(eqn)
        else:
            regions = tuple(map(self.region, eqn.regions))
            self.builder.equations.append(dataclasses.replace(eqn, regions=regions))

    def without_counts(self, region: Region) -> list[Equation]:
        """The new equations, without counts of rows that nothing reads any more."""
        read = {a for a in region.outputs if isinstance(a, int)}
        kept: list[Equation] = []
        for eqn in reversed(self.builder.equations):
            counts = eqn.index in self.orders.counts
            if not counts or not read.isdisjoint(eqn.outputs):
                kept.append(eqn)
                read.update(reads(eqn))
        return kept[::-1]

    def call(self, eqn: Equation, function: Any) -> None:
        """Writes a function of the operands in place of an equation."""
        first = len(self.builder.equations)
        arrays = list(eqn.arrays)
        self.builder.calls(
            lambda *given: function(*_with_scalars(eqn, given)),
            arrays,
            eqn.name_stack,
            eqn.outputs,
        )
        # The new equation that makes the result has the index of the old one.
        made = self.builder.equations
        for k in range(len(made) - 1, first - 1, -1):
            if eqn.outputs[-1] in made[k].outputs:
                made[k] = dataclasses.replace(made[k], index=eqn.index)
                return

    def sort(self, eqn: Equation) -> None:
        order = self.orders.sorts[eqn.index]
        if eqn.index not in self.orders.inverses:
            self.keys[order] = eqn.inputs[0]
            self.sizes = {k: v for k, v in self.sizes.items() if k[0] != order}
        params = dict(eqn.params) | {"dimension": 1}

        def run(*given: Any) -> Any:
            parts = [
                jax.lax.reshape(x, (self.blocks, x.size // self.blocks)) for x in given
            ]
            made = eqn.source.primitive.bind(*parts, **params)
            return [jax.lax.reshape(x, (x.size,)) for x in made]

        self.call(eqn, run)

    def move(self, eqn: Equation, move: RowMove) -> None:
        blocks = self.blocks

        def run(array: Any, indices: Any, *updates: Any) -> Any:
            shape = array.shape
            size = shape[move.operand] // blocks
            parts = _split(array, move.operand, blocks)
            numbers = _split(indices, move.indices, blocks)
            where = jax.lax.broadcasted_iota(numbers.dtype, numbers.shape, move.indices)
            if numbers.shape[-1] > 1:
                column = jax.lax.broadcasted_iota(
                    numbers.dtype, numbers.shape, numbers.ndim - 1
                )
                where = jnp.where(column == move.column, where, 0)
            numbers = numbers - where * numbers.dtype.type(size)
            axes = [move.operand, move.indices]
            if updates:
                (rows,) = updates
                given = (parts, numbers, _split(rows, move.moved, blocks))
                made = jax.vmap(
                    lambda *x: eqn.source.primitive.bind(*x, **eqn.params),
                    (*axes, move.moved),
                    move.operand,
                )(*given)
                return _merge(made, move.operand)
            made = jax.vmap(
                lambda *x: eqn.source.primitive.bind(*x, **eqn.params), axes, move.moved
            )(parts, numbers)
            return _merge(made, move.moved)

        self.call(eqn, run)

    def product(self, eqn: Equation) -> None:
        found = self.orders.products[eqn.index]
        key = found.order, found.groups
        if key not in self.sizes:
            self.sizes[key] = self.count_groups(eqn, *key)
        params = eqn.params

        def run(lhs: Any, rhs: Any, sizes: Any) -> Any:
            return ragged_dot_in_blocks(
                lhs,
                rhs,
                sizes,
                numbers=params["ragged_dot_dimension_numbers"],
                precision=params["precision"],
                dtype=params["preferred_element_type"],
            )

        inputs = (*eqn.inputs[:2], self.sizes[key])
        self.call(dataclasses.replace(eqn, inputs=inputs), run)

    def count_groups(self, eqn: Equation, order: int, groups: int) -> Atom:
        """Writes the group sizes of each block, (blocks, groups)."""
        keys = self.keys[order]
        assert isinstance(keys, int)

        def run(keys: Any) -> Any:
            rows = jax.lax.reshape(keys, (self.blocks, keys.size // self.blocks, 1))
            numbers = jax.lax.broadcasted_iota(keys.dtype, (1, 1, groups), 2)
            return jnp.sum(rows == numbers, 1, dtype=jnp.int32)

        return self.builder.call(run, [keys], eqn.name_stack)


def _with_scalars(eqn: Equation, arrays: Any) -> list[Any]:
    given = iter(arrays)
    return [next(given) if isinstance(a, int) else a.value for a in eqn.inputs]


def _split(array: Any, dim: int, blocks: int) -> Any:
    """Splits a dimension into the blocks and the rows of a block."""
    shape = array.shape
    parts = (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return jax.lax.reshape(array, parts)


def _merge(array: Any, dim: int) -> Any:
    """The inverse of `_split`."""
    shape = array.shape
    size = shape[dim] * shape[dim + 1]
    return jax.lax.reshape(array, (*shape[:dim], size, *shape[dim + 2 :]))
