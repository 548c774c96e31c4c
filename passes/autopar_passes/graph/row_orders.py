"""Finds rows that are sorted only to group them, such as tokens by their experts.

A mixture of experts without a capacity sorts its rows by their expert, multiplies the
groups with `jax.lax.ragged_dot`, and puts the rows back into their order. In such a
program, the rows may be sorted within blocks instead: each block of rows is sorted
alone, and has its own group sizes. No result changes, apart from the order of sums. The
blocks can then lie on different devices, or in different microbatches.

This holds if all operators between the sort and the way back treat sorted rows alike.
The module follows each value that has sorted rows:

* *sorted* values have a row of a sorted order in each place of one dimension;
* *placed* values have, for each row in the original order, a number computed from its
  place in the sorted order, such as the inverse permutation.

An integer of a sorted or placed value may be a known function of the row's number. The
module computes such functions, to prove that a gather or a scatter moves rows only
within their block. An operator that depends on the places of sorted rows in any other
way, such as a cumulative sum over them, ends the search for this order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar_passes.graph.known_numbers import SAME, KnownNumbers, is_uniform
from autopar_passes.program.equal_leaves import ELEMENTWISE, SHAPED
from autopar_passes.program.equations import Atom, Equation, Program, Region, Scalar
from autopar_passes.rules.factor_rule import FactorKind, FactorRule
from autopar_passes.rules.ragged import RAGGED_DOT, ragged_dims

SCATTERS = frozenset({"scatter", "scatter-add", "scatter-mul"})
# Operators that treat the entries of a dimension alike if the dimension is none of
# those that the parameters name.
_ALONG = {
    "argmax": ("axes",),
    "argmin": ("axes",),
    "concatenate": ("dimension",),
    "cumsum": ("axis",),
    "cummax": ("axis",),
    "rev": ("dimensions",),
    "split": ("axis",),
    "top_k": ("axis",),
}
_ALIKE = ELEMENTWISE | SHAPED | _ALONG.keys() | {"slice"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _OrderedRows:
    """What is known of a value with rows of a sorted order.

    Attributes:
      order: the order, by the number that stands for its keys.
      dim: the dimension of the rows.
      known: for integers that follow from a row's number: the elements as a function
        of it. The array has all dimensions of the value; the dimension ``dim`` counts
        the rows in the original order for sorted values, and in the sorted order for
        placed values. Other dimensions may have size 1. None if it is not known.
    """

    order: int
    dim: int
    known: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RowMove:
    """A gather or scatter of rows between the original and a sorted order.

    Attributes:
      operand: the dimension of the first operand that the rows are taken from or put
        to.
      indices: the dimension of the indices that has the rows.
      moved: the dimension of the gathered result, or of the updates, that has the rows.
      column: the entry of the last dimension of the indices that numbers rows.
      first: the numbers in the first block, as bytes. The other blocks have the same
        numbers, counted from their own first row.
    """

    operand: int
    indices: int
    moved: int
    column: int
    first: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RowProduct:
    """A ragged product of sorted rows.

    Attributes:
      order: the order of the rows.
      groups: the number of groups.
    """

    order: int
    groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class SortedValue:
    """A value with rows of a sorted order.

    Attributes:
      order: the order.
      dim: the dimension of the rows.
      numbered: whether the value holds the numbers of the rows.
    """

    order: int
    dim: int
    numbered: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RowOrders:
    """The orders of a program that may be sorted in blocks.

    Attributes:
      sorts: index of each sort -> the order that it makes or inverts.
      inverses: indices of the sorts that invert an order.
      moves: index of each gather or scatter of rows -> its dimensions.
      products: index of each ragged product -> its order and groups.
      inside: indices of all equations that read or make sorted or placed values.
      counts: indices of the equations that only count the rows of groups.
      values: value -> its sorted rows.
      placed: values with a number for each row that follows from its place in an order.
      places: values that are equal to the places of rows in a sorted order, up to a
        constant -> their dimension, and the number of the first place; None for other
        numbers that follow from the places.
      uniform: value that is computed from sorted rows, but is the same for all rows ->
        its only element; None if its elements differ along other dimensions.
      bounded: orders of keys that are known to be numbers of groups.
      refused: index of each sort that precedes a ragged product and must stay whole, or
        of a ragged product of rows in no known order -> the reason.
    """

    sorts: Mapping[int, int]
    inverses: frozenset[int]
    moves: Mapping[int, RowMove]
    products: Mapping[int, RowProduct]
    inside: frozenset[int]
    counts: frozenset[int]
    values: Mapping[int, SortedValue]
    placed: frozenset[int]
    places: Mapping[int, tuple[int, int] | None]
    uniform: Mapping[int, Any]
    bounded: frozenset[int]
    refused: Mapping[int, str]

    def __bool__(self) -> bool:
        """Whether there is such an order."""
        return bool(self.products)


_NONE: frozenset[int] = frozenset()
NO_ORDERS = RowOrders({}, _NONE, {}, {}, _NONE, _NONE, {}, _NONE, {}, {}, _NONE, {})


def find_row_orders(
    program: Program, rules: Mapping[int, FactorRule], blocks: int
) -> RowOrders:
    """Finds the orders of rows that a program may sort within blocks.

    Args:
      program: a flat program.
      rules: the sharding rules, by equation.
      blocks: the number of blocks of equal size.
    """
    found = _OrderFinder(program, rules, blocks)
    if not found.has_products:
        return NO_ORDERS
    found.region(program.body)
    return found.orders()


class _Stop(Exception):  # not an error: an order must stay whole, for this reason
    pass


class _OrderFinder:
    def __init__(
        self, program: Program, rules: Mapping[int, FactorRule], blocks: int
    ) -> None:
        self.program, self.rules, self.blocks = program, rules, blocks
        self.numbers = KnownNumbers(program)
        self.has_products = any(
            e.primitive == RAGGED_DOT for e in self.numbers.maker.values()
        )
        self.sorted: dict[int, _OrderedRows] = {}
        self.placed: dict[int, _OrderedRows] = {}
        # Values that are equal to the places of rows in a sorted order.
        self.places: dict[int, int] = {}
        # Order -> the number of its rows.
        self.rows: dict[int, int] = {}
        self.sorts: dict[int, int] = {}
        self.inverses: set[int] = set()
        self.moves: dict[int, tuple[int, RowMove]] = {}
        self.products: dict[int, RowProduct] = {}
        self.inside: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.broken: dict[int, str] = {}
        # What was found of known arrays, which the table keeps alive, by their ids.
        self.seen: dict[Hashable, tuple[np.ndarray, Any]] = {}
        self.unknown: dict[int, str] = {}
        # Value that is equal for all rows -> the order, and its only element.
        self.uniform: dict[int, tuple[int, Any]] = {}
        # Order -> the keys of its first sort.
        self.keys: dict[int, Atom] = {}

    def counted(self, value: int) -> tuple[int, int] | None:
        """The dimension along which known numbers count up, and the first number."""
        known = self.numbers.numbers_of(value)
        dims = [] if known is None else [d for d, n in enumerate(known.shape) if n > 1]
        if known is None or len(dims) != 1:
            return None
        numbers = known.reshape(-1)
        first = int(numbers[0])
        same = np.array_equal(numbers - first, np.arange(len(numbers)))
        return (dims[0], first) if same else None

    def is_bounded(self, order: int) -> bool:
        """Whether all keys are known to be numbers of groups."""
        groups = [p.groups for p in self.products.values() if p.order == order]
        return self.numbers.is_below(self.keys[order], min(groups))

    def orders(self) -> RowOrders:
        used = {p.order for p in self.products.values()}
        good = used - self.broken.keys()
        return RowOrders(
            {k: order for k, order in self.sorts.items() if order in good},
            frozenset(self.inverses),
            {k: move for k, (order, move) in self.moves.items() if order in good},
            {k: p for k, p in self.products.items() if p.order in good},
            frozenset(k for k, order in self.inside.items() if order in good),
            frozenset(k for k, order in self.counts.items() if order in good),
            {
                v: SortedValue(
                    rows.order,
                    rows.dim,
                    self.is_identity(rows.known, self.rows[rows.order]),
                )
                for v, rows in self.sorted.items()
                if rows.order in good
            },
            frozenset(v for v, rows in self.placed.items() if rows.order in good),
            {v: self.counted(v) for v, order in self.places.items() if order in good},
            {v: known for v, (order, known) in self.uniform.items() if order in good},
            frozenset(o for o in good if self.is_bounded(o)),
            {k: self.broken[o] for k, o in self.sorts.items() if o in used - good}
            | self.unknown,
        )

    def region(self, region: Region) -> None:
        for eqn in region.equations:
            self.equation(eqn)
        for atom in region.outputs:
            for rows in self.of(atom):
                self.broken.setdefault(
                    rows.order, "a loop or the step returns its rows"
                )

    def of(self, atom: Atom) -> list[_OrderedRows]:
        """What is known of an operand with rows of an order."""
        if isinstance(atom, Scalar):
            return []
        found = (self.sorted.get(atom), self.placed.get(atom))
        return [rows for rows in found if rows is not None]

    def equation(self, eqn: Equation) -> None:
        self.numbers.classify(eqn)
        given = [rows for a in eqn.inputs for rows in self.of(a)]
        try:
            if eqn.primitive == "optimization_barrier":
                for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
                    self.copy(atom, value)
            elif len({rows.order for rows in given}) > 1:
                raise _Stop("rows of two orders meet")
            elif eqn.regions:
                if given:
                    raise _Stop("a loop or a branch reads its rows")
            elif eqn.primitive == "sort":
                self.sort(eqn)
            elif given:
                self.follow(eqn)
            elif eqn.primitive == RAGGED_DOT:
                self.unknown[eqn.index] = (
                    f"its rows come from no sort of rows that {self.blocks} divides"
                )
        except _Stop as stop:
            where = f"{stop.args[0]} ('{eqn.primitive}')"
            for rows in given:
                self.broken.setdefault(rows.order, where)
        for rows in (*given, *(r for v in eqn.outputs for r in self.of(v))):
            self.inside[eqn.index] = rows.order
        for value in eqn.arrays:
            if value in self.places:
                self.inside[eqn.index] = self.places[value]
        if eqn.primitive == "scan":
            consts = eqn.inputs[: eqn.params["num_consts"]]
            for atom, value in zip(consts, eqn.regions[0].inputs, strict=False):
                self.numbers.enter(atom, value)
        for region in eqn.regions:
            self.region(region)

    def follow(self, eqn: Equation) -> None:
        match eqn.primitive:
            case "gather":
                self.gather(eqn)
            case kind if kind in SCATTERS:
                self.scatter(eqn)
            case kind if kind == RAGGED_DOT:
                self.product(eqn)
            case _:
                self.alike(eqn)

    def copy(self, atom: Atom, value: int) -> None:
        for table in (self.sorted, self.placed):
            if isinstance(atom, int) and atom in table:
                table[value] = table[atom]

    # -- sorts, and moves of rows ----------------------------------------------------

    def sort(self, eqn: Equation) -> None:
        shape = self.numbers.shape(eqn.inputs[0])
        given = [rows for a in eqn.inputs for rows in self.of(a)]
        if len(shape) != 1 or eqn.params["num_keys"] != 1 or shape[0] < 2:
            if given:
                raise _Stop("its rows are sorted once more")
            return
        (count,) = shape
        known = [self.numbers.numbers_of(a) for a in eqn.inputs]
        if given:
            rows = self.sorted_by(eqn.inputs[0])
            if (
                len(given) > 1
                or rows is None
                or not self.is_identity(rows.known, count)
            ):
                raise _Stop("its rows are sorted once more")
            for value, numbers in zip(eqn.outputs[1:], known[1:], strict=True):
                if numbers is None:
                    raise _Stop("its rows are sorted once more")
                self.placed[value] = _OrderedRows(
                    rows.order, 0, _spread(numbers, count)
                )
            self.numbers.set_known(eqn.outputs[0], np.arange(count))
            self.places[eqn.outputs[0]] = rows.order
            self.sorts[eqn.index] = rows.order
            self.inverses.add(eqn.index)
            return
        if count % self.blocks:
            return
        order = self.numbers.number_of(eqn.inputs[0])
        self.rows[order] = count
        self.keys.setdefault(order, eqn.inputs[0])
        self.sorts[eqn.index] = order
        for k, value in enumerate(eqn.outputs):
            numbers = None if k == 0 or known[k] is None else _spread(known[k], count)
            self.sorted[value] = _OrderedRows(order, 0, numbers)
        if not self.numbers.is_natural(eqn.inputs[0]):
            self.broken.setdefault(order, "the sorted keys may be negative")

    def sorted_by(self, atom: Atom) -> _OrderedRows | None:
        return self.sorted.get(atom) if isinstance(atom, int) else None

    def placed_by(self, atom: Atom) -> _OrderedRows | None:
        return self.placed.get(atom) if isinstance(atom, int) else None

    def gather(self, eqn: Equation) -> None:
        array, indices = eqn.inputs
        numbers = eqn.params["dimension_numbers"]
        if numbers.operand_batching_dims:
            raise _Stop("its rows are gathered in batches")
        rank = len(self.numbers.shape(eqn.outputs[0]))
        batch = [d for d in range(rank) if d not in numbers.offset_dims]
        by, source = self.sorted_by(indices), self.sorted_by(array)
        if by is not None and source is None:
            place = batch[by.dim]
            if by.known is None:
                if self.of(array):
                    raise _Stop("its rows are picked by data")
                self.sorted[eqn.outputs[0]] = _OrderedRows(by.order, place)
                return
            column, dim, first = self.within_blocks(
                by, self.numbers.shape(array), numbers.start_index_map
            )
            if dim not in numbers.collapsed_slice_dims:
                raise _Stop("its rows are gathered in slices")
            self.note(eqn, by.order, RowMove(dim, by.dim, place, column, first))
            self.note_gather(eqn, by, array, column, place)
            return
        by = self.placed_by(indices)
        if by is None or source is None or by.order != source.order:
            raise _Stop("its rows are picked by their places")
        (dim,) = numbers.start_index_map or (-1,)
        if (
            not self.is_identity(by.known, self.rows[by.order])
            or dim != source.dim
            or dim not in numbers.collapsed_slice_dims
        ):
            raise _Stop("its rows are picked by their places")
        self.note(eqn, by.order, RowMove(dim, by.dim, batch[by.dim], 0, b""))

    def note_gather(
        self, eqn: Equation, by: _OrderedRows, array: Atom, column: int, place: int
    ) -> None:
        """Records what a gather in a sorted order returns."""
        (value,) = eqn.outputs
        shape = self.numbers.shape(value)
        table, placed = self.numbers.numbers_of(array), self.placed_by(array)
        assert by.known is not None
        rows = by.known[..., column].reshape(-1)
        if placed is not None:
            same = self.is_identity(by.known, len(rows), column)
            if not same or placed.known is None:
                raise _Stop("its places are gathered")
            if len(shape) == placed.known.ndim and placed.dim == place:
                self.numbers.set_known(value, placed.known)
                self.places[value] = by.order
                return
            raise _Stop("its places are gathered")
        known = None
        if table is not None and table.ndim == 1 and len(shape) == 1:
            known = np.broadcast_to(table, self.numbers.shape(array))[rows]
        self.sorted[value] = _OrderedRows(by.order, place, known)

    def scatter(self, eqn: Equation) -> None:
        array, indices, updates = eqn.inputs
        numbers = eqn.params["dimension_numbers"]
        if numbers.operand_batching_dims or self.sorted_by(array) is not None:
            raise _Stop("its rows are overwritten")
        rank = len(self.numbers.shape(updates))
        batch = [d for d in range(rank) if d not in numbers.update_window_dims]
        by, moved = self.sorted_by(indices), self.sorted_by(updates)
        (value,) = eqn.outputs
        if by is not None and self.placed_by(array) is None:
            place = batch[by.dim]
            known = self.numbers.numbers_of(updates)
            along = moved is not None and moved.dim == place
            if not (
                along or self.numbers.is_uniform(updates, place) or known is not None
            ):
                raise _Stop("rows in two orders meet")
            if by.known is None:
                if known is not None and not self.numbers.is_uniform(updates, place):
                    raise _Stop("its places are scattered")
                if eqn.primitive == "scatter":
                    raise _Stop("its rows are put to places that data names")
                return
            column, dim, first = self.within_blocks(
                by, self.numbers.shape(array), numbers.scatter_dims_to_operand_dims
            )
            if dim not in numbers.inserted_window_dims:
                raise _Stop("its rows are scattered in slices")
            count = self.rows[by.order]
            once = self.is_identity(by.known, count, column)
            if eqn.primitive == "scatter" and not once:
                raise _Stop("several of its rows are put to one place")
            self.note(eqn, by.order, RowMove(dim, by.dim, place, column, first))
            if known is not None and not self.numbers.is_uniform(updates, place):
                plain = (
                    self.numbers.numbers_of(array) is not None
                    and len(self.numbers.shape(value)) == rank
                )
                if not (once and plain and place == dim):
                    raise _Stop("its places are scattered")
                self.placed[value] = _OrderedRows(by.order, dim, known)
            return
        by = self.placed_by(indices)
        if by is None or moved is not None or self.of(updates):
            raise _Stop("its rows are overwritten")
        (dim,) = numbers.scatter_dims_to_operand_dims or (-1,)
        if (
            not self.is_identity(by.known, self.rows[by.order])
            or dim not in numbers.inserted_window_dims
            or not self.numbers.is_uniform(array, dim)
        ):
            raise _Stop("its rows are overwritten")
        self.note(eqn, by.order, RowMove(dim, by.dim, batch[by.dim], 0, b""))
        self.sorted[value] = _OrderedRows(by.order, dim)

    def is_identity(
        self, known: np.ndarray | None, count: int, column: int = 0
    ) -> bool:
        """Whether a column of numbers of rows is 0, 1, 2 and so on."""
        if known is None:
            return False
        key = id(known), count, column
        if key not in self.seen:
            numbers = known if known.ndim == 1 else known[..., column].reshape(-1)
            same = np.array_equal(numbers, np.arange(count))
            self.seen[key] = known, same
        return self.seen[key][1]

    def note(self, eqn: Equation, order: int, move: RowMove) -> None:
        self.moves[eqn.index] = (order, move)

    def within_blocks(
        self, by: _OrderedRows, shape: Sequence[int], dims: Sequence[int]
    ) -> tuple[int, int, bytes]:
        """The column of indices that names rows of the same block, and its dimension.

        Also returns the numbers in the first block (`RowMove.first`).

        Args:
          by: the indices.
          shape: the shape of the array that they index.
          dims: the dimension of the array that each column indexes.
        """
        assert by.known is not None
        key = (id(by.known), by.dim, self.rows[by.order], tuple(shape), tuple(dims))
        if key not in self.seen:
            self.seen[key] = by.known, self.search_blocks(by, by.known, shape, dims)
        found = self.seen[key][1]
        if found is None:
            raise _Stop("its rows come from several blocks")
        return found

    def search_blocks(
        self,
        by: _OrderedRows,
        known: np.ndarray,
        shape: Sequence[int],
        dims: Sequence[int],
    ) -> tuple[int, int, bytes] | None:
        """Like `within_blocks`; None if rows come from several blocks."""
        count = self.rows[by.order]
        if by.dim != known.ndim - 1:
            for column, dim in enumerate(dims):
                size = shape[dim]
                numbers = known[..., column].reshape(-1)
                if size % self.blocks or len(numbers) != count:
                    continue
                begin = np.arange(self.blocks)[:, None] * (size // self.blocks)
                each = numbers.reshape(self.blocks, -1) - begin
                inside = each[0].min() >= 0 and each[0].max() < size // self.blocks
                if inside and np.all(each == each[:1]):
                    return column, dim, each[0].tobytes()
        return None

    # -- products --------------------------------------------------------------------

    def product(self, eqn: Equation) -> None:
        lhs, rhs, sizes = eqn.inputs
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        dim, other = ragged_dims(numbers)
        rows = self.sorted_by(lhs)
        _, batch = numbers.dot_dimension_numbers
        if any(batch) or eqn.params["group_offset"] is not None:
            raise _Stop("a ragged product has batches")
        if rows is None or rows.dim != dim or self.of(sizes):
            raise _Stop("a ragged product reads other rows")
        if other is not None:
            second = self.sorted_by(rhs)
            if second is None or second.dim != other:
                raise _Stop("a ragged product reads other rows")
        elif self.of(rhs):
            raise _Stop("a ragged product reads other rows")
        groups = self.numbers.shape(sizes)[-1]
        seen: list[int] = []
        self.products[eqn.index] = RowProduct(rows.order, groups)
        if not self.is_count(sizes, rows.order, groups, seen):
            raise _Stop("the group sizes are not recognised as counts of the keys")
        self.counts.update(dict.fromkeys(seen, rows.order))
        if other is None:
            (contracted, _), _ = numbers.dot_dimension_numbers
            left = [
                d for d in range(len(self.numbers.shape(lhs))) if d not in contracted
            ]
            self.sorted[eqn.outputs[0]] = _OrderedRows(rows.order, left.index(dim))

    def is_count(self, atom: Atom, order: int, groups: int, seen: list[int]) -> bool:
        """Whether a value counts the rows of each group, whose keys are its number.

        Args:
          atom: the value, with one dimension.
          order: the order by these keys.
          groups: the number of groups.
          seen: gets the indices of the equations that count.
        """
        eqn = self.numbers.maker_of(atom)
        if eqn is None or len(self.numbers.shape(atom)) < 1:
            return False
        seen.append(eqn.index)
        if eqn.primitive in (*SAME, "convert_element_type"):
            slot = (
                eqn.outputs.index(atom)
                if eqn.primitive == "optimization_barrier"
                else 0
            )
            return self.is_count(eqn.inputs[slot], order, groups, seen)
        if eqn.primitive == "reduce_sum":
            return self.is_sum_of_equals(eqn, order, groups, seen)
        if eqn.primitive == "scatter-add":
            return self.is_sum_of_ones(eqn, order, groups)
        return False

    def is_sum_of_equals(
        self, eqn: Equation, order: int, groups: int, seen: list[int]
    ) -> bool:
        """Whether a sum counts the keys that equal each of the numbers of groups."""
        (value,) = eqn.inputs
        kept = list(range(len(self.numbers.shape(value))))
        while True:
            axes = eqn.params["axes"] if eqn.primitive == "reduce_sum" else ()
            kept = [d for k, d in enumerate(kept) if k not in axes] if axes else kept
            (value,) = eqn.inputs
            inner = self.numbers.maker_of(value)
            if inner is None:
                return False
            seen.append(inner.index)
            if inner.primitive == "eq":
                break
            if inner.primitive not in ("convert_element_type", "reduce_sum", "copy"):
                return False
            if inner.primitive == "reduce_sum":
                return False
            eqn = inner
        if len(kept) != 1:
            return False
        (dim,) = kept
        shape = self.numbers.shape(value)
        if shape[dim] != groups or math.prod(shape) != groups * self.rows[order]:
            return False
        for keys, numbers in (inner.inputs, inner.inputs[::-1]):
            known = self.numbers.numbers_of(numbers)
            if known is None or known.size != groups or known.ndim != len(shape):
                continue
            counted = np.array_equal(known.reshape(-1), np.arange(groups))
            if (
                counted
                and known.shape[dim] == groups
                and self.numbers.is_uniform(keys, dim)
            ):
                return self.numbers.number_of(keys, spread=True) == order
        return False

    def is_sum_of_ones(self, eqn: Equation, order: int, groups: int) -> bool:
        """Whether a scatter adds one for each key to the number of its group."""
        array, indices, updates = eqn.inputs
        zeros, ones = self.numbers.numbers_of(array), self.numbers.numbers_of(updates)
        numbers = eqn.params["dimension_numbers"]
        return (
            self.numbers.shape(array) == (groups,)
            and zeros is not None
            and not np.any(zeros)
            and ones is not None
            and bool(np.all(ones == 1))
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and tuple(numbers.inserted_window_dims) == (0,)
            and math.prod(self.numbers.shape(indices)) == self.rows[order]
            and self.numbers.number_of(indices, spread=True, natural=True) == order
        )

    # -- all other operators ---------------------------------------------------------

    def alike(self, eqn: Equation) -> None:
        """Follows an operator that treats all entries of a dimension alike."""
        rule = self.rules.get(eqn.index)
        if rule is None or eqn.primitive not in _ALIKE:
            raise _Stop("an operator depends on the order")
        order, factor, table = -1, -1, self.sorted
        for atom, dims in zip(eqn.inputs, rule.operands, strict=True):
            for rows in self.of(atom):
                if len(dims[rows.dim]) != 1 or factor not in (-1, dims[rows.dim][0]):
                    raise _Stop("its rows are mixed")
                order, factor = rows.order, dims[rows.dim][0]
                self.check_params(eqn, rows.dim)
                assert isinstance(atom, int)
                table = self.sorted if atom in self.sorted else self.placed
        for atom, dims in zip(eqn.inputs, rule.operands, strict=True):
            for dim, own in enumerate(dims):
                if factor not in own:
                    continue
                rows = table.get(atom) if isinstance(atom, int) else None
                if rows is not None and rows.dim == dim and len(own) == 1:
                    continue
                if self.of(atom) or not self.numbers.is_uniform(atom, dim):
                    raise _Stop("its rows meet rows in another order")
        if rule.kinds[factor] is FactorKind.REDUCE:
            if table is self.placed or rule.reduction not in ("sum", "max", "min"):
                raise _Stop("its rows are reduced")
            return
        if rule.kinds[factor] is not FactorKind.PASS:
            raise _Stop("an operator depends on the order")
        for value, dims in zip(eqn.outputs, rule.results, strict=True):
            places = [d for d, own in enumerate(dims) if factor in own]
            if len(places) != 1 or dims[places[0]] != (factor,):
                raise _Stop("its rows are mixed")
            read = {a: table[a].known for a in eqn.arrays if a in table}
            known = self.numbers.compute(eqn, read)
            if known is not None and is_uniform(known, places[0]):
                self.numbers.set_known(value, known)
                only = known.reshape(-1)[0] if np.all(known == known.flat[0]) else None
                self.uniform[value] = order, only
                continue
            table[value] = _OrderedRows(order, places[0], known)
            if known is None and table is self.placed:
                raise _Stop("its places are mixed with data")

    def check_params(self, eqn: Equation, dim: int) -> None:
        params = eqn.params
        for name in _ALONG.get(eqn.primitive, ()):
            named = params[name]
            if dim == named or (isinstance(named, tuple) and dim in named):
                raise _Stop("an operator depends on the order")
        if eqn.primitive == "slice":
            size = self.numbers.shape(eqn.inputs[0])[dim]
            strides = params["strides"]
            whole = params["start_indices"][dim] == 0
            whole = whole and params["limit_indices"][dim] == size
            if not whole or (strides is not None and strides[dim] != 1):
                raise _Stop("some of its rows are taken")

    # -- known numbers ---------------------------------------------------------------


def _spread(known: np.ndarray | None, count: int) -> np.ndarray | None:
    if known is None or known.shape == (count,):
        return known
    return np.broadcast_to(known, (count,))
