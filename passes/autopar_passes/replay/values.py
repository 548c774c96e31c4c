"""The values of a replay, in the layouts that readers need, scope by scope.

A *scope* holds the values of one region: the program itself, or the body of a loop or
of a branch. A *partial* value is held as a stacked array
(`autopar_passes.sums.stacked`). A *floating* value has no layout of its own: each
reader recomputes it in the layout that the reader needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import jax

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.ring_order import RingOrder, from_ring, to_ring
from autopar_passes.layouts import Layout, constrain
from autopar_passes.program.equations import Atom, Equation, Scalar
from autopar_passes.sums import stacked
from autopar_passes.sums.finish import Sum, behind, run_and_sum
from autopar_passes.sums.stacked import Stacked

# The interface of a plan for the replay of a program.
#
# A *reader* is an operator that has a value as operand. A value is *partial* if each
# device holds a term of a sum (`autopar_passes.sums.stacked`). A reader in the backward
# pass may use an array of its own, called the backward copy.


# A gather of an array on a mesh, which a plan writes as a collective of its own.
Gather = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRoute:
    """The sequence of layouts from a value's own layout to a reader's layout.

    Attributes:
      layouts: the layouts to state one after another; the last layout is the reader's.
        Readers whose routes begin with the same layouts share these arrays.
      fresh: whether the route starts from a new copy of the array. The readers then
        share no arrays with readers of other routes, and the compiler does not merge
        them.
      gathers: position in ``layouts`` -> the function that brings an array in the
        layout before into this one. Where there is none, the compiler does so.
    """

    layouts: tuple[Layout, ...]
    fresh: bool = False
    gathers: Mapping[int, Gather] = dataclasses.field(default_factory=dict[int, Gather])


class LayoutPlan(Protocol):
    """The questions that the replay asks a plan about layouts."""

    def operand(self, op: Operator, slot: int) -> Layout | None:
        """Returns the layout that an operand must have; None for any layout."""
        ...

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        """Returns the layouts to state for a result, in order; empty for none."""
        ...

    def floating(self, value: int) -> bool:
        """Returns whether each reader recomputes the value, in its own layout."""
        ...

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        """Returns the layouts from a value's own layout to a reader's layout."""
        ...

    def is_backward(self, op: Operator) -> bool:
        """Returns whether an operator reads the backward copies of its operands."""
        ...

    def gathers_keys(self, op: Operator) -> bool:
        """Returns whether an attention kernel gathers the keys and values of a sequence
        that devices share. If not, they travel around a ring.
        """
        ...

    def output(self, position: int) -> Layout | None:
        """Returns the layout of a flat output; None for any layout."""
        ...

    def partial_layout(self, value: int) -> tuple[tuple[int, ...], Layout] | None:
        """Returns a value's partial axes and its layout; None if the value is whole."""
        ...

    def due(self, value: int) -> tuple[Layout, ...] | None:
        """Returns the layouts to state, in order, after a partial value is summed.

        The result is None if the plan defers the sum to a later reader.
        """
        ...

    def sums(self, value: int, *, handed: bool = False) -> tuple[Sum, ...]:
        """Returns the explicit collectives that complete the sum of a partial value.

        If every reader of the value uses only a slice of it, the last collective may be
        a reduce-scatter that leaves each device its slice. An empty result means that
        the compiler chooses the collectives from the stated layouts.

        Args:
          value: the value.
          handed: whether the value also leaves its region or program, in its own
            layout.
        """
        ...


# Reads a value of the current scope: an array, or a value that is still partial.
Read = Callable[[int], Any]


class Watch(Protocol):
    """Observes values of a step: in iterations of loops, and at the step's end."""

    def inside(self, equation: int, read: Read, mesh: Any) -> Any:
        """Returns values of one iteration, which the loop stacks and gives to `after`.

        Args:
          equation: the loop.
          read: reads a value of the iteration.
          mesh: the mesh on which the iteration runs. The axis of replicas is manual.
        """
        ...

    def after(self, equation: int, seen: Any) -> None:
        """Receives what `inside` returned in each iteration of a loop, stacked.

        If replicas run the iterations, arrays ``(devices, ...)`` of an iteration are
        zero for the devices of other replicas.
        """
        ...

    def end(self, read: Read) -> None:
        """Reads values of the step after the step has computed all its values."""
        ...


class Synchroniser(Protocol):
    """Computes the sums of partial values over devices, for example with a codec."""

    def takes(self, value: int) -> frozenset[int]:
        """Returns the values that are summed together with this one; empty for none."""
        ...

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """Computes the sums of partial values, in the layouts of the plan."""
        ...


