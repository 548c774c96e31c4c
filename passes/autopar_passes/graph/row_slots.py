"""Gives sorted rows slots, so that products of groups become batches of plain products.

A step without a capacity sorts rows by their group, such as tokens by their experts,
and multiplies the groups by ragged products. This pass rewrites such a step, if
`autopar_passes.graph.row_orders` finds that no result depends on the order. Each group
gets a fixed number of slots in each block of rows. A ragged product becomes a batched
product, ``(groups, blocks, slots, K) @ (groups, K, N)``, all of whose dimensions may be
sharded. If devices that share the blocks share the groups in the product, the compiler
sends the rows by all-to-alls.

No row is dropped. If a group has more rows in a block than slots, a loop runs the same
equations on the other rows, in further rounds, and adds their results
(`autopar_passes.graph.slot_rows`). One loop serves several results, those that are
computed before any of them is read. A loop says how often it is expected to run
(`autopar_passes.jax_compat.expecting_runs`), which plans and audits count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.row_orders import RowOrders
from autopar_passes.graph.slot_rows import (
    EXITS,
    Kind,
    Round,
    Shape,
    SlotEquations,
    SlotError,
    Sorted,
    num_rounds,
    one_row,
    round_of,
    sort_rows,
)
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Value,
    reads,
    walk,
)
from autopar_passes.program.flatten import Builder, next_index
from autopar_passes.rules.factor_rule import FactorRule

# Expected runs of the loop over further rounds. The number of slots is chosen such that
# rows that choose their groups at random fill them less often than this
# (`slots_for`). How a model routes its rows is not known when a plan is made.
EXPECTED_RUNS = 0.01
# Slots are a multiple of this number if there are more, so that products have whole
# tiles.
_TILE = 8


def slots_for(shape: tuple[int, int, int], capacity: float) -> int:
    """The number of slots of a group in a block.

    Args:
      shape: the blocks, the rows of a block and the groups.
      capacity: slots divided by the mean number of rows of a group in a block.
    """
    _, rows, groups = shape
    slots = math.ceil(capacity * rows / groups)
    if slots > _TILE:
        slots = -(-slots // _TILE) * _TILE
    return max(1, min(slots, rows))


def capacity_for(shape: tuple[int, int, int], least: float = 1.25) -> float:
    """The capacity that random rows exceed in `EXPECTED_RUNS` of all steps.

    The rows of a group in a block are about normally distributed, with the mean as the
    variance. The probability that one of all ``groups x blocks`` numbers is larger than
    the slots is at most the sum of their probabilities, for which the bound ``exp(-z**2
    / 2) / 2`` of the tail is taken.

    Args:
      shape: the blocks, the rows of a block and the groups.
      least: the least capacity.
    """
    blocks, rows, groups = shape
    deviations = math.sqrt(2 * math.log(groups * blocks / (2 * EXPECTED_RUNS)))
    return max(least, 1 + deviations / math.sqrt(max(rows / groups, 1.0)))


@dataclasses.dataclass(frozen=True, slots=True)
class RowSlots:
    """What a rewrite found.

    Attributes:
      slots: order -> the sizes of its slots; empty if the program is as it was.
      capacity: slots divided by the mean number of rows of a group in a block, before
        they were rounded up; 0 without slots.
      refused: why rows got no slots; '' if they did, or if there are none.
    """

    slots: Mapping[int, Shape]
    capacity: float = 0.0
    refused: str = ""


def give_slots(
    program: Program,
    rules: Mapping[int, FactorRule],
    orders: RowOrders,
    blocks: int,
    capacity: float | None = None,
) -> tuple[Program, RowSlots]:
    """Returns the program that gives sorted rows slots.

    Values keep their numbers if they have no sorted rows, and equations that are not
    rewritten keep their indices.

    Args:
      program: a flat program.
      rules: the sharding rules, by equation.
      orders: its orders (`autopar_passes.graph.row_orders.find_row_orders`).
      blocks: the number of blocks.
      capacity: slots divided by the mean number of rows of a group in a block; None:
        from `capacity_for`.
    """
    if not orders:
        reasons = sorted(set(orders.refused.values()))
        return program, RowSlots({}, refused="; ".join(reasons))
    try:
        capacity, shapes = _shapes(program, orders, blocks, capacity)
        writer = _Writer(program, SlotEquations(program.values, orders, rules, shapes))
        body = writer.region(program.body)
    except SlotError as error:
        return program, RowSlots({}, refused=str(error))
    values = tuple(writer.builder.values)
    made = dataclasses.replace(program, values=values, body=body)
    return made, RowSlots(shapes, capacity)


def _shapes(
    program: Program, orders: RowOrders, blocks: int, capacity: float | None
) -> tuple[float, dict[int, Shape]]:
    """The capacity, and the sizes of the slots of each order."""
    if orders.refused:
        raise SlotError("; ".join(sorted(set(orders.refused.values()))))
    equations, sizes = program.by_index(), dict[int, tuple[int, int, int]]()
    for index, order in orders.sorts.items():
        if index in orders.inverses:
            continue
        groups = {p.groups for p in orders.products.values() if p.order == order}
        if len(groups) > 1:
            raise SlotError("products have several numbers of groups")
        if order not in orders.bounded:
            raise SlotError("rows may have other keys than the numbers of groups")
        (keys, *_) = equations[index].inputs
        assert isinstance(keys, int)
        sizes[order] = blocks, program.values[keys].size // blocks, groups.pop()
    if capacity is None:
        # Plans record the capacity, so it has few digits.
        capacity = math.ceil(100 * max(map(capacity_for, sizes.values()))) / 100
    made = {o: Shape(*size, slots_for(size, capacity)) for o, size in sizes.items()}
    return capacity, made


@dataclasses.dataclass(slots=True)
class _Order:
    """The values of an order in the open region."""

    sorted: Sorted
    rounds: int
    first: Round
    open: list[tuple[Equation, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Frame:
    """The state of an open region.

    Attributes:
      equations: the equations that are written.
      slots: value with sorted rows -> the value with slots.
      makers: value with sorted rows -> the equation that makes it.
      orders: the orders that are sorted.
      pending: values that are computed when the open exits end.
      deferred: equations that read pending values.
    """

    equations: list[Equation]
    slots: dict[int, int] = dataclasses.field(default_factory=dict)
    makers: dict[int, Equation] = dataclasses.field(default_factory=dict)
    orders: dict[int, _Order] = dataclasses.field(default_factory=dict)
    pending: set[int] = dataclasses.field(default_factory=set)
    deferred: list[Equation] = dataclasses.field(default_factory=list)


class _Writer:
    def __init__(self, program: Program, run: SlotEquations) -> None:
        self.run = run
        self.orders = run.orders
        # Values all of whose elements are one number, with this number.
        self.filled: dict[int, Any] = {
            eqn.outputs[0]: eqn.inputs[0].value
            for eqn in walk(program.body)
            if eqn.primitive == "broadcast_in_dim"
            and not isinstance(eqn.inputs[0], int)
        }
        known = self.orders.uniform.items()
        self.filled |= {value: only for value, only in known if only is not None}
        self.builder = Builder(program.values, next_index(program))
        self.frame = _Frame([])

    def region(self, region: Region) -> Region:
        outer, self.frame = self.frame, _Frame([])
        before, self.builder.equations = self.builder.equations, self.frame.equations
        for eqn in region.equations:
            self.take(eqn)
        self.flush()
        equations = _live(self.frame.equations, region.outputs)
        self.frame, self.builder.equations = outer, before
        return dataclasses.replace(region, equations=equations)

    def take(self, eqn: Equation) -> None:
        """Writes an equation, or defers it until the open exits end."""
        kind = self.run.kind(eqn)
        if not self.frame.pending.isdisjoint(reads(eqn)):
            if kind is None and not eqn.source.effects:
                self.frame.deferred.append(eqn)
                self.frame.pending.update(eqn.outputs)
                return
            self.flush()
        elif eqn.source.effects:
            self.flush()
        if kind is None:
            self.plain(eqn)
        else:
            self.write(eqn, kind)

    def plain(self, eqn: Equation) -> None:
        regions = tuple(map(self.region, eqn.regions))
        self.builder.equations.append(dataclasses.replace(eqn, regions=regions))

    def write(self, eqn: Equation, kind: Kind) -> None:
        match kind:
            case Kind.KNOWN:
                self.known(eqn)
            case Kind.BARRIER:
                self.barrier(eqn)
            case _ if kind in EXITS:
                self.leave(eqn)
            case _:
                if kind is Kind.SORT:
                    self.sort(eqn)
                order = self.frame.orders[self.run.order_of(eqn)]
                self.keep(eqn, self.call(eqn, order.first))

    def leave(self, eqn: Equation) -> None:
        """Writes an exit, whose loop follows when the result is read."""
        number = self.run.order_of(eqn)
        order, shape = self.frame.orders[number], self.run.shapes[number]
        if shape.slots >= shape.rows:
            self.call(eqn, order.first, eqn.outputs)
            return
        (first,) = self.call(eqn, order.first)
        order.open.append((eqn, first))
        self.frame.pending.update(eqn.outputs)

    def keep(self, eqn: Equation, made: Sequence[int]) -> None:
        for value, new in zip(eqn.outputs, made, strict=True):
            self.frame.slots[value] = new
            self.frame.makers[value] = eqn

    def atoms(self, eqn: Equation) -> list[int]:
        """The operands of an equation that are values, with slots."""
        return [
            self.frame.slots.get(a, a)
            for a in eqn.inputs
            if isinstance(a, int) and a not in self.orders.placed
        ]

    def call(
        self, eqn: Equation, first: Round, results: Sequence[int] = ()
    ) -> list[int]:
        """Writes an equation on the slots of the first round; returns its results."""
        arrays = self.atoms(eqn)

        def function(*given: Any) -> list[Any]:
            of, rest = Round(*given[:3]), iter(given[3:])
            operands = [self.operand(a, rest) for a in eqn.inputs]
            return self.run.run(eqn, operands, of)

        atoms, key = [*first, *arrays], self.run.key(eqn)
        return self.builder.calls(function, atoms, eqn.name_stack, results, key)

    def operand(self, atom: Atom, rest: Any) -> Any:
        if not isinstance(atom, int):
            return atom.value
        return None if atom in self.orders.placed else next(rest)

    def sort(self, eqn: Equation) -> None:
        """Writes the order of the rows, and the rows of the first round."""
        number = self.orders.sorts[eqn.index]
        before = self.frame.orders.get(number)
        if before is not None and before.open:
            self.flush()
        shape = self.run.shapes[number]
        (keys, *_) = eqn.inputs
        assert isinstance(keys, int)

        def write(function: Callable[..., Any], *atoms: int) -> list[Any]:
            key = function, shape
            return self.builder.calls(
                lambda *arrays: function(*arrays, shape), atoms, eqn.name_stack, key=key
            )

        found = Sorted(*write(sort_rows, keys))
        first = write(_first_round, *found)
        (rounds,) = write(num_rounds, found.counts)
        self.frame.orders[number] = _Order(found, rounds, Round(*first))

    def known(self, eqn: Equation) -> None:
        """Writes numbers that are known, in case that another equation reads them."""
        for value in eqn.outputs:
            of = self.builder.values[value]
            if value in self.orders.uniform:
                only = self.orders.uniform[value]
                if only is None:
                    raise SlotError(f"'{eqn.primitive}' makes known numbers")
                self.builder.calls(
                    lambda of=of, only=only: [jnp.full(of.shape, only, of.dtype)],
                    [],
                    eqn.name_stack,
                    [value],
                )
            elif value in self.orders.places:
                counted = self.orders.places[value]
                if counted is None:
                    raise SlotError(f"'{eqn.primitive}' makes known numbers")
                self.builder.calls(
                    lambda of=of, at=counted: [_count(of, *at)],
                    [],
                    eqn.name_stack,
                    [value],
                )

    def barrier(self, eqn: Equation) -> None:
        """Writes a barrier on slots, without places of rows."""
        inputs, outputs = list[Atom](), list[int]()
        for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
            if not self.run.is_moved(atom):
                inputs.append(atom)
                outputs.append(value)
            elif isinstance(atom, int) and atom in self.frame.slots:
                inputs.append(self.frame.slots[atom])
                like = self.builder.values[self.frame.slots[atom]]
                self.frame.slots[value] = self.builder.like(like)
                outputs.append(self.frame.slots[value])
                self.frame.makers[value] = eqn
        made = dataclasses.replace(eqn, inputs=tuple(inputs), outputs=tuple(outputs))
        self.builder.equations.append(made)

    # -- further rounds --------------------------------------------------------------

    def flush(self) -> None:
        """Writes the loops of all open exits, and the equations that wait for them."""
        for number, order in self.frame.orders.items():
            if order.open:
                self.finish(order, self.run.shapes[number])
        deferred, self.frame.deferred = self.frame.deferred, []
        self.frame.pending = set()
        for eqn in deferred:
            self.plain(eqn)

    def finish(self, order: _Order, shape: Shape) -> None:
        """Writes the loop over the further rounds of open exits."""
        exits = [eqn for eqn, _ in order.open]
        firsts = [first for _, first in order.open]
        order.open = []
        results = [value for eqn in exits for value in eqn.outputs]
        bodies = [*self.closure(exits), *exits]
        count, (entries, alone) = len(exits), self.entries(bodies)
        filled = [value for value in alone if value in self.filled]

        def function(*given: Any) -> list[Any]:
            first, rounds = given[:count], given[count]
            found = Sorted(*given[count + 1 : count + 6])
            env = {
                value: one_row(array, alone.get(value))
                for value, array in zip(entries, given[count + 6 :], strict=True)
            }

            def more(state: tuple[Any, Any]) -> tuple[Any, Any]:
                number, before = state
                made = {value: self.filled_row(value, alone[value]) for value in filled}
                return number + 1, self.next_round(
                    bodies, env | made, round_of(found, number, shape), before
                )

            with jax_compat.expecting_runs(EXPECTED_RUNS):
                _, last = jax.lax.while_loop(
                    lambda state: state[0] < rounds, more, (jnp.int32(1), list(first))
                )
            return last

        self.builder.calls(
            function,
            [*firsts, order.rounds, *order.sorted, *entries],
            exits[-1].name_stack,
            results,
            self.key_of_rounds(bodies, shape),
        )

    def entries(self, bodies: Sequence[Equation]) -> tuple[list[int], dict[int, int]]:
        """The values that enter the loop over further rounds.

        In the loop, a whole array would be in one layout on all devices. So if all
        equations read only one row of an array, only this row enters, and nothing
        enters if it is filled with one number.

        Returns:
          The values, and the dimension of the rows of those that are read in one row.
        """
        dims: dict[int, set[int | None]] = {}
        for eqn in bodies:
            if eqn.primitive == "optimization_barrier":
                continue
            for atom, dim in zip(eqn.inputs, self.run.equal_rows(eqn), strict=True):
                if isinstance(atom, int) and not self.run.is_moved(atom):
                    dims.setdefault(atom, set()).add(dim)
        alone = {
            value: dim
            for value, (dim, *others) in dims.items()
            if dim is not None and not others
        }
        entries = [v for v in dims if v not in alone or v not in self.filled]
        return entries, alone

    def filled_row(self, value: int, dim: int) -> Any:
        """One row of a value that is filled with one number."""
        of = self.builder.values[value]
        sizes = [1 if d == dim else size for d, size in enumerate(of.shape)]
        return jnp.full(sizes, self.filled[value], of.dtype)

    def number_of(self, value: int) -> bytes | None:
        """The number that fills a value, as bytes; None if none does."""
        known = self.filled.get(value)
        return None if known is None else np.asarray(known).tobytes()

    def key_of_rounds(self, bodies: Sequence[Equation], shape: Shape) -> Hashable:
        """A key that is equal only for equal equations of further rounds.

        Values count by the order in which the equations name them.
        """
        numbers: dict[int, int] = {}
        made: list[Hashable] = [shape]
        for eqn in bodies:
            atoms = [a for a in (*eqn.inputs, *eqn.outputs) if isinstance(a, int)]
            made.append(tuple(map(self.number_of, atoms)))
            own = tuple(numbers.setdefault(a, len(numbers)) for a in atoms)
            if self.run.kind(eqn) is Kind.BARRIER:
                key: Hashable = tuple(a in self.frame.makers for a in atoms)
            else:
                key = self.run.key(eqn)
            if key is None:
                return None
            made.append((own, key))
        return tuple(made)

    def next_round(
        self,
        bodies: Sequence[Equation],
        env: dict[int, Any],
        of: Round,
        before: Sequence[Any],
    ) -> list[Any]:
        """The results of exits after one more round.

        Args:
          bodies: the equations of the round; the last ones are the exits.
          env: the values that the equations read from outside.
          of: the rows of the round.
          before: the results of the exits so far.
        """
        exits, out = iter(before), list[Any]()
        for eqn in bodies:
            kind = self.run.kind(eqn)
            given = [env.get(a) if isinstance(a, int) else a.value for a in eqn.inputs]
            if kind is Kind.BARRIER:
                for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
                    if isinstance(atom, int) and atom in self.frame.makers:
                        env[value] = env.get(atom)
            elif kind in EXITS:
                so_far = next(exits)
                if kind in (Kind.SCATTER, Kind.ENTRIES):
                    given[0] = so_far
                (more,) = self.run.run(eqn, given, of)
                out.append(self.run.combine(eqn, so_far, more).astype(so_far.dtype))
            else:
                env.update(zip(eqn.outputs, self.run.run(eqn, given, of), strict=True))
        return out

    def closure(self, exits: Sequence[Equation]) -> list[Equation]:
        """The equations on sorted rows that exits depend on, in their order."""
        found: dict[int, Equation] = {}
        todo = list(exits)
        while todo:
            for atom in todo.pop().inputs:
                # A barrier may return rows of several orders; all are computed.
                eqn = self.frame.makers.get(atom) if isinstance(atom, int) else None
                if eqn is not None and eqn.index not in found:
                    found[eqn.index] = eqn
                    todo.append(eqn)
        place = {e.index: k for k, e in enumerate(self.frame.makers.values())}
        return sorted(found.values(), key=lambda e: place[e.index])


def _first_round(*given: Any) -> Round:
    """The rows of the first round; the arguments are the order and its sizes."""
    return round_of(Sorted(*given[:-1]), 0, given[-1])


def _count(of: Value, dim: int, first: int) -> Any:
    """Numbers that count up along a dimension."""
    return jax.lax.broadcasted_iota(of.dtype, of.shape, dim) + of.dtype.type(first)


def _live(
    equations: Sequence[Equation], outputs: Sequence[Atom]
) -> tuple[Equation, ...]:
    """The equations whose results are read, or that have side effects."""
    wanted = {a for a in outputs if isinstance(a, int)}
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if eqn.source.effects or not wanted.isdisjoint(eqn.outputs):
            kept.append(eqn)
            wanted.update(reads(eqn))
    return tuple(reversed(kept))
