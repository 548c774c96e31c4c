"""Runs single equations on rows that have slots in place of a sorted order.

Each group of rows has a fixed number of slots in each block of rows. The slots of a
*round* hold the first rows of each group, those of the next round the rows after them,
and so on. A value with sorted rows becomes an array ``(groups, blocks, ...)`` in which
the dimension of the rows has the slots of one group and block. Slots without a row hold
a copy of some other row, which no result may depend on. Results in the original order
(*exits*) get only the rows of the round; further rounds are added to them.

`autopar_passes.graph.row_slots` rewrites programs with these functions.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes.graph.row_orders import SCATTERS, RowOrders
from autopar_passes.program.equations import Atom, Equation, Value
from autopar_passes.rules.factor_rule import FactorKind, FactorRule
from autopar_passes.rules.ragged import RAGGED_DOT, ragged_dims

_DROP = {
    "mode": jax.lax.GatherScatterMode.FILL_OR_DROP,
    "unique_indices": False,
    "indices_are_sorted": False,
}
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})


class SlotError(Exception):
    """An equation cannot run on slots; the message says why."""


class Kind(enum.Enum):
    """What an equation does with sorted rows."""

    SORT = "sorts rows"
    KNOWN = "makes numbers that are known"
    TAKE = "takes rows, or entries that the rows name, in the sorted order"
    PLACE = "puts rows in the sorted order"
    ALIKE = "computes each row alike"
    PRODUCT = "multiplies each row with the matrix of its group"
    BARRIER = "returns its operands"
    # Exits.
    BACK = "takes sorted rows in the original order"
    SCATTER = "puts sorted rows to their places in the original order"
    ENTRIES = "puts sorted rows to places that data names"
    SUMS = "sums products of the rows of each group"
    REDUCE = "reduces the rows"


EXITS = frozenset({Kind.BACK, Kind.SCATTER, Kind.ENTRIES, Kind.SUMS, Kind.REDUCE})


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of slots.

    Attributes:
      blocks: the number of blocks of rows.
      rows: the rows of a block.
      groups: the number of groups.
      slots: the slots of a group in a block.
    """

    blocks: int
    rows: int
    groups: int
    slots: int


class Sorted(NamedTuple):
    """The order of the rows within blocks.

    ``order`` has the row of each place, ``place`` the place of each row, and ``keys``
    the group of each row, int32 ``(blocks, rows)``. ``counts`` has the rows of each
    group, and ``starts`` the first place of each group, int32 ``(blocks, groups)``.
    """

    order: Any
    place: Any
    keys: Any
    counts: Any
    starts: Any


class Round(NamedTuple):
    """The rows of one round.

    ``rows`` has the row of each slot, as its number within the block, and ``used``
    whether the slot has a row, ``(groups, blocks, slots)``. ``slot`` has the slot of
    each row among those of its block, int32 ``(blocks, rows)``; it is ``groups x
    slots`` for rows of other rounds.
    """

    rows: Any
    used: Any
    slot: Any


def sort_rows(keys: Any, shape: Shape) -> Sorted:
    """Sorts rows by their keys, ``(blocks x rows,)``, within each block."""
    keys = jax.lax.reshape(keys, (shape.blocks, shape.rows)).astype(jnp.int32)
    numbers = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    _, order = jax.lax.sort((keys, numbers), dimension=1, is_stable=True, num_keys=1)
    _, place = jax.lax.sort((order, numbers), dimension=1, is_stable=True, num_keys=1)
    groups = jax.lax.broadcasted_iota(jnp.int32, (1, 1, shape.groups), 2)
    counts = jnp.sum(keys[:, :, None] == groups, 1, dtype=jnp.int32)
    return Sorted(order, place, keys, counts, jnp.cumsum(counts, 1) - counts)