class Forms:
    """The values of one scope and their resharded forms.

    Attributes:
      values: the arrays by value number.
      forms: the arrays in other layouts; readers with the same layout share them.
      outer: the scope around this one.
    """

    def __init__(self, values: dict[int, Any], outer: Forms | None) -> None:
        """Starts a scope with values."""
        self.values = values
        self.forms: dict[tuple[Any, ...], Any] = {}
        self.outer = outer

    def holder(self, number: int) -> Forms:
        """Returns the innermost scope that contains a value.

        Raises:
          KeyError: no scope contains the value.
        """
        scope: Forms | None = self
        while scope is not None:
            if number in scope.values:
                return scope
            scope = scope.outer
        raise KeyError(number)

    def value(self, number: int) -> Any:
        """Returns the array of a value."""
        return self.holder(number).values[number]


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedOrder:
    """The order of a ring of devices in which a plan holds tokens.

    Attributes:
      of: the values in this order.
      axes: the mesh axes of the ring, major to minor.
      size: the number of devices of the ring.
    """

    of: RingOrder
    axes: tuple[int, ...]
    size: int

    def turned(
        self,
        array: Any,
        dims: Sequence[int],
        turn: int,
        layout: Layout | None,
        mesh: Any,
    ) -> Any:
        """Permutes tokens; first gathers the dimensions of tokens.

        Args:
          array: the array.
          dims: its dimensions of tokens.
          turn: 1 for the order of the ring, -1 for the plain order.
          layout: the layout of the result; None for any.
          mesh: the mesh of the layouts.
        """
        known = ((),) * array.ndim if layout is None else layout
        whole = tuple(() if d in dims else axes for d, axes in enumerate(known))
        array = constrain(array, mesh, whole)
        for dim in dims:
            array = (to_ring if turn > 0 else from_ring)(array, dim, self.size)
        # The partitioner must not shard the permutation itself.
        array = constrain(array, mesh, whole)
        return array if layout is None else constrain(array, mesh, layout)