def num_rounds(counts: Any, shape: Shape) -> Any:
    """The rounds that all rows need, int32."""
    return jnp.max((counts + (shape.slots - 1)) // shape.slots)


def round_of(found: Sorted, number: Any, shape: Shape) -> Round:
    """The rows of a round, given by its number."""
    ranks = jnp.arange(shape.slots, dtype=jnp.int32) + number * shape.slots
    places = found.starts.T[:, :, None] + ranks
    used = ranks < found.counts.T[:, :, None]
    places = jnp.minimum(places, shape.rows - 1)
    rows = jax.vmap(lambda p: jnp.take_along_axis(found.order, p, 1))(places)
    own = jnp.take_along_axis(found.starts, found.keys, 1)
    rank = found.place - own - number * shape.slots
    inside = (rank >= 0) & (rank < shape.slots)
    end = shape.groups * shape.slots
    slot = jnp.where(inside, found.keys * shape.slots + rank, end)
    return Round(rows, used, slot)


class SlotEquations:
    """Runs the equations of a program that read or make sorted rows, on slots."""

    def __init__(
        self,
        values: Sequence[Value],
        orders: RowOrders,
        rules: Mapping[int, FactorRule],
        shapes: Mapping[int, Shape],
    ) -> None:
        """Stores the facts.

        Args:
          values: the values of the program.
          orders: the orders of the program, within blocks.
          rules: the sharding rules, by equation.
          shapes: order -> the sizes of its slots.
        """
        self.values, self.orders, self.rules = values, orders, rules
        self.shapes = shapes

    def dim(self, atom: Atom) -> int | None:
        """The dimension of sorted rows of a value; None if it has none."""
        found = self.orders.values.get(atom) if isinstance(atom, int) else None
        return None if found is None else found.dim

    def order_of(self, eqn: Equation) -> int:
        """The order of the rows that an equation reads or makes."""
        for atom in (*eqn.inputs, *eqn.outputs):
            if isinstance(atom, int) and atom in self.orders.values:
                return self.orders.values[atom].order
        raise AssertionError(eqn)

    def kind(self, eqn: Equation) -> Kind | None:
        """What an equation does with sorted rows; None if it has none to do with them.

        Raises:
          SlotError: the equation cannot run on slots.
        """
        orders = self.orders
        if eqn.primitive == "optimization_barrier":
            return Kind.BARRIER if any(map(self.is_moved, eqn.inputs)) else None
        if eqn.index in orders.sorts and eqn.index not in orders.inverses:
            return Kind.SORT
        known = orders.placed | orders.places.keys() | orders.uniform.keys()
        if eqn.index in orders.sorts or known.issuperset(eqn.outputs):
            return Kind.KNOWN
        if not any(map(self.is_moved, (*eqn.inputs, *eqn.outputs))):
            return None
        if not known.isdisjoint(eqn.outputs):
            raise SlotError(f"some results of '{eqn.primitive}' are known numbers")
        if eqn.regions:
            raise SlotError("a loop or a branch reads its rows")
        match eqn.primitive:
            case "gather":
                return self._kind_of_gather(eqn)
            case name if name in SCATTERS:
                return self._kind_of_scatter(eqn)
            case name if name == RAGGED_DOT:
                _, other = ragged_dims(eqn.params["ragged_dot_dimension_numbers"])
                return Kind.PRODUCT if other is None else Kind.SUMS
            case _:
                return self._kind_of_others(eqn)

    def is_moved(self, atom: Atom) -> bool:
        """Whether a value has another shape, or is not computed, on slots."""
        orders = self.orders
        return isinstance(atom, int) and (
            atom in orders.values or atom in orders.placed
        )

    def _kind_of_gather(self, eqn: Equation) -> Kind:
        array, indices = eqn.inputs
        if self.dim(array) is not None and indices in self.orders.placed:
            return Kind.BACK
        if self.dim(array) is None and self.dim(indices) is not None:
            if isinstance(array, int) and array in self.orders.placed:
                raise SlotError("its places are gathered")
            return Kind.TAKE
        raise SlotError("rows are gathered by their places")

    def _kind_of_scatter(self, eqn: Equation) -> Kind:
        array, indices, _ = eqn.inputs
        if indices in self.orders.placed:
            return Kind.PLACE
        if self.dim(array) is not None or self.dim(indices) is None:
            raise SlotError("rows are scattered by their places")
        if eqn.index in self.orders.moves:
            return Kind.SCATTER
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            raise SlotError("rows are scattered to clipped places")
        if eqn.primitive != "scatter-add":
            raise SlotError("rows are not added to the places that data names")
        return Kind.ENTRIES

    def _kind_of_others(self, eqn: Equation) -> Kind:
        if any(isinstance(a, int) and a in self.orders.placed for a in eqn.inputs):
            raise SlotError(f"'{eqn.primitive}' reads places of rows")
        rule, factor = self.rules[eqn.index], self._factor(eqn)
        if rule.kinds[factor] is FactorKind.REDUCE:
            if eqn.primitive not in _REDUCTIONS:
                raise SlotError(f"rows are reduced by '{eqn.primitive}'")
            return Kind.REDUCE
        return Kind.ALIKE

    def _factor(self, eqn: Equation) -> int:
        """The factor of an operator's rule that is the rows."""
        for atom, dims in zip(eqn.inputs, self.rules[eqn.index].operands, strict=True):
            dim = self.dim(atom)
            if dim is not None:
                return dims[dim][0]
        raise AssertionError(eqn)

    def key(self, eqn: Equation) -> Hashable:
        """A key that is equal only for equations that `run` computes alike.

        Numbers of values are left out. So equal layers have equal keys. None: the
        equation has parameters without a key.
        """
        atoms = tuple(map(self._fact, (*eqn.inputs, *eqn.outputs)))
        own = eqn.source.primitive, *sorted(eqn.params.items())
        rule, move = self.rules.get(eqn.index), self.orders.moves.get(eqn.index)
        made = own, self.kind(eqn), self.shapes[self.order_of(eqn)], rule, move, atoms
        try:
            hash(made)
        except TypeError:
            return None
        return made

    def _fact(self, atom: Atom) -> Hashable:
        """What `run` reads of an operand or result besides its elements."""
        if not isinstance(atom, int):
            array = np.asarray(atom.value)
            return array.dtype, array.tobytes()
        of, found = self.values[atom], self.orders.values.get(atom)
        rows = None if found is None else (found.dim, found.numbered)
        return of.shape, of.dtype, rows, atom in self.orders.placed

    def equal_rows(self, eqn: Equation) -> list[int | None]:
        """The dimension of the rows of each operand of which `run` reads one row.

        All rows of such an operand are equal. So `run` gives the same results for its
        first row alone. None: `run` reads the whole operand.
        """
        kind, move = self.kind(eqn), self.orders.moves.get(eqn.index)
        dims: list[int | None] = [None] * len(eqn.inputs)
        if kind is Kind.PLACE and move is not None:
            dims[0] = move.operand
        elif kind is Kind.SCATTER and move is not None:
            dims[2] = move.moved
        elif kind is Kind.ENTRIES:
            dims[2] = self._place_of_updates(eqn)
        elif kind is Kind.ALIKE:
            factor = self._factor(eqn)
            for k, own in enumerate(self.rules[eqn.index].operands):
                dims[k] = next((d for d, f in enumerate(own) if factor in f), None)
        return [
            None if self.dim(atom) is not None else dim
            for atom, dim in zip(eqn.inputs, dims, strict=True)
        ]

    def _place_of_updates(self, eqn: Equation) -> int:
        """The dimension of an `ENTRIES` scatter's updates that has the rows."""
        dim, updates = self.dim(eqn.inputs[1]), eqn.inputs[2]
        assert dim is not None
        if isinstance(updates, int):
            rank = len(self.values[updates].shape)
        else:
            rank = np.ndim(updates.value)
        window = eqn.params["dimension_numbers"].update_window_dims
        return [d for d in range(rank) if d not in window][dim]

    # -- runs ------------------------------------------------------------------------

    def run(self, eqn: Equation, given: Sequence[Any], of: Round) -> list[Any]:
        """The results of an equation in a round.

        Args:
          eqn: the equation.
          given: its operands. Operands with sorted rows have slots. Operands of exits
            that the rows are added to are the results of the rounds before.
          of: the rows of the round.
        """
        kind, shape = self.kind(eqn), self.shapes[self.order_of(eqn)]
        given = list(map(one_row, given, self.equal_rows(eqn)))
        match kind:
            case Kind.SORT:
                return self._sort(eqn, given, of, shape)
            case Kind.TAKE:
                return [self._take(eqn, given, shape)]
            case Kind.PLACE:
                return [self._place(eqn, given, of, shape)]
            case Kind.ALIKE:
                return self._alike(eqn, given, shape)
            case Kind.PRODUCT | Kind.SUMS:
                return [self._product(eqn, given, of)]
            case Kind.BACK:
                return [self._back(eqn, given, of, shape)]
            case Kind.SCATTER:
                return [self._scatter(eqn, given, of, shape)]
            case Kind.ENTRIES:
                return [self._entries(eqn, given, of, shape)]
            case Kind.REDUCE:
                return [self._reduce(eqn, given, of)]
            case _:
                raise AssertionError(kind)

    def combine(self, eqn: Equation, before: Any, more: Any) -> Any:
        """The result of an exit after one more round."""
        match self.kind(eqn):
            case Kind.SCATTER | Kind.ENTRIES:
                return more  # Its operand were the rounds before.
            case Kind.REDUCE if eqn.primitive == "reduce_max":
                return jnp.maximum(before, more)
            case Kind.REDUCE if eqn.primitive == "reduce_min":
                return jnp.minimum(before, more)
            case _:
                return before + more

    def _sort(
        self, eqn: Equation, given: Sequence[Any], of: Round, shape: Shape
    ) -> list[Any]:
        sizes = of.rows.shape
        groups = jax.lax.broadcasted_iota(given[0].dtype, sizes, 0)
        out: list[Any] = [groups]
        for value, payload in zip(eqn.outputs[1:], given[1:], strict=True):
            if self.orders.values[value].numbered:
                block = jax.lax.broadcasted_iota(payload.dtype, sizes, 1)
                rows = of.rows.astype(payload.dtype)
                out.append(rows + block * payload.dtype.type(shape.rows))
                continue
            parts = jax.lax.reshape(payload, (shape.blocks, shape.rows))
            out.append(
                jax.vmap(lambda r, p=parts: jnp.take_along_axis(p, r, 1))(of.rows)
            )
        return out

    def _local_indices(self, eqn: Equation, indices: Any, shape: Shape) -> Any:
        """The indices of slots, counted from the first row of their block."""
        move = self.orders.moves[eqn.index]
        array = eqn.inputs[0]
        assert isinstance(array, int)
        size = self.values[array].shape[move.operand] // shape.blocks
        begin = jax.lax.broadcasted_iota(indices.dtype, indices.shape, 1)
        return indices - self._in_column(begin * indices.dtype.type(size), move.column)

    def _in_column(self, numbers: Any, column: int) -> Any:
        """Numbers in one entry of the last dimension, and zeros in the others."""
        if numbers.shape[-1] == 1:
            return numbers
        at = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, numbers.ndim - 1)
        return jnp.where(at == column, numbers, 0)

    def _take(self, eqn: Equation, given: Sequence[Any], shape: Shape) -> Any:
        array, indices = given
        params = eqn.params | {"indices_are_sorted": False, "unique_indices": False}

        def one(array: Any, indices: Any) -> Any:
            return eqn.source.primitive.bind(array, indices, **params)

        if eqn.index not in self.orders.moves:
            return jax.vmap(jax.vmap(one, (None, 0)), (None, 0))(array, indices)
        at = self.orders.moves[eqn.index].operand
        indices = self._local_indices(eqn, indices, shape)
        parts = _split(array, at, shape.blocks)
        return jax.vmap(jax.vmap(one, (at, 0)), (None, 0))(parts, indices)

    def _slot_indices(self, eqn: Equation, of: Round, shape: Shape) -> Any:
        """The slots of each block's rows, in the shape of an operator's indices."""
        move, indices = self.orders.moves[eqn.index], eqn.inputs[1]
        assert isinstance(indices, int)
        sizes = list(self.values[indices].shape)
        sizes[move.indices] = shape.rows
        slot = of.slot.astype(self.values[indices].dtype)
        return jax.lax.reshape(slot, (shape.blocks, *sizes))

    def _back(
        self, eqn: Equation, given: Sequence[Any], of: Round, shape: Shape
    ) -> Any:
        move = self.orders.moves[eqn.index]
        blocks = _by_block(given[0], move.operand)
        end = shape.groups * shape.slots
        indices = jnp.minimum(self._slot_indices(eqn, of, shape), end - 1)
        params = eqn.params | {"indices_are_sorted": False, "unique_indices": False}
        made = jax.vmap(
            lambda x, i: eqn.source.primitive.bind(x, i, **params), 0, move.moved
        )(blocks, indices)
        here = jax.lax.broadcast_in_dim(
            of.slot < end, made.shape, (move.moved, move.moved + 1)
        )
        made = jnp.where(here, made, jnp.zeros((), made.dtype))
        return _merge(made, move.moved)

    def _place(
        self, eqn: Equation, given: Sequence[Any], of: Round, shape: Shape
    ) -> Any:
        move = self.orders.moves[eqn.index]
        array, _, updates = given
        sizes = list(array.shape)
        sizes[move.operand] = shape.groups * shape.slots
        wide = jnp.broadcast_to(array, sizes)
        made = jax.vmap(
            lambda i, u: eqn.source.primitive.bind(wide, i, u, **eqn.params | _DROP),
            (0, move.moved),
        )(self._slot_indices(eqn, of, shape), _split(updates, move.moved, shape.blocks))
        return _by_group(made, move.operand, shape.groups)

    def _updates(
        self, eqn: Equation, given: Sequence[Any], place: int, of: Round
    ) -> Any:
        """The updates of a scatter with one row for each slot."""
        updates = given[2]
        if self.dim(eqn.inputs[2]) is not None:
            return updates
        groups, blocks, slots = of.rows.shape
        sizes = list(updates.shape)
        sizes[place] = slots
        return jnp.broadcast_to(updates, (groups, blocks, *sizes))

    def _scatter(
        self, eqn: Equation, given: Sequence[Any], of: Round, shape: Shape
    ) -> Any:
        move = self.orders.moves[eqn.index]
        array, size = given[0], given[0].shape[move.operand] // shape.blocks
        indices = self._local_indices(eqn, given[1], shape)
        unused = self._unused(of, indices, move.indices)
        indices = jnp.where(unused, indices.dtype.type(size), indices)
        rows = self._updates(eqn, given, move.moved, of)
        made = jax.vmap(
            lambda x, i, u: eqn.source.primitive.bind(x, i, u, **eqn.params | _DROP),
            (move.operand, 0, 0),
            move.operand,
        )(
            _split(array, move.operand, shape.blocks),
            _by_block(indices, move.indices),
            _by_block(rows, move.moved),
        )
        return _merge(made, move.operand)

    def _unused(self, of: Round, indices: Any, dim: int) -> Any:
        """Whether indices are those of slots without a row."""
        return jax.lax.broadcast_in_dim(~of.used, indices.shape, (0, 1, 2 + dim))

    def _entries(
        self, eqn: Equation, given: Sequence[Any], of: Round, shape: Shape
    ) -> Any:
        del shape
        array, indices = given[:2]
        dim, place = self.dim(eqn.inputs[1]), self._place_of_updates(eqn)
        assert dim is not None
        largest = max(array.shape)
        unused = self._unused(of, indices, dim)
        indices = jnp.where(unused, indices.dtype.type(largest), indices)
        rows = self._updates(eqn, given, place, of)
        made = _merge(_by_block(indices, dim), dim, first=True)
        moved = _merge(_by_block(rows, place), place, first=True)
        return eqn.source.primitive.bind(array, made, moved, **eqn.params | _DROP)

    def _alike(self, eqn: Equation, given: Sequence[Any], shape: Shape) -> list[Any]:
        rule, factor = self.rules[eqn.index], self._factor(eqn)
        params = dict(eqn.params)
        place = next(d for d, own in enumerate(rule.results[0]) if factor in own)
        for name in ("shape", "new_sizes", "limit_indices"):
            if name in params:
                sizes = list(params[name])
                sizes[place] = shape.slots
                params[name] = tuple(sizes)
        arrays: list[Any] = []
        axes: list[int | None] = []
        for atom, array, dims in zip(eqn.inputs, given, rule.operands, strict=True):
            if self.dim(atom) is not None:
                arrays.append(array)
                axes.append(0)
                continue
            at = [d for d, own in enumerate(dims) if factor in own]
            if at:
                sizes = list(array.shape)
                sizes[at[0]] = shape.slots
                array = jnp.broadcast_to(array, sizes)
            arrays.append(array)
            axes.append(None)

        def one_block(*parts: Any) -> list[Any]:
            made = eqn.source.primitive.bind(*parts, **params)
            return list(made) if eqn.source.primitive.multiple_results else [made]

        own = tuple(axes)
        return jax.vmap(jax.vmap(one_block, own), own)(*arrays)

    def _product(self, eqn: Equation, given: Sequence[Any], of: Round) -> Any:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (left, right), _ = numbers.dot_dimension_numbers
        rows, other = ragged_dims(numbers)
        lhs, rhs = given[:2]
        if other is None:
            (group,) = numbers.rhs_group_dimensions
            dims = (([2 + d for d in left], list(right)), ([0], [group]))
        else:
            lhs, rhs = self._masked(lhs, rows, of), self._masked(rhs, other, of)
            dims = (
                ([1, *(2 + d for d in left)], [1, *(2 + d for d in right)]),
                ([0], [0]),
            )
        return jax.lax.dot_general(
            lhs,
            rhs,
            dims,
            precision=eqn.params["precision"],
            preferred_element_type=eqn.params["preferred_element_type"],
        )

    def _masked(self, array: Any, dim: int, of: Round, fill: Any = 0) -> Any:
        """An array with other elements in slots without a row."""
        used = jax.lax.broadcast_in_dim(of.used, array.shape, (0, 1, 2 + dim))
        return jnp.where(used, array, jnp.asarray(fill, array.dtype))

    def _reduce(self, eqn: Equation, given: Sequence[Any], of: Round) -> Any:
        dim = self.dim(eqn.inputs[0])
        assert dim is not None
        (array,) = given
        array = self._masked(array, dim, of, _identity(eqn.primitive, array.dtype))
        axes = (0, 1, *(2 + d for d in eqn.params["axes"]))
        return eqn.source.primitive.bind(array, **eqn.params | {"axes": axes})


def one_row(array: Any, dim: int | None) -> Any:
    """The first row of an array along a dimension; the array if there is none."""
    return array if dim is None else jax.lax.slice_in_dim(array, 0, 1, axis=dim)


def _identity(primitive: str, dtype: Any) -> Any:
    """The element that a reduction leaves out."""
    if primitive == "reduce_sum":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if primitive == "reduce_max" else jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.min if primitive == "reduce_max" else limits.max


def _split(array: Any, dim: int, blocks: int) -> Any:
    """Splits a dimension into the blocks and the rows of a block."""
    shape = array.shape
    parts = (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return jax.lax.reshape(array, parts)


def _merge(array: Any, dim: int, *, first: bool = False) -> Any:
    """Joins a dimension and the next; with ``first``, dimension 0 and another."""
    if first:
        array = jnp.moveaxis(array, 0, dim)
    shape = array.shape
    return jax.lax.reshape(
        array, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    )


def _by_block(array: Any, dim: int) -> Any:
    """From ``(groups, blocks, ...)`` to ``(blocks, ...)``, with all groups' slots."""
    return _merge(jnp.moveaxis(array, 0, 1 + dim), 1 + dim)


def _by_group(array: Any, dim: int, groups: int) -> Any:
    """The inverse of `_by_block`."""
    return jnp.moveaxis(_split(array, 1 + dim, groups), 1 + dim, 0)