class Values:
    """The values of a program that is being replayed.

    Attributes:
      plan: the layouts.
      mesh: the mesh of the layouts.
      scope: the innermost scope.
      order: the values that are held in the order of a ring; None for none.
      turn: the token of the last ordered callback.
    """

    def __init__(
        self,
        producer: Mapping[int, Operator],
        sources: Mapping[int, Equation],
        plan: LayoutPlan,
        mesh: Any,
        synchroniser: Synchroniser | None,
        values: dict[int, Any],
        watch: Watch | None = None,
    ) -> None:
        """Starts with the inputs of the program.

        Args:
          producer: the operator that computes each value.
          sources: the equations by index.
          plan: the layouts.
          mesh: the mesh of the layouts.
          synchroniser: computes deferred sums; None for plain reductions.
          values: the inputs by value number.
          watch: observes the step's values; None for no observer.
        """
        self.watch = watch
        self.producer = producer
        self.sources = sources
        self.plan = plan
        self.mesh = mesh
        self.synchroniser = synchroniser
        self.scope = Forms(values, None)
        self.order: PlacedOrder | None = None
        self.turn: Any = jax_compat.FIRST

    @contextlib.contextmanager
    def inside(self, values: dict[int, Any]) -> Generator[None]:
        """Opens the scope of a region, with the values of its inputs."""
        self.scope = Forms(values, self.scope)
        yield
        assert self.scope.outer is not None
        self.scope = self.scope.outer

    def pin(self, array: Any, layouts: Sequence[Layout]) -> Any:
        """States layouts of an array, one after another."""
        for layout in layouts:
            array = constrain(array, self.mesh, layout)
        return array

    def plain(self, atom: Atom) -> Any:
        """Returns a value in its current layout."""
        if isinstance(atom, Scalar):
            return atom.value
        if self.order is not None and (turn := self.order.of.turn(atom, -1)):
            return self._turned(atom, turn, None, False)
        if self.plan.floating(atom) and atom not in self.scope.values:
            return self.make(atom, None, False)
        return self.whole(atom)

    def as_held(self, value: int) -> Any:
        """Returns a value as stored in the scope: an array, or a partial value."""
        if self.plan.floating(value) and self.scope.values.get(value) is None:
            return self.make(value, None, False)
        return self.scope.value(value)

    def whole(self, value: int) -> Any:
        """Returns the array of a value; computes a deferred sum if necessary."""
        array = self.scope.value(value)
        return self.sum_together(value) if isinstance(array, Stacked) else array

    def sum_together(self, value: int) -> Any:
        """Computes a value's sum, with all sums that are synchronised with it."""
        assert self.synchroniser is not None
        values = self.scope.holder(value).values
        together = {
            v: values[v]
            for v in sorted(self.synchroniser.takes(value))
            if isinstance(values.get(v), Stacked)
        }
        values.update(self.synchroniser.take(together))
        return values[value]

    def read(
        self, atom: Atom, layout: Layout | None, backward: bool, reader: int = -1
    ) -> Any:
        """Returns a value in a reader's layout.

        A reader in the backward pass may use the backward copy.

        Args:
          atom: the value.
          layout: the reader's layout; None for any.
          backward: whether the reader may use the backward copy.
          reader: index of the equation that reads the value, which says in which order
            it reads tokens; -1 for the plain order.
        """
        if isinstance(atom, Scalar):
            return atom.value
        if self.order is not None and (turn := self.order.of.turn(atom, reader)):
            return self._turned(atom, turn, layout, backward)
        if self.plan.floating(atom):
            return self.make(atom, layout, backward)
        array = self.whole(atom)
        if layout is None:
            return array
        forms = self.scope.forms
        route = self.plan.route(atom, layout, backward)
        key: tuple[Any, ...] = (atom, route.fresh)
        if route.fresh:
            if key not in forms:
                forms[key] = jax.lax.optimization_barrier(array)
            array = forms[key]
        for position, stated in enumerate(route.layouts):
            key = (*key, stated)
            if key not in forms:
                gather = route.gathers.get(position)
                forms[key] = (
                    constrain(array, self.mesh, stated)
                    if gather is None
                    else gather(array, self.mesh)
                )
            array = forms[key]
        return array

    def _turned(
        self, value: int, turn: int, layout: Layout | None, backward: bool
    ) -> Any:
        """Returns a value with its tokens permuted (`RingOrder.turn`)."""
        key, forms = ("turned", value, layout), self.scope.forms
        if key not in forms:
            assert self.order is not None
            floating = self.plan.floating(value)
            array = self.make(value, None, backward) if floating else self.whole(value)
            dims = self.order.of.dims[value]
            forms[key] = self.order.turned(array, dims, turn, layout, self.mesh)
        return forms[key]

    def make(self, value: int, layout: Layout | None, backward: bool) -> Any:
        """Computes a floating value in the layout that its reader needs."""
        key = ("floating", value, layout, backward)
        forms = self.scope.forms
        if key not in forms:
            op = self.producer[value]
            eqn = self.sources[op.equation]
            wanted = _operand_layouts(op, layout)
            args = [
                self.read(a, w, backward, op.equation)
                for a, w in zip(eqn.inputs, wanted, strict=True)
            ]
            with jax_compat.source_of(eqn.source):
                (array,) = jax_compat.bind(eqn.source, *args)
            forms[key] = (
                array if layout is None else constrain(array, self.mesh, layout)
            )
        return forms[key]

    def operand(self, op: Operator, slot: int, atom: Atom) -> Any:
        """Returns an operand in the layout of the plan."""
        layout = self.plan.operand(op, slot)
        return self.read(atom, layout, self.plan.is_backward(op), op.equation)

    def partial_operand(self, op: Operator, slot: int, atom: Atom) -> Any:
        """Returns a partial operand unchanged, and any other like `operand`."""
        if (
            isinstance(atom, int)
            and self.plan.partial_layout(atom) is not None
            and self.plan.due(atom) is None
            and not (self.order and self.order.of.turn(atom, op.equation))
        ):
            array = self.scope.value(atom)
            if isinstance(array, Stacked):
                return array
        return self.operand(op, slot, atom)

    def defer(self, value: int, array: Any) -> Any:
        """Makes a stacked array a partial value.

        If the plan does not defer the sum, computes the sum at once.
        """
        found = self.plan.partial_layout(value)
        assert found is not None
        partial = stacked.stack(array, *found, self.mesh)
        due = self.plan.due(value)
        if due is None:
            return partial
        if self.synchroniser is not None and self.synchroniser.takes(value):
            return partial
        sums = self.plan.sums(value)
        if not sums:
            return self.pin(stacked.total(partial), due)
        layout = (partial.axes, *partial.layout)
        total = run_and_sum(
            lambda shard: shard[0], [partial.array], [layout], sums, self.mesh
        )
        return self.pin(total, behind(due, sums))


def _operand_layouts(op: Operator, layout: Layout | None) -> list[Layout | None]:
    """The layouts of a floating operator's operands, from its result's layout."""
    if layout is None:
        return [None] * len(op.inputs)
    given = {
        dim[0]: axes
        for dim, axes in zip(op.rule.results[0], layout, strict=True)
        if dim
    }
    return [
        tuple(given.get(d[0], ()) if d else () for d in dims)
        for dims in op.rule.operands
    ]
